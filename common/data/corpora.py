# SPDX-License-Identifier: Apache-2.0
"""Text corpora by name or path, as streams of documents: a corpus may be larger than memory.

A document is a string of one or more lines.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import pydoc_data.topics
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_replicas import UserError

from ..files import FAILED, cached, from_hub, is_held_out, one_line, sha256_of, shortened
from .tables import read_rows

Documents = Callable[[], Iterator[str]]  # opens a new stream of them
SPLITS = ("train", "validation", "test")
WIKITEXT = {f"wikitext-{size}": f"hf://Salesforce/wikitext/wikitext-{size}-v1" for size in (2, 103)}
WIKITEXT_FILES = dict(zip(SPLITS, ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"), strict=True))
TITLE = "= [^=].* ="  # the line with which an article of WikiText begins
DOCUMENT_LIMIT = 20_000  # characters; longer text is split into several documents, so that memory is bounded
PART = 1000  # characters, at least, of a part of a document that is held out for validation
TEXTS = (".txt", ".text", ".md")  # endings of a folder's files that are plain text
TABLES = {".csv": "table", ".tsv": "table", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
NO_CORPUS = (".html", ".htm", ".xml", ".pdf", ".docx", ".zip", ".gz", ".tar", ".xz", ".zst", ".bz2", ".xlsx")
PACKAGES = ("keras", "keras_hub", "numpy")  # whose docstrings are a corpus
MOST_OF_A_LINE = 2**24  # characters, read at once
NO_TEXT = re.compile("[\0\udc80-\udcff]")  # what bytes that are not UTF-8 are read as
STRINGS = re.compile(r'(^[ \t]*[rR]?)?"""(.*?)"""', re.DOTALL | re.MULTILINE)  # the first group: what stands alone


@dataclass(frozen=True)
class Corpus:
    """A stream for each split: `train`, `validation`, and `test` where there is one."""

    splits: dict[str, Documents]
    fingerprint: str  # changes with the text


def open_corpus(corpus: str) -> Corpus:
    """Finds a corpus and its splits.

    Args:
        corpus: one of
            - `docstrings`: English from docstrings of `PACKAGES` and CPython's `pydoc_data.topics`; needs no network.
              One module in 10 is held out for validation, without its paragraphs that share eight consecutive words
              with the training text;
            - `wikitext-2`, `wikitext-103`: Merity et al. 2016, arXiv:1609.07843, from the Hugging Face Hub
              (`Salesforce/wikitext`, the token version);
            - `hf://user/name` or `hf://user/name/configuration`: any data set on the Hub with a column `text`, read as
              a stream; without a split `validation`, one row in 10 is held out;
            - a folder in WikiText's format: `wiki.train.tokens`, `wiki.valid.tokens` and, if there, `wiki.test.tokens`;
            - a text file, in which blank lines separate documents; or a table (in `TABLES`) with a column `text`, or a
              single column of strings; or a folder of such files: the kind that has more bytes is read. What is read,
              and what is not, is printed. One part in 10 is held out for validation, chosen by a hash of its text: of a
              long document, a part has some `PART` characters.

    Raises a `UserError` when it is none of these, or cannot be fetched; by a stream, when it is not UTF-8 text.
    """
    path, is_here = Path(corpus), os.path.exists(corpus)  # Path's raises an error for a long name
    if is_here and corpus in ("docstrings", *WIKITEXT):
        print(f"corpus: {corpus} in this folder, not the corpus of that name", flush=True)
    elif corpus == "docstrings":
        versions = [platform.python_version(), *map(importlib.metadata.version, PACKAGES)]
        file = cached("docstrings.json", [*versions, Path(__file__).read_text(encoding="utf-8")], _write_docstrings)
        texts = json.loads(file.read_text(encoding="utf-8"))
        return Corpus({split: functools.partial(iter, texts[split]) for split in texts}, file.name)
    elif corpus in WIKITEXT or corpus.startswith("hf://"):
        return _from_hub(corpus)
    elif not is_here:
        names = ", ".join(["docstrings", *WIKITEXT, "hf://user/name"])
        raise UserError(f"the corpus {corpus} is neither {names}, nor an existing file or folder")
    files = {split: path / name for split, name in WIKITEXT_FILES.items() if (path / name).is_file()}
    if "train" in files:
        if "validation" not in files:
            raise UserError(f"{path} has no {WIKITEXT_FILES['validation']}; a folder in WikiText's form needs one")
        lines = {split: functools.partial(_lines, [file]) for split, file in files.items()}
        return Corpus({split: functools.partial(_articles, lines[split]) for split in lines}, _checksum(files.values()))
    kind, found = _files_of(path)
    if kind == "text":
        return Corpus(_held_out(lambda: _documents(_lines(found), "")), _checksum(found))
    if kind == "table":
        texts = _held_out(lambda: _column(corpus, (row for file in found for _, row in read_rows(file))))
        return Corpus(texts, _checksum(found))
    few = {"batch_size": 16} if kind == "parquet" else {}  # rows at once; else a whole group
    # For an empty file of JSON, `datasets` raises an error with no message.
    full = [str(file) for file in found if file.stat().st_size or kind == "parquet"]
    rows = from_hub("load_dataset", kind, data_files=full, split="train", streaming=True, **few) if full else []
    return Corpus(_held_out(functools.partial(_column, corpus, rows)), _checksum(found))


def _files_of(path: Path) -> tuple[str, list[Path]]:
    """The files that are a corpus, and their kind: `text`, `table`, or the name of a reader of `datasets`."""
    if path.is_file():
        if (suffix := path.suffix.lower()) in NO_CORPUS:
            raise UserError(f"the corpus {path} is neither plain text nor a table: give its text as .txt")
        return TABLES.get(suffix, "text"), [path]
    kinds: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            suffix = file.suffix.lower()
            kinds.setdefault("text" if suffix in TEXTS else TABLES.get(suffix, ""), []).append(file)
    other = kinds.pop("", [])
    if not kinds:
        wanted = ", ".join([*TEXTS, *TABLES, WIKITEXT_FILES["train"]])
        raise UserError(f"the folder {path} has no file that ends in {wanted}; it has {_counted(other)}")
    kind = max(kinds, key=lambda name: sum(file.stat().st_size for file in kinds[name]))
    passed_over = other + [file for name, files in kinds.items() if name != kind for file in files]
    print(f"corpus: {_counted(kinds[kind])}" + f"; not read: {_counted(passed_over)}" * bool(passed_over), flush=True)
    return kind, kinds[kind]


def _counted(files: list[Path]) -> str:
    size = sum(file.stat().st_size for file in files)
    return f"{len(files)} file(s) of {size:,} bytes" + f" ({shortened(file.name for file in files)})" * bool(files)


def _from_hub(corpus: str) -> Corpus:
    found = re.fullmatch("hf://(/.+|[^/]+/[^/]+)(?:/([^/]+))?", WIKITEXT.get(corpus, corpus))  # or a local folder
    if not found:
        raise UserError(f"the corpus {corpus} must be hf://user/name or hf://user/name/configuration")
    name = [*filter(None, found.groups())]
    builder = from_hub("load_dataset_builder", *name)
    named = [str(file) for files in (builder.config.data_files or {}).values() for file in files]
    if away := [file for file in named if not file.startswith(builder.base_path.rstrip("/") + "/") or ".." in file]:
        raise UserError(f"{corpus} lists {away[0]}, a file outside of it: give another data set")
    rows = from_hub("load_dataset", *name, streaming=corpus not in WIKITEXT)
    if "train" not in rows:
        raise UserError(f"{corpus} has no split train; it has {', '.join(rows)}")
    splits: dict[str, Documents] = {s: functools.partial(_column, corpus, rows[s]) for s in SPLITS if s in rows}
    if corpus in WIKITEXT:
        splits = {split: functools.partial(_articles, lines) for split, lines in splits.items()}
    fingerprint = f"{builder.config_id} {builder.hash}"  # a hash of the commit on the Hub
    return Corpus(splits if "validation" in splits else _held_out(splits["train"]), fingerprint)


def _column(corpus: str, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    name = "text"
    with one_line(f"cannot read {corpus}", errors=(*FAILED, TypeError)):  # by `datasets`, for a column of two types
        for number, row in enumerate(rows):
            strings = [name for name, value in row.items() if isinstance(value, str) and re.search(r"[^\W\d]", value)]
            if number == 0 and "text" not in row and len(strings) == 1:
                (name,) = strings
            if name not in row:
                raise UserError(f"it has no column 'text' of strings, only {shortened(map(repr, row))}: rename one")
            if not isinstance(row[name], str | None):
                raise UserError(f"row {number + 1} of column {name!r} is {row[name]!r}, which is no text")
            if len(row[name] or "") > MOST_OF_A_LINE:
                raise UserError(f"row {number + 1} of column {name!r} has {len(row[name]):,} characters: divide it")
            yield from _pieces(row[name] or "")


def _lines(files: Iterable[Path]) -> Iterator[str]:
    """The lines of UTF-8 files, without what is blank at their ends, and a blank one after each file."""
    for file in files:
        with file.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MOST_OF_A_LINE), ""), start=1):
                if NO_TEXT.search(line):
                    raise UserError(f"{file}, line {number} is not UTF-8 text; convert it first")
                yield line.rstrip()
        yield ""


def _articles(lines: Documents) -> Iterator[str]:
    """WikiText's articles, in which `<unk>` becomes `[UNK]`."""
    return _documents((line.strip().replace("<unk>", "[UNK]") for line in lines()), TITLE)


