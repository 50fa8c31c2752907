"""Every page, those of the notebooks too: it renders, its tables are whole, its links and its code are valid."""

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
MARKER = r"<!-- [\w-]+ -->"  # around what is generated


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


def raw_marks(_, text):
    """What a reader of the rendered page would see of Markdown: marks that are not closed, tables that are none."""
    for token in MARKDOWN.parse(text):
        if token.type == "html_block" and not re.fullmatch(MARKER, token.content.strip()):
            yield token.content
        for child in token.children or ():
            if child.type == "html_inline" and child.content != "<br>":  # which the form of keras.io's guides has
                yield child.content
            if child.type == "text":
                yield from re.findall(r"^\|.*|^#+ .*|.*(?:\*\*|\]\(|\]\[|```|~~~|<!--|-->).*", child.content)


def torn_tables(_, text):
    """Rows with more or fewer cells than the head of their table."""
    lines = text.splitlines()
    for token in MARKDOWN.parse(text):
        if token.type == "table_open":
            rows = [line.strip() for line in lines[slice(*token.map)]]
            cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
            yield from (row for row, count in zip(rows, cells, strict=True) if count != cells[0] or row[-1] != "|")


def invalid_code(_, text):
    """Blocks of code that their language's own parser rejects, or in a language that nothing here checks."""
    for token in MARKDOWN.parse(text):
        if token.type != "fence":
            continue
        try:
            if token.info == "python":
                ast.parse(token.content)
            elif token.info == "json":
                [json.loads(line) for line in token.content.splitlines()]
            elif token.info in ("sh", "bash"):
                subprocess.run(["bash", "-n"], input=token.content, text=True, check=True, capture_output=True)
            elif token.info not in ("text", "diff"):  # of patches, which tests apply
                raise ValueError(f"no language is {token.info!r}")
        except (SyntaxError, ValueError, subprocess.CalledProcessError) as error:
            yield f"{error}: {token.content}"


CHECKS = {
    wrong_links: ["[a](docs/none.md)", "[a](docs/speed.md#none)"],
    raw_marks: ["a **bold word"],
    torn_tables: ["| a | b |\n| --- | --- |\n| 1 |"],
    invalid_code: ["```python\na =\n```", "```sh\nif\n```"],
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_of_every_page(check):
    """Its links lead somewhere; it renders without raw marks; its tables are whole; its code is valid."""
    assert all(list(check("README.md", text)) for text in CHECKS[check])
    found = {name: list(check(name, text)) for name, text in PAGES.items()}
    assert {name: errors for name, errors in found.items() if errors} == {}
    assert {"README.md", "docs/speed.md", "notebooks/README.md", "notebooks/bert_mlm.ipynb"} <= found.keys()
