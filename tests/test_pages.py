"""Every page, those of the notebooks too: its links lead somewhere, and its code is valid."""

import ast
import json
import re
import subprocess
from urllib.parse import unquote

import nbformat
import pytest
from markdown_it import MarkdownIt

from tests.conftest import ROOT

MARKDOWN = MarkdownIt("commonmark").enable("table")  # what GitHub adds to it and the pages use


def text_of(path):
    """The Markdown of a page; of a notebook, that of its cells."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and re.match("(?!runs$|build$)[a-z]", path.name)]
FILES = [*ROOT.glob("*.md"), *(path for f in FOLDERS for end in ("md", "ipynb") for path in f.rglob(f"*.{end}"))]
PAGES = {str(path.relative_to(ROOT)): text_of(path) for path in sorted(FILES)}


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them; the second of the same name ends in -1."""
    tokens, found = MARKDOWN.parse(text), []
    for heading, inline in zip(tokens, tokens[1:], strict=False):
        if heading.type == "heading_open":
            words = "".join(child.content for child in inline.children)
            anchor = re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")
            same = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in found)
            found.append(f"{anchor}-{same}" if same else anchor)
    return found


def wrong_links(name, text):
    """Links and pictures of a page that lead nowhere in the project."""
    for token in (child for block in MARKDOWN.parse(text) for child in block.children or ()):
        target = token.attrs.get("href") or token.attrs.get("src")
        if not target or re.match("https?://", str(target)):
            continue
        path, _, anchor = unquote(str(target)).partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or not file.resolve().is_relative_to(ROOT):
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(text if not path else text_of(file)):
            yield f"{target}: no such heading"


def invalid_code(_, text):
    """Blocks of code that their language's own parser rejects."""
    for token in MARKDOWN.parse(text):
        try:
            if token.info == "python":
                ast.parse(token.content)
            elif token.info == "json":
                [json.loads(line) for line in token.content.splitlines()]
            elif token.info in ("sh", "bash"):
                subprocess.run(["bash", "-n"], input=token.content, text=True, check=True, capture_output=True)
        except (SyntaxError, ValueError, subprocess.CalledProcessError) as error:
            yield f"{error}: {token.content}"


CHECKS = {
    wrong_links: ["[a](docs/none.md)", "[a](docs/speed.md#none)"],
    invalid_code: ["```python\na =\n```", "```sh\nif\n```"],
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_of_every_page(check):
    """Its links lead somewhere; its code is valid."""
    assert all(list(check("README.md", text)) for text in CHECKS[check])
    found = {name: list(check(name, text)) for name, text in PAGES.items()}
    assert {name: errors for name, errors in found.items() if errors} == {}
    assert {"README.md", "docs/speed.md", "notebooks/README.md", "notebooks/bert_mlm.ipynb"} <= found.keys()
