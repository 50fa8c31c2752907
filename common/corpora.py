# SPDX-License-Identifier: Apache-2.0
"""Text corpora by name or path, as streams of documents.

A corpus is a dict from split ("train", "validation", and "test" where there is one) to a function that opens a new
stream of that split's documents. A document is a string of one or more lines. Streams are lazy: a corpus may be larger
than memory.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import pydoc_data.topics
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from common.caching import cached_file
from common.command_line import UserError

Documents = Callable[[], Iterator[str]]

NAMES = ("docstrings", "wikitext-2", "wikitext-103")
DOCSTRING_PACKAGES = ("keras", "keras_hub", "numpy")
WIKITEXT_FILES = {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens", "test": "wiki.test.tokens"}
DOCUMENT_LIMIT = 20_000  # characters; a longer stretch of text goes on as the next document, so that memory is bounded
HELD_OUT = 10  # one part in this many is the validation split of a corpus that comes without one


def open_corpus(corpus: str) -> dict[str, Documents]:
    """Finds a corpus and its splits.

    Args:
        corpus: one of
            - `docstrings`: English from the docstrings of the packages that this project depends on and CPython's
              `pydoc_data.topics`; needs no network. One source module in 10 is held out for validation, and of it the
              paragraphs that share eight words in a row with the training text are dropped;
            - `wikitext-2`, `wikitext-103`: Merity et al. 2016, arXiv:1609.07843, from the Hugging Face Hub
              (`Salesforce/wikitext`, the token version), by the `datasets` library;
            - a folder in WikiText's form: `wiki.train.tokens`, `wiki.valid.tokens` and, if there, `wiki.test.tokens`;
            - a text file, or a folder of `.txt` files: a document is what stands between blank lines, and one
              document in 10, chosen by a hash of its text, is held out for validation.

    Raises:
        UserError: when it is none of these, or cannot be fetched.
    """
    if corpus == "docstrings":
        return {split: functools.partial(_read_json_lines, path) for split, path in _docstrings().items()}
    if corpus in NAMES:
        return _hub_wikitext(corpus)
    path = Path(corpus)
    if (path / WIKITEXT_FILES["train"]).is_file():
        files = {split: path / name for split, name in WIKITEXT_FILES.items() if (path / name).is_file()}
        if "validation" not in files:
            raise UserError(f"{path} has no {WIKITEXT_FILES['validation']}; a folder in WikiText's form needs one")
        return {split: lambda file=file: _articles(_lines(file)) for split, file in files.items()}
    if path.is_file():
        return _held_out([path])
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not files:
            raise UserError(f"no .txt file and no {WIKITEXT_FILES['train']} in the folder {path}")
        return _held_out(files)
    raise UserError(
        f"--corpus {corpus} is neither docstrings, wikitext-2, wikitext-103, nor an existing file or folder"
    )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in file:
                if "\0" in line:
                    raise UserError(f"{path} is a binary file, not text")
                yield line
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _articles(lines: Iterator[str]) -> Iterator[str]:
    """WikiText's articles, each begun by a heading with one equals sign (` = Title = `); `<unk>` becomes `[UNK]`."""
    article, length = [], 0
    for line in lines:
        text = line.strip().replace("<unk>", "[UNK]")
        if article and (re.fullmatch(r"= [^=].* =", text) or length > DOCUMENT_LIMIT):
            yield "\n".join(article)
            article, length = [], 0
        if text:
            article.append(text)
            length += len(text)
    if article:
        yield "\n".join(article)


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    """What stands between blank lines; cut, at a space where there is one, when it is longer than the limit."""
    paragraph = ""
    for line in lines:
        if line.strip():
            paragraph += line
        if paragraph and (not line.strip() or len(paragraph) > DOCUMENT_LIMIT):
            yield from _cut(paragraph.strip())
            paragraph = ""
    yield from _cut(paragraph.strip())