def _documents(lines: Iterable[str], begins: str) -> Iterator[str]:
    """The documents in lines, each begun by a line of this pattern, without blank lines."""
    document = ""
    for line in lines:
        if re.fullmatch(begins, line) or len(document) + len(line) > DOCUMENT_LIMIT:
            yield from _pieces(document)
            document = ""
        if line:
            document += f"{line}\n"
    yield from _pieces(document)


def _pieces(text: str, limit: int = DOCUMENT_LIMIT) -> list[str]:
    """The text, if it is not blank; a longer one than the limit is cut, at spaces if there are any."""
    if len(text) <= limit or len(text := text.strip()) <= limit:
        return [text] if text.strip() else []
    return textwrap.wrap(text, limit, expand_tabs=False, replace_whitespace=False, break_on_hyphens=False)


def _held_out(documents: Documents) -> dict[str, Documents]:
    def texts(validation: bool) -> Iterator[str]:
        for text in documents():
            kept = [part for part in _parts(text) if is_held_out(part) == validation]
            yield from ["\n".join(kept)] if kept else []

    return {"train": functools.partial(texts, False), "validation": functools.partial(texts, True)}


def _parts(text: str) -> Iterator[str]:
    """Lines of at least `PART` characters together, up to the text's end; a longer line is cut at spaces."""
    part = ""
    for line in text.splitlines():
        for piece in _pieces(line, 2 * PART):
            part += f"{piece}\n"
            if len(part) > PART:
                yield part.removesuffix("\n")
                part = ""
    if part:
        yield part.removesuffix("\n")


