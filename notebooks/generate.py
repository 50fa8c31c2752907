# SPDX-License-Identifier: Apache-2.0
"""Makes the notebooks: `python -m notebooks.generate [--execute] [NAME ...]`.

`NAME.md` is a notebook's narrative, and its only source. Text becomes a Markdown cell; a block of Python, a code cell;
and a line that is a link alone, a cell too:

    [make_datasets](../recipes/bert_mlm.py)          that part of the recipe, read from its file
    [train_and_evaluate 1](../recipes/bert_mlm.py)   the first block of that function
    [install](generate.py)                           the cell that installs the project where it is missing

A recipe's parts are its `docstring`, `environment` (all before `Config`), `Config`, `imports` (all before the first
function), its functions by name, and in place of `train_and_evaluate` its blocks, which blank lines divide, by number;
all of them must be there, in their order. What a recipe does where it is run as a program is left out, with `main`: a
notebook makes its own `Config`. Of a second recipe in the same notebook, some parts may be left out; what is there is
in its order, and differs from the first one's.

A clone with a public remote puts its address in the notebooks: for their first cell, which installs the clone that they
are in where there is none, and, of GitHub, for a button that opens them in Colab. So whoever publishes the collection
runs this once.

Without `--execute`, outputs are kept where the code is what it was, comments and docstrings aside, and removed
where it is not.
"""

import argparse
import ast
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import textwrap
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
LINK = re.compile(r"\[(\w+(?: \d+)?)\]\((\S+\.py)\)")
LINK_LINE = re.compile(r"^(\[\w+(?: \d+)?\]\(\S+\.py\))$", re.MULTILINE)
INSTALL = """\
import importlib.util

if not importlib.util.find_spec("recipes"):  # as on Colab; when it is done, restart the kernel
    %pip install -q 'keras-replicas[recipes,notebooks]' -e {place}"""
MAGIC = re.compile(r"%pip .* -e (?:git\+(.*)#egg=keras-replicas|\.\.)$", re.MULTILINE)  # the group: the address


def narratives() -> dict[str, Path]:
    """The narratives' files by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.md")) if path.stem != "README"}


def recipe_parts(recipe: Path) -> dict[str, str]:
    """A recipe's parts by name, in their order; see the module."""
    source = recipe.read_text(encoding="utf-8")
    docstring, *statements = ast.parse(source).body
    lines, end = source.splitlines(), docstring.end_lineno
    parts = {"docstring": [ast.get_docstring(ast.parse(source))]}
    for statement in statements:
        name = getattr(statement, "name", "imports" if "Config" in parts else "environment")
        if name == "train_and_evaluate":
            body = textwrap.dedent("\n".join(lines[statement.body[0].end_lineno : statement.end_lineno]))
            parts |= {f"{name} {number}": block for number, block in enumerate(blocks_of(body), start=1)}
        elif name != "main" and not isinstance(statement, ast.If):  # if __name__ == "__main__"
            parts.setdefault(name, []).extend(lines[end : statement.end_lineno])
        end = statement.end_lineno
    return {name: "\n".join(part).strip("\n") for name, part in parts.items()}


def blocks_of(body: str) -> list[list[str]]:
    """The lines of each block of a function's body, as cells: blank lines between its statements divide them.

    Each `if` that returns is left out, and the last `return` is an expression. A cell that ends with an expression gets
    a semicolon, so that its value is not shown. Blank lines in a `with ... as name:` at the end divide it too: the name
    is assigned first, and `with name:` is around the last block alone, so that it exits there.
    """
    lines, blocks, end = _divided(body).splitlines(), [[]], 0
    body = "\n".join(lines)
    for statement in ast.parse(body).body:
        if not lines[end]:
            blocks.append([])
        if not (isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return)):
            blocks[-1] += lines[end : statement.end_lineno]
        end = statement.end_lineno
    blocks[-1][-1] = blocks[-1][-1].replace("return ", "", 1)
    blocks = [block for block in blocks if block]
    for block in blocks:
        if isinstance(ast.parse("\n".join(block)).body[-1], ast.Expr):
            block[-1] += ";"
    return blocks


def _divided(body: str) -> str:
    """A body whose last statement is such a `with`, without it."""
    lines, last = body.splitlines(), ast.parse(body).body[-1]
    inner = getattr(last, "body", [])
    # The block after the last blank line between two of its statements.
    starts = [after for before, after in itertools.pairwise(inner) if not lines[before.end_lineno]]
    if not isinstance(last, ast.With) or not last.items[0].optional_vars or not starts:
        return body
    item, first = last.items[0], starts[-1].lineno - 1
    name = item.optional_vars.id
    opened = f"{name} = None  # closes it, where this cell is run again\n{name} = "
    opened += ast.get_source_segment(body, item.context_expr)
    middle = textwrap.dedent("\n".join(lines[item.optional_vars.end_lineno : first]))
    return "\n".join([*lines[: last.lineno - 1], opened, middle, f"with {name}:", *lines[first:]])


