"""The pages: links, code and names lead somewhere, what they say to type is understood, figures are the results'."""

import argparse
import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from urllib.parse import unquote

import nbformat
import pytest
from markdown_it import MarkdownIt

import benchmarks.__main__
import keras_replicas.__main__ as library
import recipes.__main__ as command_line
from benchmarks import readme
from common.command_line import FIRST, marks_of, option, parse
from notebooks import generate
from recipes._names import recipes as names
from tests.conftest import ROOT
from tests.test_keras_faults import ROWS

MARKDOWN = MarkdownIt("commonmark").enable("table")  # what GitHub adds to it and the pages use


def text_of(path):
    """The Markdown of a page; of a notebook, that of its cells."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


FOLDERS = [p for p in ROOT.iterdir() if p.is_dir() and re.match(r"(?!runs$|build$)[a-z]|\.github$", p.name)]
FILES = [*ROOT.glob("*.md"), *(path for f in FOLDERS for end in ("md", "ipynb") for path in f.rglob(f"*.{end}"))]
PAGES = {str(path.relative_to(ROOT)): text_of(path) for path in sorted(FILES)}
RECIPES = {name: importlib.import_module(f"recipes.{name}") for name in names()}
# Whatever says what to type: all pages but the changelog, which keeps what was.
TO_TYPE = {name: page for name, page in PAGES.items() if name != "CHANGELOG.md"}
README, TROUBLES = PAGES["README.md"], PAGES["docs/troubleshooting.md"]
HELP = "\n".join([command_line.GUIDE, *(module.__doc__ for module in RECIPES.values())])
# What a machine without a network is told, and where an option is shown without its others.
LACKING = ("from the Hugging Face Hub", "which needs a network on first use", "needs the network", "needs a token")
LACKING += ("adapters need a preset",)


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    tokens = MARKDOWN.parse(text)
    for heading, inline in zip(tokens, tokens[1:], strict=False):
        if heading.type == "heading_open":
            words = "".join(child.content for child in inline.children)
            yield re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")


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


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (wrong_links, "[a](docs/none.md) [a](docs/speed.md#none)"),
        (invalid_code, "```python\na =\n```\n```sh\nif\n```"),
    ],
)
def test_links_lead_somewhere_and_code_is_valid(check, wrong):
    assert len([*check("README.md", wrong)]) == 2
    assert {name: found for name, text in PAGES.items() if (found := [*check(name, text)])} == {}
    assert {"README.md", "docs/speed.md", "notebooks/README.md", "notebooks/bert_mlm.ipynb"} <= PAGES.keys()


def section(page, title):
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]


def code_spans():
    """What stands between backticks in the text; of a table whose first column is another project's, the rest."""
    for name, page in TO_TYPE.items():
        for line in re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL).splitlines():
            if name == "docs/coming-from.md" and line.startswith("|"):
                line = line.split(" | ", 1)[1]
            yield from re.findall(r"`([^`]+)`", line)


def commands():
    """The words of each command of the pages and of the help, from `python` on."""
    lines = re.findall(r"^ +(python -m .*)", HELP, re.MULTILINE) + list(code_spans())
    for block in re.findall(r"^```sh\n(.*?)^```", "\n".join(TO_TYPE.values()), re.MULTILINE | re.DOTALL):
        lines += block.replace("\\\n", "").splitlines()
    for line in lines:
        if found := re.search(
            r"\b(python -m (?:recipes|keras_replicas|benchmarks|notebooks\.generate)(?: .*)?)$", line
        ):
            words = shlex.split(re.sub("   .*", "", found[1]), comments=True)
            yield words[: words.index("&&")] if "&&" in words else words


@pytest.fixture
def at_the_reader(tmp_path, monkeypatch):
    """In a folder with all that the pages name as the reader's own."""
    texts = ("FILE", "my.txt", "my_texts/a.txt", "simplewiki/a.txt", "FOLDER/a.txt", "GLUE/SST-2/train.tsv")
    files = dict.fromkeys((*texts, "answers.jsonl", "my.csv", "pairs.csv", "essays.csv"), "A text.\n")
    settings = json.dumps({"config": {"max_sequence_length": 512}})
    files |= {f"{preset}/config.json": settings for preset in ("FOLDER", "runs/bert_mlm/preset")}
    files["runs/bert_from_scratch/preset/config.json"] = settings
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def refused(name, options, capsys):
    """Why a recipe's `Config` does not take these options, but for what is lacking; or None."""
    try:
        parse(RECIPES[name].Config, RECIPES[name].__doc__, options)
    except SystemExit as end:
        told = capsys.readouterr().err
        return told if end.code and not any(words in told for words in LACKING) else None