def _checksum(files: Iterable[Path]) -> str:
    listing = "".join(f"{file.name} {sha256_of(file)}\n" for file in files)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()


def _write_docstrings(path: Path) -> None:
    """Writes the prose of the modules, each paragraph once, without importing the packages."""
    texts = {"pydoc_data.topics": [*pydoc_data.topics.topics.values()]}
    for package in PACKAGES:
        root = Path(importlib.util.find_spec(package).origin).parent  # type: ignore[union-attr, arg-type]
        for file in sorted(root.rglob("*.py")):
            strings = STRINGS.finditer(file.read_text(encoding="utf-8", errors="replace"))  # ten times as fast as `ast`
            texts[str(file.relative_to(root.parent))] = [found[2] for found in strings if found[1] is not None]
    splits: dict[str, list[list[str]]] = {"train": [], "validation": []}
    seen: set[str] = set()
    for module, strings_of in texts.items():
        parts = [part for text in strings_of for part in re.split(r"\n\s*\n", text)]
        prose = [" ".join(part.split()) for part in parts if _is_prose(part)]
        new = [paragraph for paragraph in dict.fromkeys(prose) if paragraph not in seen]
        seen.update(new)
        splits["validation" if is_held_out(module) else "train"].append(new)
    known = {words for paragraphs in splits["train"] for part in paragraphs for words in _eight_words(part)}
    splits["validation"] = [[p for p in part if known.isdisjoint(_eight_words(p))] for part in splits["validation"]]
    documents = {split: ["\n".join(paragraphs) for paragraphs in part if paragraphs] for split, part in splits.items()}
    path.write_text(json.dumps(documents), encoding="utf-8")


def _is_prose(paragraph: str) -> bool:
    """At least ten words, no example code, and four characters in five are letters or spaces."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    is_code = ">>>" in paragraph or "```" in paragraph
    return len(paragraph.split()) >= 10 and not is_code and letters > 0.8 * len(paragraph)


def _eight_words(paragraph: str) -> Iterator[int]:
    words = re.findall(r"\w+", paragraph.lower())
    return (hash(tuple(words[i : i + 8])) for i in range(max(len(words) - 7, 1)))
