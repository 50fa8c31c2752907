"""The notebooks: what is committed is what is generated, it has been run, and it still runs."""

import ast
import json
import re

import nbformat
import pytest

from notebooks import generate
from tests.conftest import ROOT

NAMES = list(generate.narratives())
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|var|work|content|Users|private)/|[A-Z]:\\")


def committed(name):
    return nbformat.read(generate.FOLDER / f"{name}.ipynb", as_version=4)


def without_outputs(notebook):
    return [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells], dict(notebook.metadata)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def texts(notebook):
    """All that a reader sees, pictures aside."""
    for output in outputs(notebook):
        yield output.get("text", "")
        yield from (content for kind, content in output.get("data", {}).items() if kind.startswith("text/"))


def test_each_narrative_has_a_notebook_and_each_notebook_a_narrative():
    assert {path.stem for path in generate.FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_what_is_generated(name):
    advice = "run `python -m notebooks.generate`"
    assert without_outputs(committed(name)) == without_outputs(generate.generate(generate.narratives()[name])), advice


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_was_run_and_shows_no_noise(name):
    notebook = committed(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    advice = "run `python -m notebooks.generate --execute`"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), advice
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    for text in texts(notebook):
        assert not ABSOLUTE_PATH.search(text)
        assert not re.search(r"warning|\x1b|\r|\x08|INFO:|^[IWE]0000", text, re.IGNORECASE | re.MULTILINE)
    assert (generate.FOLDER / f"{name}.ipynb").stat().st_size < 400_000


def test_a_recipe_in_parts_is_the_whole_recipe():
    """All its statements but those of a program, once, in their order."""
    for path in (ROOT / "recipes").glob("[a-z]*.py"):
        parts = generate.recipe_parts(path)
        whole = ast.parse(path.read_text())
        kept = [node for node in whole.body[1:] if not isinstance(node, ast.If)]
        joined = ast.parse("\n".join(text for name, text in parts.items() if name != "docstring"))
        assert [*map(ast.dump, joined.body)] == [*map(ast.dump, kept)]
        assert parts["docstring"] == ast.get_docstring(whole)
        for comment in re.findall(r"^ *# .*", "\n".join(parts.values()), re.MULTILINE):
            assert comment in path.read_text()


@pytest.fixture
def narrative(tmp_path):
    """Writes a narrative beside a small recipe, and gives its notebook."""
    recipe = '"""Doc."""\nimport os\n\n\nclass Config:\n    pass\n\n\nimport sys\n\n\n# Why.\ndef main():\n    pass\n'
    (tmp_path / "recipe.py").write_text(recipe)

    def notebook(text):
        (tmp_path / "narrative.md").write_text(text)
        return generate.generate(tmp_path / "narrative.md")

    return notebook


PARTS = ("docstring", "environment", "Config", "imports", "main")


def test_text_blocks_and_links_become_cells(narrative):
    links = "\n".join(f"[{part}](recipe.py)" for part in PARTS)
    notebook = narrative(
        f"# Title\nand a [link](recipe.py) in a line\n\n```python\n1 + 1\n```\n{links}\n[install](generate.py)"
    )
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        ("markdown", "# Title\nand a [link](recipe.py) in a line"),
        ("code", "1 + 1"),
        ("markdown", "Doc."),
        ("code", "import os"),
        ("code", "class Config:\n    pass"),
        ("code", "import sys"),
        ("code", "# Why.\ndef main():\n    pass"),
        ("code", generate.INSTALL),
    ]


@pytest.mark.parametrize("parts", [PARTS[:-1], PARTS[::-1], (*PARTS, "fit")], ids=["one missing", "order", "unknown"])
def test_a_narrative_has_all_parts_of_a_recipe_in_their_order(narrative, parts):
    with pytest.raises(ValueError, match="main"):
        narrative("\n".join(f"[{part}](recipe.py)" for part in parts))


def test_outputs_are_kept_where_the_code_is(narrative):
    def notebook(code):
        return narrative(f"```python\n{code}\n```\n```python\ny = 2\n```")

    old = notebook("x = 1")
    old.cells[0].outputs = [nbformat.v4.new_output("stream", text="shown")]
    for code, kept in (("x = 1  # a comment", True), ("x = 2", False)):
        new = notebook(code)
        generate.keep_outputs(new, old)
        assert bool(new.cells[0].outputs) == kept


def test_colab_is_offered_only_where_it_finds_the_notebook(narrative, monkeypatch):
    assert ("/OWNER/" in generate.REPOSITORY) == ("colab.research" not in committed(NAMES[0]).cells[0].source)
    monkeypatch.setattr(generate, "REPOSITORY", "https://github.com/somebody/recipes")
    address = "https://colab.research.google.com/github/somebody/recipes/blob/main/notebooks/narrative.ipynb"
    assert address in narrative("# Title").cells[0].source


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, small, monkeypatch):
    del small["workdir"]  # the notebook's own, in a folder that is removed
    config = (ROOT / f"recipes/{name}.py") if (ROOT / f"recipes/{name}.py").exists() else ROOT / "recipes/bert_mlm.py"
    options = {
        statement.target.id
        for node in ast.parse(config.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Config"
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    tiny = {name: value for name, value in small.items() if name in options}
    monkeypatch.setenv("NOTEBOOK_OPTIONS", json.dumps(tiny))
    files = {path: path.stat().st_mtime_ns for path in generate.FOLDER.iterdir()}
    notebook = generate.generate(generate.narratives()[name])
    generate.execute(notebook, timeout=200)
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    assert {path: path.stat().st_mtime_ns for path in generate.FOLDER.iterdir()} == files
