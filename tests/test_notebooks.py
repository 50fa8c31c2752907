"""The notebooks and the guide: what is committed is what is generated, it has been run, and it still runs."""

import importlib.util
import json
import os
import re
import sys
import tomllib
import types
from importlib.metadata import version

import nbformat
import pytest
from packaging.requirements import Requirement

from notebooks import generate, tutobook
from tests.conftest import ROOT, python

GUIDE = tutobook.GUIDES / "data_parallel_training_with_keras_hub.py"
SOURCE = GUIDE.read_text(encoding="utf-8")
RESULTS = re.compile(
    r"2 replicas, batch 64, rate 1.41e-03.*validation loss (\S+), unigram baseline (\S+)\n"
    r".*SparseCategoricalCrossentropy: relative difference at most (\S+)\n"
    r"GlobalCrossEntropy: relative difference at most (\S+)\n",
    re.DOTALL,
)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("name", generate.narratives())
def test_a_notebook_is_what_is_generated_and_was_run(name):
    notebook = nbformat.read(generate.FOLDER / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    again = generate.generate(generate.narratives()[name], generate.ADDRESS.search(code[0].source)[1])
    sources, generated = ([(cell.cell_type, cell.source) for cell in each.cells] for each in (notebook, again))
    assert sources == generated, "run `python -m notebooks.generate`"
    advice = "run `python -m notebooks.generate --execute`"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), advice
    assert not [shown for shown in outputs(notebook) if shown.output_type == "error" or shown.get("name") == "stderr"]


@pytest.fixture
def narrative(tmp_path):
    """Writes a narrative, and gives its notebook."""

    def notebook(text, address=""):
        (tmp_path / "narrative.md").write_text(text)
        return generate.generate(tmp_path / "narrative.md", address)

    return notebook


def test_all_parts_of_a_recipe_must_be_there_in_their_order(narrative):
    path = ROOT / "recipes/bert_mlm.py"
    parts = [*generate.recipe_parts(path)]
    for linked in (parts[:-1], parts[::-1], [*parts, "main"]):
        with pytest.raises(ValueError, match=parts[-1]):
            narrative("\n".join(f"[{part}]({path})" for part in linked))


def test_outputs_are_kept_where_the_code_is(narrative):
    def notebook(docstring, value):
        return narrative(f'```python\ndef f():\n    """{docstring}."""\n    return {value}\n```')

    old = notebook("One", 1)
    old.cells[0].outputs = [nbformat.v4.new_output("stream", text="shown")]
    for new, kept in ((notebook("Once", 1), True), (notebook("One", 2), False)):
        generate.keep_outputs(new, old)
        assert bool(new.cells[0].outputs) == kept


def test_the_first_cell_gets_the_recipes_where_they_are_not_installed(narrative, monkeypatch):
    title, cell = narrative("# Title\n[install](generate.py)", "https://github.com/somebody/recipes").cells
    button = "https://colab.research.google.com/github/somebody/recipes/blob/main/notebooks/narrative.ipynb"
    assert button in title.source
    commands = []
    names = {"get_ipython": lambda: types.SimpleNamespace(system=commands.append)}
    exec(cell.source, names)
    assert not commands
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(cell.source, names)
    clone, install = commands
    assert clone == "git clone -q https://github.com/somebody/recipes keras-replicas"
    assert install.endswith(" -m pip install -q -e './keras-replicas[recipes]' matplotlib")


BEFORE_A_RELEASE = [pytest.param(name, marks=pytest.mark.long) for name in ("data_parallel", "bert_mlm")]


# A recipe's cells are the recipe's own code, which its tests run; so one of those, and all others.
@pytest.mark.parametrize("name", [pytest.param("your_own_model", marks=pytest.mark.slow), *BEFORE_A_RELEASE])
def test_a_notebook_runs(name, wikitext, monkeypatch):
    tiny = {"corpus": str(wikitext), "model": "nano", "vocabulary_size": 300, "seq_length": 32, "batch_size": 8}
    tiny |= {"dropout": 0.0, "epochs": 1}
    monkeypatch.setenv("NOTEBOOK_OPTIONS", json.dumps(tiny))
    notebook = generate.generate(generate.narratives()[name])
    generate.execute(notebook, timeout=6000)
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]


def check_results(printed):
    """That replicas are exact with the guide's loss alone; returns how much better than the baseline the model is."""
    loss, baseline, keras_difference, difference = map(float, RESULTS.search(printed).groups())
    assert difference < 1e-6 < 1e-5 < keras_difference
    return baseline - loss


def test_the_guide_imports_what_a_reader_has():
    names = re.findall(r"^(?:import|from) (\w+)", SOURCE, re.MULTILINE)
    assert set(names) - sys.stdlib_module_names == {"keras", "keras_hub", "numpy", "tensorflow"}


def test_the_guide_begins_as_keras_io_wants_it_and_a_script_runner_can_run_it():
    """keras.io's script asks for its header on the first line; a PEP 723 block may stand anywhere after it."""
    lines, fields = SOURCE.splitlines(), ["Title", "Author", "Date created", "Last modified", "Description"]
    assert lines[0] == '"""' and [line.split(": ")[0] for line in lines[1:6]] == fields and len(lines) <= 250
    (block,) = re.findall(r"^# /// script$\n(.*?)^# ///$", SOURCE, re.MULTILINE | re.DOTALL)
    head = tomllib.loads(re.sub("^# ?", "", block, flags=re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert head["requires-python"] == project["requires-python"]
    needs = [*map(Requirement, head["dependencies"])]
    assert [need.name for need in needs if need.specifier.contains(version(need.name))] == [need.name for need in needs]


def test_the_guides_notebook_is_what_is_generated_and_was_run():
    notebook = nbformat.read(GUIDE.with_suffix(".ipynb"), as_version=4)
    both = notebook, tutobook.notebook_of(GUIDE)
    sources, generated = ([(cell.cell_type, cell.source) for cell in each.cells] for each in both)
    assert sources == generated, "run `python -m notebooks.tutobook`"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert check_results("".join(output.text for cell in code for output in cell.outputs)) > 0.05


@pytest.mark.slow
def test_the_guide_runs_alone(tmp_path):
    """From an empty folder, with two epochs of its four, and a part of its text."""
    small = SOURCE.replace("EPOCHS = 4\n", "EPOCHS = 2\n").replace(' + sorted(library.glob("[a-z]*/*.py"))', "")
    assert len(small) < len(SOURCE) - 30
    (tmp_path / GUIDE.name).write_text(small, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("KERAS_BACKEND", "PYTHONPATH")}
    environment |= {"CUDA_VISIBLE_DEVICES": "-1"}
    done = python("-I", GUIDE.name, cwd=tmp_path, env=environment)  # -I: neither PYTHONPATH nor the user's packages
    assert done.returncode == 0, done.stderr[-2000:]
    check_results(done.stdout)
    assert list(tmp_path.glob("logs/train/events*")) and list(tmp_path.glob("logs/validation/events*"))
