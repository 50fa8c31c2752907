# SPDX-License-Identifier: Apache-2.0
"""Text corpora by name or path, as streams of documents.

A corpus is a dict from split ("train", "validation", and "test" where there is one) to a function that opens a new
stream of that split's documents. A document is a string of one or more lines. Streams are lazy: a corpus may be larger
than memory.
"""

import functools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from common.data.docstrings import docstring_file
from common.data.sources import Documents, from_hub
from keras_replicas import UserError

NAMES = ("docstrings", "wikitext-2", "wikitext-103")
HUB = "hf://"
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
              (`Salesforce/wikitext`, the token version), through the `datasets` library;
            - `hf://user/name` or `hf://user/name/configuration`: any data set on the Hub with a column `text`, read as
              a stream; without a split `validation`, one row in 10 is held out;
            - a folder in WikiText's format: `wiki.train.tokens`, `wiki.valid.tokens` and, if there, `wiki.test.tokens`;
            - a text file, or a folder of `.txt` files: blank lines separate documents, and one document in 10, chosen
              by a hash of its text, is held out for validation.

    Raises:
        UserError: when it is none of these, or cannot be fetched.
    """
    if corpus == "docstrings":
        file = docstring_file()
        return {split: functools.partial(_read_docstrings, file, split) for split in NEEDED_SPLITS}
    if corpus in NAMES:
        splits = from_hub("load_dataset", *hub_name(corpus), streaming=False)
        return {split: functools.partial(_wikitext_rows, rows) for split, rows in splits.items()}
    if corpus.startswith(HUB):
        return _hub_rows(corpus)
    path = Path(corpus)
    if (path / WIKITEXT_FILES["train"]).is_file():
        files = {split: path / name for split, name in WIKITEXT_FILES.items() if (path / name).is_file()}
        if "validation" not in files:
            raise UserError(f"{path} has no {WIKITEXT_FILES['validation']}; a folder in WikiText's form needs one")
        return {split: functools.partial(_read_articles, file) for split, file in files.items()}
    if path.is_file() or path.is_dir():
        texts = [path] if path.is_file() else sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not texts:
            raise UserError(f"no .txt file and no {WIKITEXT_FILES['train']} in the folder {path}")
        return _held_out(functools.partial(_paragraphs, texts))
    raise UserError(
        f"--corpus {corpus} is neither docstrings, wikitext-2, wikitext-103, hf://user/name, "
        "nor an existing file or folder"
    )


def check_corpus(corpus: str, workdir: str) -> None:
    """Checks that there is text to train on.

    Raises:
        UserError: when there is none, or the work directory is inside the corpus: a run writes text too.
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


def hub_name(corpus: str) -> tuple[str, str | None]:
    """The name and the configuration, if any, of a corpus on the Hub. `hf://` may also be followed by a local path.

    Raises:
        UserError: when it is neither `wikitext-...` nor `hf://user/name` nor `hf://user/name/configuration`.
    """
    if corpus in NAMES:
        return "Salesforce/wikitext", f"{corpus}-v1"
    name = corpus.removeprefix(HUB)
    if name.startswith(("/", ".")):
        return name, None
    parts = name.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise UserError(f"--corpus {corpus} must be {HUB}user/name or {HUB}user/name/configuration")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


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


def _read_articles(file: Path) -> Iterator[str]:
    return _articles(_lines(file))


def _wikitext_rows(rows) -> Iterator[str]:
    return _articles(row["text"] for row in rows)


def _paragraphs(files: list[Path]) -> Iterator[str]:
    """Paragraphs, separated by blank lines; those longer than the limit are cut, at a space if there is one."""
    for file in files:
        paragraph = ""
        for line in _lines(file):
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
        if end < len(text) and (space := text.rfind(" ", start + 1, end)) > start:
            end = space
        yield text[start:end].strip()
        start = end


def _held_out(documents: Documents) -> dict[str, Documents]:
    def part(validation: bool) -> Iterator[str]:
        return (text for text in documents() if (zlib.crc32(text.encode()) % HELD_OUT == 0) == validation)

    return {"train": functools.partial(part, False), "validation": functools.partial(part, True)}


def _hub_rows(corpus: str) -> dict[str, Documents]:
    splits = from_hub("load_dataset", *hub_name(corpus), streaming=True)
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


def _read_docstrings(path: Path, split: str) -> Iterator[str]:
    return iter(json.loads(path.read_text(encoding="utf-8"))[split])
