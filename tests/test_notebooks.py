"""The notebooks and the guide: what is committed is what is generated, it has been run, and it still runs."""

import copy
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
from IPython.core.inputtransformer2 import TransformerManager
from packaging.requirements import Requirement

from notebooks import generate, tutobook
from tests.conftest import ROOT, imported, python

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
    again = generate.generate(generate.narratives()[name], generate.MAGIC.search(code[0].source)[1] or "")
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


def test_all_parts_of_a_recipe_must_be_there_in_their_order_and_of_a_second_one_only_what_differs(narrative):
    def links(name, parts):
        return "\n".join(f"[{part}]({ROOT}/recipes/{name}.py)" for part in parts)

    parts = [*generate.recipe_parts(ROOT / "recipes/text_classifier.py")]
    for linked in (parts[:-1], parts[::-1], [*parts, "main"]):
        with pytest.raises(ValueError, match=parts[-1]):
            narrative(links("text_classifier", linked))
    both, first = ["GlueTrainer", "train_and_evaluate 3"], links("text_classifier", parts)
    assert len(narrative(f"{first}\n{links('glue_controller', both)}").cells) == len(parts) + 2
    for linked in (["make_datasets", *both], both[::-1]):
        with pytest.raises(ValueError, match="must link to GlueTrainer, train_and_evaluate 3 of glue_controller.py"):
            narrative(f"{first}\n{links('glue_controller', linked)}")


@pytest.mark.parametrize("name", generate.narratives())
def test_each_name_of_ours_that_a_notebook_imports_stands_in_its_narrative(name):
    """Not only in the recipe's own cells, which are to be explained."""
    cells = generate.generate(generate.narratives()[name]).cells
    code = "\n".join(generate.MAGIC.sub("pass", cell.source) for cell in cells if cell.cell_type == "code")
    ours = {each for each in imported(code) if re.match("keras_replicas|common|recipes", each)}
    names = {each.rpartition(".")[2] for each in ours if each.rpartition(".")[0] in ours}  # the others are modules
    said = re.sub(r"^(from \S+ )?import .*", "", generate.narratives()[name].read_text(), flags=re.MULTILINE)
    assert names - set(re.findall(r"\w+", said)) == set()


def test_outputs_are_kept_where_the_code_is(narrative):
    def notebook(docstring, value):
        return narrative(f'```python\ndef f():\n    """{docstring}."""\n    return {value}\n```')

    old = notebook("One", 1)
    old.cells[0].outputs = [nbformat.v4.new_output("stream", text="shown")]
    for new, kept in ((notebook("Once", 1), True), (notebook("One", 2), False)):
        generate.keep_outputs(new, old)
        assert bool(new.cells[0].outputs) == kept


def test_the_first_cell_gets_the_recipes_where_they_are_not_installed(narrative, monkeypatch):
    address = "https://github.com/somebody/recipes"
    title, cell = narrative("# Title\n[install](generate.py)", address).cells
    button = "https://colab.research.google.com/github/somebody/recipes/blob/main/notebooks/narrative.ipynb"
    assert button in title.source
    assert len(list(filter(None, cell.source.splitlines()))) == 3
    commands = []
    names = {"get_ipython": lambda: types.SimpleNamespace(run_line_magic=lambda *words: commands.append(words))}
    code = TransformerManager().transform_cell(cell.source)
    exec(code, names)
    assert not commands
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(code, names)
    assert commands == [("pip", f"install -q 'keras-replicas[recipes,notebooks]' -e git+{address}#egg=keras-replicas")]
    here = narrative("# Title\n[install](generate.py)").cells[1].source
    assert here.endswith(" -e ..") and generate.MAGIC.search(here) and generate.MAGIC.search(cell.source)[1] == address


BEFORE_A_RELEASE = ("data_parallel", "bert_mlm", "bert_from_scratch", "causal_lm", "glue_custom_loop")
BEFORE_A_RELEASE = [pytest.param(name, marks=pytest.mark.long) for name in BEFORE_A_RELEASE]
IN_CI = [pytest.param(name, marks=pytest.mark.slow) for name in ("your_own_model", "text_classifier")]


@pytest.mark.parametrize("name", [*IN_CI, *BEFORE_A_RELEASE])
def test_a_notebook_runs_with_each_cell_run_twice(name, wikitext, monkeypatch):
    tiny = {"model": "nano", "vocabulary_size": 300, "seq_length": 32, "batch_size": 8, "dropout": 0.0, "epochs": 1}
    tiny |= {"max_steps": 6} if name in ("text_classifier", "glue_custom_loop") else {"corpus": str(wikitext)}
    monkeypatch.setenv("NOTEBOOK_OPTIONS", json.dumps(tiny))
    notebook = generate.generate(generate.narratives()[name])
    notebook.cells = [copy.deepcopy(cell) for cell in notebook.cells for _ in range(2)]
    generate.execute(notebook, timeout=6000)
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = "".join(cell.outputs[0].text for cell in code if "steps.jsonl ends" in cell.source)
    last = [json.loads(line) for line in re.findall("steps.jsonl ends: (.*)", shown)]
    assert all(line["learning_rate"] > 0 for line in last) and (last or name in ("data_parallel", "your_own_model"))


def check_results(printed):
    """That replicas are exact with the guide's loss alone; returns how much better than the baseline the model is."""
    loss, baseline, keras_difference, difference = map(float, RESULTS.search(printed).groups())
    assert difference < 1e-6 < 1e-5 < keras_difference
    return baseline - loss


def test_the_guide_imports_what_a_reader_has():
    names = re.findall(r"^(?:import|from) (\w+)", SOURCE, re.MULTILINE)
    assert set(names) - sys.stdlib_module_names == {"keras", "keras_hub", "numpy", "tensorflow"}


def test_the_guide_has_keras_io_and_script_headers():
    """keras.io's script asks for its header on the first line; a PEP 723 block may stand anywhere after it."""
    lines, fields = SOURCE.splitlines(), ["Title", "Author", "Date created", "Last modified", "Description"]
    assert lines[0] == '"""' and [line.split(": ")[0] for line in lines[1:6]] == fields
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
