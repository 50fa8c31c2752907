# SPDX-License-Identifier: Apache-2.0
"""Makes a guide's notebook by keras.io's rules: `python -m notebooks.tutobook [--execute]`.

A block between lines of three quotes is a text cell, the first one the header; what stands between is a code cell.
"""

import argparse
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

from notebooks import generate

GUIDES = generate.ROOT / "guides"
FENCE = re.compile(r'^"""\n', re.MULTILINE)


def notebook_of(guide: Path) -> nbformat.NotebookNode:
    """The notebook of a guide, without outputs."""
    _, header, *parts = FENCE.split(guide.read_text(encoding="utf-8"))
    (_, title), *fields = (
        line.split(": ", 1) for line in header.splitlines()[:5]
    )  # keras.io leaves out the accelerator
    cells = [new_markdown_cell(f"# {title}\n\n" + "<br>\n".join(f"**{name}:** {value}" for name, value in fields))]
    for number, part in enumerate(parts):  # code and text in turn
        if part.strip():
            cells.append((new_markdown_cell if number % 2 else new_code_cell)(part.strip()))
    return generate.with_metadata(cells)


def keep_what_is_printed(notebook: nbformat.NotebookNode) -> None:
    """Removes TensorFlow's log, and the addresses of objects that a cell ends with."""
    for cell in notebook.cells:
        printed = [output for output in cell.get("outputs", []) if output.get("name") == "stdout"]
        for output in printed:
            output.text = re.sub(r"^INFO:.*\n", "", output.text, flags=re.MULTILINE)
        if "outputs" in cell:
            cell.outputs = [output for output in printed if output.text]


def main() -> None:
    """Reads the command line, and writes the notebook of each guide beside it."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.tutobook", description=__doc__.splitlines()[0])
    parser.add_argument("--execute", action="store_true", help="run them, and keep what they show")
    arguments = parser.parse_args()
    for guide in sorted(path for path in GUIDES.glob("*.py") if FENCE.match(path.read_text(encoding="utf-8"))):
        notebook, path = notebook_of(guide), guide.with_suffix(".ipynb")
        if arguments.execute:
            generate.execute(notebook)
        elif path.exists():
            generate.keep_outputs(notebook, nbformat.read(path, as_version=4))
        keep_what_is_printed(notebook)
        nbformat.write(notebook, path)
        print(path.relative_to(generate.ROOT))


if __name__ == "__main__":
    main()