def _cut(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + DOCUMENT_LIMIT
        if end < len(text):
            end = max(text.rfind(" ", start, end), start) or end
            end = end if end > start else start + DOCUMENT_LIMIT
        yield text[start:end].strip()
        start = end


def _held_out(files: list[Path]) -> dict[str, Documents]:
    def documents(validation: bool) -> Iterator[str]:
        for file in files:
            for document in _paragraphs(_lines(file)):
                if (zlib.crc32(document.encode()) % HELD_OUT == 0) == validation:
                    yield document

    return {"train": lambda: documents(False), "validation": lambda: documents(True)}


def _hub_wikitext(name: str) -> dict[str, Documents]:
    import datasets  # takes a second to import, and only this corpus needs it

    try:
        wikitext = datasets.load_dataset("Salesforce/wikitext", f"{name}-v1")
    except Exception as error:  # the library raises a dozen unrelated types when the hub is out of reach
        raise UserError(
            f"cannot fetch {name} from the Hugging Face Hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Without a network, download its files elsewhere and give their folder: --corpus FOLDER"
        ) from error
    return {
        split: lambda rows=rows: _articles(row["text"] for row in rows)
        for split, rows in wikitext.items()
    }  # fmt: skip


def _read_json_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _docstrings() -> dict[str, Path]:
    """Extracts the docstring corpus, once for each set of package versions; a document is a module's prose."""
    versions = [platform.python_version(), *map(importlib.metadata.version, DOCSTRING_PACKAGES)]
    key = [*versions, inspect.getsource(inspect.getmodule(_docstrings))]

    def write(split: str, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(document) + "\n" for document in splits()[split])

    @functools.cache
    def splits() -> dict[str, list[str]]:
        return _split_modules(_prose_by_module())

    return {
        split: cached_file(f"docstrings-{split}.jsonl", [*key, split], functools.partial(write, split))
        for split in ("train", "validation")
    }


def _prose_by_module() -> Iterator[tuple[str, list[str]]]:
    """(module, its paragraphs of prose), read without importing the packages; no paragraph comes twice."""
    seen = set()

    def prose(texts: Iterator[str]) -> list[str]:
        found = []
        for paragraph in (" ".join(p.split()) for text in texts for p in re.split(r"\n\s*\n", text) if _is_prose(p)):
            if paragraph not in seen:
                seen.add(paragraph)
                found.append(paragraph)
        return found

    yield "pydoc_data.topics", prose(iter(pydoc_data.topics.topics.values()))
    for package in DOCSTRING_PACKAGES:
        root = Path(importlib.util.find_spec(package).origin).parent
        for file in sorted(root.rglob("*.py")):
            yield str(file.relative_to(root.parent)), prose(_docstrings_of(file))


def _docstrings_of(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _is_prose(paragraph: str) -> bool:
    """At least ten words, no example code, and four characters in five are letters or spaces."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    return (
        len(paragraph.split()) >= 10
        and ">>>" not in paragraph
        and "```" not in paragraph
        and letters > 0.8 * len(paragraph)
    )


def _split_modules(modules: Iterator[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """By a hash of the module's name; then validation loses what shares eight words in a row with training."""
    train, validation = [], []
    for module, paragraphs in modules:
        if paragraphs:
            (validation if zlib.crc32(module.encode()) % HELD_OUT == 0 else train).append(paragraphs)
    known = {words for paragraphs in train for p in paragraphs for words in _eight_words(p)}
    validation = [[p for p in paragraphs if known.isdisjoint(_eight_words(p))] for paragraphs in validation]
    return {
        "train": ["\n".join(paragraphs) for paragraphs in train],
        "validation": ["\n".join(paragraphs) for paragraphs in validation if paragraphs],
    }


def _eight_words(paragraph: str) -> Iterator[int]:
    words = re.findall(r"\w+", paragraph.lower())
    return (hash(tuple(words[i : i + 8])) for i in range(max(len(words) - 7, 1)))
