# SPDX-License-Identifier: Apache-2.0
"""Text corpora by name or path, as streams of documents.

A corpus is a dict from split ("train", "validation", and "test" where there is one) to a function that opens a new
stream of that split's documents. A document is a string of one or more lines. Streams are lazy: a corpus may be larger
than memory.
"""

import functools
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from common.data.docstrings import docstring_files
from common.data.hub_corpora import HUB, hub_builder, hub_splits, parse_hub_name
from common.errors import UserError

Documents = Callable[[], Iterator[str]]

NAMES = ("docstrings", "wikitext-2", "wikitext-103")
WIKITEXT = "Salesforce/wikitext"  # on the Hub
SPLITS = ("train", "validation", "test")
NEEDED_SPLITS = ("train", "validation")  # a run without text in these is rejected; the test split is optional
WIKITEXT_FILES = {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens", "test": "wiki.test.tokens"}
DOCUMENT_LIMIT = 20_000  # characters; longer text is split into several documents, so that memory is bounded
HELD_OUT = 10  # one part in this many is the validation split of a corpus without one


def open_corpus(corpus: str) -> dict[str, Documents]:
    """Finds a corpus and its splits.

    Args:
        corpus: one of
            - `docstrings`: English from the docstrings of the packages that this project depends on and CPython's
              `pydoc_data.topics`; needs no network. One source module in 10 is held out for validation, and its
              paragraphs that share eight consecutive words with the training text are dropped;
            - `wikitext-2`, `wikitext-103`: Merity et al. 2016, arXiv:1609.07843, from the Hugging Face Hub
              (`Salesforce/wikitext`, the token version), by the `datasets` library;
            - `hf://user/name` or `hf://user/name/configuration`: any data set of the Hub with a column `text`, read as
              a stream; without a split `validation`, one row in 10 is held out;
            - a folder in WikiText's format: `wiki.train.tokens`, `wiki.valid.tokens` and, if there, `wiki.test.tokens`;
            - a text file, or a folder of `.txt` files: a document is what stands between blank lines, and one
              document in 10, chosen by a hash of its text, is held out for validation.

    Raises:
        UserError: when it is none of these, or cannot be fetched.
    """
    if corpus == "docstrings":
        return {split: functools.partial(_read_json_lines, path) for split, path in docstring_files().items()}
    if corpus in NAMES:
        return _hub_wikitext(corpus)
    if corpus.startswith(HUB):
        return _hub_rows(corpus)
    path = Path(corpus)
    if (path / WIKITEXT_FILES["train"]).is_file():
        files = {split: path / name for split, name in WIKITEXT_FILES.items() if (path / name).is_file()}
        if "validation" not in files:
            raise UserError(f"{path} has no {WIKITEXT_FILES['validation']}; a folder in WikiText's form needs one")
        return {split: functools.partial(_articles_of, file) for split, file in files.items()}
    if path.is_file():
        return _held_out(functools.partial(_paragraphs_of, [path]))
    if path.is_dir():
        texts = sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not texts:
            raise UserError(f"no .txt file and no {WIKITEXT_FILES['train']} in the folder {path}")
        return _held_out(functools.partial(_paragraphs_of, texts))
    raise UserError(
        f"--corpus {corpus} is neither docstrings, wikitext-2, wikitext-103, hf://user/name, "
        "nor an existing file or folder"
    )


def check_corpus(corpus: str, workdir: str) -> None:
    """Checks that there is text to train on.

    Raises:
        UserError: when there is none, or the work directory is inside it: a run writes text too.
    """
    if corpus in NAMES:
        return
    if Path(corpus).is_dir() and Path(workdir).resolve().is_relative_to(Path(corpus).resolve()):
        raise UserError(
            f"--workdir {workdir} is inside --corpus {corpus}, where all text is read, a run's too. "
            "Give a --workdir outside it"
        )
    if next(open_corpus(corpus)["train"](), None) is None:
        raise UserError(f"there is no text in {corpus}")


def fingerprint(corpus: str) -> str:
    """A hash that changes with the text of a corpus of `open_corpus`; of files, every byte is read."""
    digest = hashlib.sha256()
    if corpus == "docstrings":
        files = [*docstring_files().values()]
    elif corpus in NAMES or corpus.startswith(HUB):
        name = parse_hub_name(corpus) if corpus.startswith(HUB) else (WIKITEXT, f"{corpus}-v1")
        files, builder = [], hub_builder(*name)
        digest.update(f"{builder.config_id} {builder.hash}".encode())  # of the commit on the Hub
    else:
        path = Path(corpus)
        files = (
            [path]
            if path.is_file()
            else sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".tokens") and p.is_file())
        )
    for file in files:
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


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
    article: list[str] = []
    length = 0
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


def _held_out(documents: Documents) -> dict[str, Documents]:
    def part(validation: bool) -> Iterator[str]:
        return (text for text in documents() if (zlib.crc32(text.encode()) % HELD_OUT == 0) == validation)

    return {"train": functools.partial(part, False), "validation": functools.partial(part, True)}


def _paragraphs_of(files: list[Path]) -> Iterator[str]:
    for file in files:
        yield from _paragraphs(_lines(file))


def _articles_of(file: Path) -> Iterator[str]:
    return _articles(_lines(file))


def _hub_wikitext(name: str) -> dict[str, Documents]:
    splits = hub_splits(WIKITEXT, f"{name}-v1")

    def documents(rows) -> Iterator[str]:
        return _articles(row["text"] for row in rows)

    return {split: functools.partial(documents, rows) for split, rows in splits.items()}


def _hub_rows(corpus: str) -> dict[str, Documents]:
    splits = hub_splits(*parse_hub_name(corpus), streaming=True)
    if "train" not in splits:
        raise UserError(f"{corpus} has no split train; it has {', '.join(splits)}")

    def documents(rows) -> Iterator[str]:
        for row in rows:
            if not isinstance(row.get("text"), str):
                raise UserError(f"{corpus} has no column text; it has {', '.join(row)}")
            yield from _cut(row["text"].strip())

    streams: dict[str, Documents] = {
        split: functools.partial(documents, splits[split]) for split in SPLITS if split in splits
    }
    return streams if "validation" in streams else _held_out(streams["train"])


def _read_json_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)
