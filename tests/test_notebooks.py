"""The notebooks: what is committed is what is generated, it has been run, and it still runs."""

import ast
import dataclasses
import importlib
import json
import re
import textwrap

import nbformat
import pytest

from notebooks import generate
from tests.conftest import ROOT

NAMES = list(generate.narratives())
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("[a-z]*.py"))}
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
    page = (generate.FOLDER / "README.md").read_text()
    assert set(re.findall(r"^\| \[.*\]\((\w+).ipynb\)", page, re.MULTILINE)) == set(NAMES)


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


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_a_recipe_in_parts_is_the_whole_recipe(path):
    """All its statements but those of a program and early returns, once, in their order."""
    parts = generate.recipe_parts(path)
    whole = ast.parse(path.read_text())
    kept = []
    for node in whole.body[1:]:
        if getattr(node, "name", None) == "train_and_evaluate":
            kept += node.body[1:]
        elif getattr(node, "name", None) != "main":
            kept.append(node)
    program = re.compile(r"if (__name__ ==|.*\n    return)")
    written = [code for code in map(ast.unparse, kept) if not program.match(code)]
    joined = ast.parse("\n".join(text for name, text in parts.items() if name != "docstring"))
    shown = [ast.unparse(node) for node in joined.body]
    assert shown[:-1] == written[:-1]
    assert shown[-1] == written[-1].replace("return ", "")
    assert parts["docstring"] == ast.get_docstring(whole)
    for comment in re.findall(r"^ *# .*", "\n".join(parts.values()), re.MULTILINE):
        assert comment in path.read_text()


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_each_block_of_a_recipe_is_a_cell_after_words_of_its_own(path):
    blocks = [text for name, text in generate.recipe_parts(path).items() if name.startswith("train_and_evaluate ")]
    cells = generate.generate(generate.narratives()[path.stem]).cells
    places = [i for i, cell in enumerate(cells) if cell.source in blocks]
    assert [cells[i].source for i in places] == blocks
    assert all(cells[i - 1].cell_type == "markdown" for i in places)
    for block in blocks:
        compile(block, path.name, "exec")  # no return is left


def test_blank_lines_between_statements_divide_a_body():
    body = """
        a = 1
        if a:
            return None

        def f(x):

            return x

        # Why.
        g(
            a,
        )

        with a:
            return f(a)  # at last
    """
    assert generate.blocks_of(textwrap.dedent(body).strip()) == [
        ["a = 1"],
        ["", "def f(x):", "", "    return x"],
        ["", "# Why.", "g(", "    a,", ");"],
        ["", "with a:", "    f(a)  # at last"],
    ]


@pytest.fixture
def narrative(tmp_path):
    """Writes a narrative beside a small recipe, and gives its notebook."""
    recipe = (
        '"""Doc."""\nimport os\n\n\nclass Config:\n    pass\n\n\nimport sys\n\n\n# Why.\ndef build_model():\n    pass\n'
    )
    recipe += '\n\ndef train_and_evaluate():\n    """Doc."""\n    x = 1\n\n    return x\n\n\ndef main():\n    pass\n'
    (tmp_path / "recipe.py").write_text(recipe)

    def notebook(text):
        (tmp_path / "narrative.md").write_text(text)
        return generate.generate(tmp_path / "narrative.md")

    return notebook


PARTS = ("docstring", "environment", "Config", "imports", "build_model", "train_and_evaluate 1", "train_and_evaluate 2")


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
        ("code", "# Why.\ndef build_model():\n    pass"),
        ("code", "x = 1"),
        ("code", "x;"),
        ("code", generate.INSTALL),
    ]


@pytest.mark.parametrize("parts", [PARTS[:-1], PARTS[::-1], (*PARTS, "main")], ids=["one missing", "order", "unknown"])
def test_a_narrative_has_all_parts_of_a_recipe_in_their_order(narrative, parts):
    with pytest.raises(ValueError, match="train_and_evaluate 2"):
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


def what_is_computed(results):
    measured = {"seconds", "tokens_per_second", "mfu", "peak_flops_per_second", "input_wait_fraction", "peak_memory_mb"}
    return {name: value for name, value in results.items() if name not in {*measured, "config"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_gives_the_results_of_its_recipe(name, small, monkeypatch):
    recipe = importlib.import_module(f"recipes.{name if name in RECIPES else 'bert_mlm'}")
    options = {field.name for field in dataclasses.fields(recipe.Config)} - {"workdir"}
    if name not in RECIPES:
        options.remove("max_steps")  # as many as it takes to kill a worker on the way
    tiny = {name: value for name, value in small.items() if name in options}
    monkeypatch.setenv("NOTEBOOK_OPTIONS", json.dumps(tiny))
    files = {path: path.stat().st_mtime_ns for path in generate.FOLDER.iterdir()}
    notebook = generate.generate(generate.narratives()[name])
    if name in RECIPES:
        notebook.cells.append(nbformat.v4.new_code_cell("print(json.dumps(results))"))
    generate.execute(notebook, timeout=200)
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    assert {path: path.stat().st_mtime_ns for path in generate.FOLDER.iterdir()} == files
    if name in RECIPES:
        results = json.loads(notebook.cells[-1].outputs[0].text)
        expected = recipe.train_and_evaluate(recipe.Config(**tiny, workdir=small["workdir"]))
        assert what_is_computed(results) == what_is_computed(json.loads(json.dumps(expected)))