def public_address() -> str:
    """The https address of this clone's remote, without a user, password or query; empty for none, or a local one."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    if not shutil.which("git") or not git("ls-files", "notebooks/generate.py"):  # no clone, or somebody else's
        return ""
    remote = git("remote", "get-url", "origin").partition("?")[0]
    ways = (r"https?://(?:[^/]*@)?([\w.-]+(?::\d+)?)/(.+)", r"ssh://(?:[^/]*@)?([\w.-]+)(?::\d+)?/(.+)")
    for pattern in (*ways, r"[\w.-]+@([\w.-]+):(.+)"):
        if found := re.fullmatch(pattern, remote):
            host, path = found[1].removeprefix("ssh."), found[2].removesuffix("/").removesuffix(".git")
            return "" if re.match(r"(localhost|127\.[\d.]+)(:|$)", host) else f"https://{host}/{path}"
    return ""


def generate(narrative: Path, address: str = "") -> nbformat.NotebookNode:
    """The notebook of a narrative, without outputs.

    Args:
        narrative: its file.
        address: of `public_address`.

    Raises:
        ValueError: when it links to a part that a recipe does not have, or lacks one, or has them in another order; or
            when it shows again what two recipes share.
    """
    cells, linked = [], {}
    for text, code in _blocks(narrative.read_text(encoding="utf-8")):
        link = LINK.fullmatch(text)
        if not link:
            cells.append(new_code_cell(text) if code else new_markdown_cell(text))
        elif link[2] == "generate.py":
            place = f"git+{address}#egg=keras-replicas" if address else ".."
            cells.append(new_code_cell(INSTALL.format(place=place)))
        else:
            recipe = narrative.parent / link[2]
            parts = recipe_parts(recipe)
            if link[1] not in parts:
                raise ValueError(f"{recipe.name} has no part {link[1]}; it has {', '.join(parts)}")
            linked.setdefault(recipe, []).append(link[1])
            cells.append((new_markdown_cell if link[1] == "docstring" else new_code_cell)(parts[link[1]]))
    first: dict[str, str] = {}
    for recipe, names in linked.items():
        parts = recipe_parts(recipe)
        wanted = [name for name in parts if not first or (name in names and parts[name] != first.get(name))]
        if names != wanted:
            raise ValueError(f"{narrative.name} must link to {', '.join(wanted)} of {recipe.name}, in this order")
        first = first or parts
    if address.startswith("https://github.com/"):
        project = address.removeprefix("https://github.com/")
        colab = f"https://colab.research.google.com/github/{project}/blob/main/notebooks/{narrative.stem}.ipynb"
        cells[0].source += f"\n\n{BADGE}({colab})"
    return with_metadata(cells)


def with_metadata(cells: list[nbformat.NotebookNode]) -> nbformat.NotebookNode:
    """A notebook of these cells."""
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # nbformat's own are drawn anew each time
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return new_notebook(cells=cells, metadata=metadata)


def execute(notebook: nbformat.NotebookNode, timeout: int = 900) -> None:
    """Runs all cells in a folder of their own, which is removed, and keeps their outputs.

    Args:
        notebook: of `generate`.
        timeout: seconds for a cell.

    Raises:
        nbclient.exceptions.CellExecutionError: when a cell fails.
    """
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        resources = {"metadata": {"path": folder}}
        options = {"timeout": timeout, "record_timing": False, "coalesce_streams": True}
        # These recipes, whichever are installed; no progress bar that appears on a slow machine alone.
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
        environment |= {"PYTHONWARNINGS": "ignore:IProgress not found"}  # where there are no ipywidgets
        NotebookClient(notebook, resources=resources, **options).execute(env=environment)
    notebook.metadata = nbformat.from_dict(metadata)  # without this Python's version
    for cell in _code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if not _is_import_log(output)]
        for output in cell.outputs:
            if output.output_type == "stream":
                # A progress bar as it was at its end, without colours.
                output.text = re.sub(r"[^\n]*[\r\b]+(?=[^\n\r\b])|\r|\x1b\[[0-9;]*m", "", output.text)


def _is_import_log(output: nbformat.NotebookNode) -> bool:
    """Whether it is TensorFlow 2.21's log of its import, which no setting silences (tensorflow/tensorflow#100442)."""
    lines = output.text.splitlines() if output.get("name") == "stderr" else [""]
    return all(re.match(r"WARNING: All log messages before absl|I\d{4} ", line) for line in lines)


def keep_outputs(notebook: nbformat.NotebookNode, old: nbformat.NotebookNode) -> None:
    """Takes the outputs of an older notebook, where it has the same code."""
    pairs = list(zip(_code_cells(notebook), _code_cells(old), strict=False))
    if len(_code_cells(notebook)) == len(_code_cells(old)) and all(_same(new, was) for new, was in pairs):
        for new, was in pairs:
            new.outputs, new.execution_count = was.outputs, was.execution_count


def _blocks(text: str) -> list[tuple[str, bool]]:
    """The texts of a narrative's cells, and whether each is code."""
    blocks = []
    for i, part in enumerate(re.split(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)):
        # Every second part is what stood in a block of Python. A link that is a paragraph of its own ends a cell.
        pieces = [part] if i % 2 else LINK_LINE.split(part)
        blocks += [(piece.strip(), bool(i % 2)) for piece in pieces if piece.strip()]
    return blocks


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _same(cell: nbformat.NotebookNode, other: nbformat.NotebookNode) -> bool:
    return _code_of(cell) == _code_of(other)


def _code_of(cell: nbformat.NotebookNode) -> str:
    """What the cell computes: the code without what installs it, comments and docstrings."""
    tree = ast.parse(MAGIC.sub("pass", cell.source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def main() -> None:
    """Reads the command line and does what it says."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.generate", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default, all")
    parser.add_argument("--execute", action="store_true", help="run them, and keep what they show")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - narratives().keys():
        parser.error(f"no narrative {', '.join(sorted(unknown))}; there are {', '.join(narratives())}")
    for name in arguments.names or narratives():
        notebook, path = generate(narratives()[name], public_address()), FOLDER / f"{name}.ipynb"
        if arguments.execute:
            execute(notebook)
        elif path.exists():
            keep_outputs(notebook, nbformat.read(path, as_version=4))
        nbformat.write(notebook, path)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
