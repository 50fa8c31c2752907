"""The notebooks: what is committed is what is generated, it has been run, and it still runs."""

import importlib.util
import json
import re
import types

import nbformat
import pytest

from notebooks import generate
from tests.conftest import ROOT

NAMES = list(generate.narratives())
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("[a-z]*.py"))}


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_what_is_generated_and_was_run(name):
    notebook = nbformat.read(generate.FOLDER / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    again = generate.generate(generate.narratives()[name], generate.ADDRESS.search(code[0].source)[1])
    sources, generated = ([(cell.cell_type, cell.source) for cell in each.cells] for each in (notebook, again))
    assert sources == generated, "run `python -m notebooks.generate`"
    advice = "run `python -m notebooks.generate --execute`"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), advice
    assert not [shown for shown in outputs(notebook) if shown.output_type == "error" or shown.get("name") == "stderr"]


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_a_recipe_in_parts_is_the_whole_recipe(path):
    """All its lines but those of a program and of early returns, and the function in blocks."""
    parts = generate.recipe_parts(path)
    shown = {line.strip().removesuffix(";") for part in parts.values() for line in part.splitlines()}
    shown |= {f"return {line}" for line in shown}
    program = path.read_text().index("\ndef main(")
    left = [line.strip() for line in path.read_text()[:program].splitlines() if line.strip() not in shown]
    known = (
        r'# SPDX|"""|if (__name__|run\.results|config\.dry_run)|CONFIG = |return (run|print)|def train_|with open_run'
    )
    assert [line for line in left if not re.match(known, line)] == []
    assert "train_and_evaluate 5" in parts


@pytest.fixture
def narrative(tmp_path):
    """Writes a narrative, and gives its notebook."""

    def notebook(text, address=""):
        (tmp_path / "narrative.md").write_text(text)
        return generate.generate(tmp_path / "narrative.md", address)

    return notebook


def test_all_parts_of_a_recipe_must_be_there_in_their_order(narrative):
    path = RECIPES["bert_mlm"]
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
