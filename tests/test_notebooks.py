"""The notebooks: what is committed is what is generated, it has been run, and it still runs."""

import ast
import dataclasses
import importlib.util
import json
import re
import sys
import textwrap
import types

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


def address_in(notebook):
    """That of the collection, in the first cell of code."""
    return generate.ADDRESS.search(next(cell.source for cell in notebook.cells if cell.cell_type == "code"))[1]


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
    notebook = committed(name)
    again = generate.generate(generate.narratives()[name], address_in(notebook))
    assert without_outputs(notebook) == without_outputs(again), advice
    assert address_in(notebook) == address_in(committed(NAMES[0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_ends_with_three_things_to_try(name):
    last = committed(name).cells[-1]
    assert last.cell_type == "markdown"
    assert re.findall(r"^(?:## (.*)|(\d)\. )", last.source, re.MULTILINE)[-4:] == [
        ("Three things to try", ""), *(("", str(number)) for number in (1, 2, 3)),
    ]  # fmt: skip


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

    def body_of(node):
        """With the body of a `with ... as` at its end, where blank lines divide that."""
        *before, last = node.body[1:]
        lines = path.read_text().splitlines()[last.lineno - 1 : last.end_lineno]
        if not isinstance(last, ast.With) or "" not in lines:
            return node.body[1:]
        item = last.items[0]
        opened = ast.parse(f"{ast.unparse(item.optional_vars)} = {ast.unparse(item.context_expr)}").body
        return [*before, *opened, *last.body]

    for node in whole.body[1:]:
        if getattr(node, "name", None) == "train_and_evaluate":
            kept += body_of(node)
        elif getattr(node, "name", None) != "main":
            kept.append(node)
    program = re.compile(r"if (__name__ ==|.*\n    return)")
    written = [code for code in map(ast.unparse, kept) if not program.match(code)]
    joined = ast.parse("\n".join(text for name, text in parts.items() if name != "docstring"))
    *shown, last = joined.body
    if isinstance(last, ast.With) and ast.unparse(last.items[0]) == "publish":  # around the last block
        shown += last.body
    else:
        shown.append(last)
    shown = [ast.unparse(node) for node in shown]
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


def test_blank_lines_divide_a_context_too():
    body = """
        a = 1

        with f(
            a,
        ) as name:
            # Why.
            g(a)

            for i in a:

                h(i)

            h("a\\n")
            return i
    """
    assert generate.blocks_of(textwrap.dedent(body).strip()) == [
        ["a = 1"],
        ["", "name = f(", "    a,", ")", "# Why.", "g(a);"],
        ["", "for i in a:", "", "    h(i)"],
        ["", "with name:", '    h("a\\n")', "    i"],
    ]


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_the_bones_of_a_recipe_are_cells_of_their_own(path):
    """Strategy, data, model, training, evaluation, saving: no two of them in the same cell."""
    marks = {
        "strategy": r"^strategy = ",
        "data": r"= make_datasets\(",
        "model": r"^with strategy.scope\(\)",
        "training": r"^model\.fit\(|^controller\.train_and|^    checkpoints\.save\(",
        "evaluation": r"^results = training_results\(",
        "saving": r"run\.finish\(",
    }
    blocks = [text for name, text in generate.recipe_parts(path).items() if name.startswith("train_and_evaluate ")]
    places = {what: [i for i, text in enumerate(blocks) if re.search(mark, text, re.M)] for what, mark in marks.items()}
    assert all(len(where) == 1 for where in places.values()), places
    assert sorted(set(sum(places.values(), []))) == sum(places.values(), [])


def test_of_a_progress_bar_its_end_is_kept():
    bar = r"print('\r1/2', end=''); print('\r\x1b[1m2/2\x1b[0m', end=''); print('\x08\x08\x08done\nend')"
    notebook = generate.with_metadata([nbformat.v4.new_code_cell(bar)])
    generate.execute(notebook)
    assert notebook.cells[0].outputs[0].text == "done\nend\n"


@pytest.fixture
def narrative(tmp_path):
    """Writes a narrative beside a small recipe, and gives its notebook."""
    recipe = (
        '"""Doc."""\nimport os\n\n\nclass Config:\n    pass\n\n\nimport sys\n\n\n# Why.\ndef build_model():\n    pass\n'
    )
    recipe += '\n\ndef train_and_evaluate():\n    """Doc."""\n    x = 1\n\n    return x\n\n\ndef main():\n    pass\n'
    (tmp_path / "recipe.py").write_text(recipe)

    def notebook(text, address=""):
        (tmp_path / "narrative.md").write_text(text)
        return generate.generate(tmp_path / "narrative.md", address)

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

    function = 'def f():\n    """{}."""\n    return {}'
    old = notebook(function.format("One", 1))
    old.cells[0].outputs = [nbformat.v4.new_output("stream", text="shown")]
    for code, kept in (
        (f"{function.format('Once', 1)}  # a comment", True),
        ("def f():\n    return 1", True),
        (function.format("One", 2), False),
    ):
        new = notebook(code)
        generate.keep_outputs(new, old)
        assert bool(new.cells[0].outputs) == kept


def test_the_address_of_a_clone_is_in_the_first_cell_and_of_github_on_a_button(narrative):
    text = "# Title\n[install](generate.py)"
    for address in ("https://github.com/somebody/recipes", "https://example.com/recipes", ""):
        title, cell = narrative(text, address).cells
        assert f'\nADDRESS = "{address}"  # ' in cell.source
        button = "https://colab.research.google.com/github/somebody/recipes/blob/main/notebooks/narrative.ipynb"
        assert (button in title.source) == ("github.com" in address) == ("colab" in title.source)
    old, new = narrative(text), narrative(text, address="https://example.com/recipes")
    old.cells[1].outputs = [nbformat.v4.new_output("stream", text="shown")]
    generate.keep_outputs(new, old)
    assert new.cells[1].outputs


def test_the_first_cell_gets_the_recipes_where_they_are_not_installed(monkeypatch):
    commands = []
    names = {"get_ipython": lambda: types.SimpleNamespace(system=commands.append)}
    cell = generate.INSTALL.replace('ADDRESS = ""', 'ADDRESS = "https://example.com/recipes"')
    exec(cell, names)
    assert not commands
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(cell, names)
    clone, install = commands
    assert clone == "git clone -q https://example.com/recipes keras-replicas"
    assert install == f"{sys.executable} -m pip install -q -e './keras-replicas[recipes]' matplotlib"


def what_is_computed(results):
    measured = {"seconds", "tokens_per_second", "mfu", "peak_flops_per_second", "peak_memory_mb"}
    return {name: value for name, value in results.items() if name not in {*measured, "config"}}


# A recipe's cells are the recipe's own code, which its tests run; so one of those, and all others.
TO_RUN = ("data_parallel", "your_own_model", "text_classifier")


@pytest.mark.slow
@pytest.mark.parametrize("name", TO_RUN)
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
    generate.execute(notebook, timeout=6000)
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    assert {path: path.stat().st_mtime_ns for path in generate.FOLDER.iterdir()} == files
    if name in RECIPES:
        results = json.loads(notebook.cells[-1].outputs[0].text)
        expected = recipe.train_and_evaluate(recipe.Config(**tiny, workdir=small["workdir"]))
        assert what_is_computed(results) == what_is_computed(json.loads(json.dumps(expected)))