def parsed(main, words, monkeypatch):
    """What the words of a command are to a program, which does nothing else."""
    found, parse_args = [], argparse.ArgumentParser.parse_args

    def stop(parser):
        found.append(parse_args(parser))
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", words[2:])
        main()
    assert found, words
    return found[0]


def test_the_readme_is_short_and_its_first_two_blocks_set_everything_up_and_test_it():
    first, second = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[:2]
    assert first.splitlines()[-1] == ".venv/bin/python -m recipes run bert_mlm"
    assert second.splitlines()[-1] == ".venv/bin/python -m pytest -q -n 2 --dist loadfile"
    assert len(README.split()) <= 1200


def test_what_is_named_exists():
    """In code, where there are no links."""
    pages = "\n".join(TO_TYPE.values())
    paths = re.findall(r"\b(?:keras_replicas|common|recipes|docs|benchmarks|tests|notebooks)/[\w./-]*\w\.\w+", pages)
    paths += [f"benchmarks/{module}.py" for module in re.findall(r"python -m benchmarks\.(\w+)", pages)]
    paths += [f"notebooks/{notebook}" for notebook in re.findall(r"`(\w+\.ipynb)`", pages)]
    assert [path for path in paths if not (ROOT / path).is_file() and "NAME" not in path] == []
    assert set(re.findall(r"^\| `(\w+)` \|", section(README, "The recipes"), re.MULTILINE)) == set(RECIPES)
    docs = {name for name in PAGES if re.fullmatch(r"docs/[\w-]+\.md", name)}
    assert docs <= set(re.findall(r"\]\((docs/[\w-]+\.md)", README))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"pip install (?:-q )?-e '\.\[(\w+)\]'", pages)) <= set(extras)


def test_a_page_has_the_options_with_which_the_help_begins():
    marks = [mark for page in RECIPES.values() for mark in marks_of(page.Config).items()]
    first = {name.replace("_", "-") for name, of_option in marks if FIRST in of_option}
    assert set(re.findall(r"--([a-z][a-z-]+)", section(PAGES["docs/recipes.md"], "Options"))) == first | {"help"}


def test_the_words_of_a_command_parse(at_the_reader, monkeypatch, capsys):
    of_recipes = 0
    for words in commands():
        programs = {"recipes": command_line, "keras_replicas": library, "benchmarks": benchmarks.__main__}
        arguments = parsed(programs.get(words[2], generate).main, words, monkeypatch)
        if words[2] == "recipes" and len(words) > 4 and words[3] in ("run", "launch"):
            of_recipes += 1
            launched = words[3] == "launch"
            name, options = (arguments.script, arguments.arguments) if launched else (arguments.name, arguments.options)
            assert name in RECIPES, words
            assert not refused(name, options, capsys), words
    assert of_recipes > 20


def test_options_that_are_named_exist_and_take_the_values_shown(at_the_reader, capsys):
    programs = ("recipes/__main__.py", "keras_replicas/launch.py", "keras_replicas/__main__.py")
    sources = "".join((ROOT / path).read_text() for path in (*programs, "recipes/cluster/ray_launch.py"))
    spans = {span for span in code_spans() if span.startswith("--")}
    assert len(spans) > 40
    for span in spans:
        words = shlex.split(span)
        named = {word for word in words if word.startswith("--")}
        if all(f'"{word}"' in sources for word in named) or re.match("--(help|tyro-)", span):
            continue
        options = words if len(words) > len(named) else []
        has_them = [name for name, module in RECIPES.items() if named <= {*map(option, marks_of(module.Config))}]
        assert any(not refused(name, options, capsys) for name in has_them), span


def test_troubleshooting_has_each_fault_of_keras_and_messages_as_the_code_has_them():
    assert len(ROWS) > 10
    assert [anchor for anchor in ROWS if f"(keras-under-tf-distribute.md#{anchor})" not in TROUBLES] == []
    ours = section(TROUBLES, "Several workers") + section(TROUBLES, "Text, models, folders")
    messages = re.findall(r"^\| `(.+?)`", ours, re.MULTILINE)
    assert len(messages) > 15
    files = [path for folder in ("keras_replicas", "common", "recipes") for path in (ROOT / folder).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    known = "\n".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    assert [message for message in messages if not all(part in known for part in message.split("…"))] == []


def test_the_figures_of_the_pages_are_those_of_the_results():
    pages = {path.name: path.read_text(encoding="utf-8") for path in readme.PAGES}
    for name, page in pages.items():
        assert readme.with_tables(page) == page, name
    tables = re.findall(r"^<!-- (?!end )([\w-]+) -->$", "\n".join(pages.values()), re.MULTILINE)
    assert sorted(tables) == sorted(readme.tables())
    assert [*map(readme.rounded_up, (1.2e-15, 2e-15, 9.3e-5))] == ["2e-15", "2e-15", "1e-04"]  # bounds that hold
