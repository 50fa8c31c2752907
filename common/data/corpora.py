# SPDX-License-Identifier: Apache-2.0
"""Text corpora by name or path, as streams of documents, by the `datasets` library.

A document is a string of one or more lines. Streams are lazy: a corpus may be larger than memory.
"""

import functools
import glob
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_replicas import UserError

from .docstrings import docstring_file

Documents = Callable[[], Iterator[str]]  # opens a new stream of them
NAMES = ("docstrings", "wikitext-2", "wikitext-103")
HUB = "hf://"
SPLITS = ("train", "validation", "test")
WIKITEXT_FILES = {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens", "test": "wiki.test.tokens"}
DOCUMENT_LIMIT = 20_000  # characters; longer text is split into several documents, so that memory is bounded
HELD_OUT = 10  # one part in this many is the validation split of a corpus without one


@dataclass(frozen=True)
class Corpus:
    """A stream for each split: `train`, `validation`, and `test` where there is one."""

    splits: dict[str, Documents]
    fingerprint: str  # changes with the text


def open_corpus(corpus: str) -> Corpus:
    """Finds a corpus and its splits.

    Args:
        corpus: one of
            - `docstrings`: English from the docstrings of the packages that this project depends on and CPython's
              `pydoc_data.topics`; needs no network. One source module in 10 is held out for validation, and its
              paragraphs that share eight consecutive words with the training text are dropped;
            - `wikitext-2`, `wikitext-103`: Merity et al. 2016, arXiv:1609.07843, from the Hugging Face Hub
              (`Salesforce/wikitext`, the token version);
            - `hf://user/name` or `hf://user/name/configuration`: any data set on the Hub with a column `text`, read as
              a stream; without a split `validation`, one row in 10 is held out;
            - a folder in WikiText's format: `wiki.train.tokens`, `wiki.valid.tokens` and, if there, `wiki.test.tokens`;
            - a text file, or a folder of `.txt` files: blank lines separate documents, and one document in 10, chosen
              by a hash of its text, is held out for validation.

    Raises:
        UserError: when it is none of these, or cannot be fetched; by a stream, when it is not UTF-8 text.
    """
    path = Path(corpus)
    if corpus == "docstrings":
        file = docstring_file()
        return Corpus({split: functools.partial(_docstrings, file, split) for split in SPLITS[:2]}, file.name)
    if corpus in NAMES or corpus.startswith(HUB):
        return _from_hub(corpus)
    if os.path.isfile(path / WIKITEXT_FILES["train"]):  # Path's raises an error for a long name
        files = {split: path / name for split, name in WIKITEXT_FILES.items() if (path / name).is_file()}
        if "validation" not in files:
            raise UserError(f"{path} has no {WIKITEXT_FILES['validation']}; a folder in WikiText's form needs one")
        lines = {split: functools.partial(read_text, [file]) for split, file in files.items()}
        return Corpus({split: functools.partial(_articles, lines[split]) for split in lines}, _checksum(files.values()))
    if os.path.isfile(path) or os.path.isdir(path):
        texts = [path] if path.is_file() else sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not texts:
            raise UserError(f"no .txt file and no {WIKITEXT_FILES['train']} in the folder {path}")
        return Corpus(_held_out(functools.partial(_in_pieces, functools.partial(_paragraphs, texts))), _checksum(texts))
    names = ", ".join(NAMES)
    raise UserError(f"the corpus {corpus} is neither {names}, hf://user/name, nor an existing file or folder")


def from_hub(function: str, name: str, *configuration: str, **options: Any) -> Any:
    """What a function of the `datasets` library, such as `load_dataset`, returns for a data set on the Hub.

    Raises:
        UserError: when it cannot be fetched.
    """
    import datasets  # not above: it takes a second

    try:
        return getattr(datasets, function)(name, *configuration, **options)
    except Exception as error:  # the library raises a dozen unrelated types when the hub is out of reach
        raise UserError(
            f"cannot fetch {name} from the Hugging Face Hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Without a network, download its files elsewhere, and give their folder"
        ) from error


def read_text(files: list[Path], sample_by: str = "line") -> Iterator[str]:
    """The lines, or paragraphs, of UTF-8 files. Raises a `UserError` that names the file and line of other content."""
    import datasets

    paths = [glob.escape(str(file.absolute())) for file in files]
    rows = datasets.load_dataset("text", data_files=paths, split="train", streaming=True, sample_by=sample_by)
    try:
        for row in rows:
            if "\0" in row["text"]:
                raise UnicodeDecodeError("utf-8", b"", 0, 0, "binary")
            yield row["text"].removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        for file in files:
            for number, line in enumerate(file.open("rb"), start=1):
                if b"\0" in line or "\ufffd" in line.decode("utf-8", errors="replace"):
                    raise UserError(f"{file}, line {number} is not UTF-8 text; convert it first") from error
        raise
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error


def _from_hub(corpus: str) -> Corpus:
    if corpus in NAMES:
        name = ["Salesforce/wikitext", f"{corpus}-v1"]
    else:
        parts = corpus.removeprefix(HUB).split("/")
        local = corpus.removeprefix(HUB).startswith(("/", "."))  # a folder that the library reads
        if not local and (len(parts) not in (2, 3) or not all(parts)):
            raise UserError(f"the corpus {corpus} must be {HUB}user/name or {HUB}user/name/configuration")
        name = ["/".join(parts)] if local else ["/".join(parts[:2]), *parts[2:]]
    builder = from_hub("load_dataset_builder", *name)
    fingerprint = f"{builder.config_id} {builder.hash}"  # a hash of the commit on the Hub
    rows = from_hub("load_dataset", *name, streaming=corpus not in NAMES)
    if "train" not in rows:
        raise UserError(f"{corpus} has no split train; it has {', '.join(rows)}")
    texts = {split: functools.partial(_column, corpus, rows[split]) for split in SPLITS if split in rows}
    read = _articles if corpus in NAMES else _in_pieces
    splits: dict[str, Documents] = {split: functools.partial(read, text) for split, text in texts.items()}
    return Corpus(splits if "validation" in splits else _held_out(splits["train"]), fingerprint)


def _column(corpus: str, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if not isinstance(row.get("text"), str):
            raise UserError(f"{corpus} has no column text; it has {', '.join(row)}")
        yield row["text"]


def _articles(lines: Documents) -> Iterator[str]:
    """WikiText's articles, each begun by a heading with one equals sign (` = Title = `); `<unk>` becomes `[UNK]`."""
    article = ""
    for line in lines():
        text = line.strip().replace("<unk>", "[UNK]")
        if article and (re.fullmatch(r"= [^=].* =", text) or len(article) > DOCUMENT_LIMIT):
            yield article
            article = ""
        if text:
            article += f"\n{text}" if article else text
    if article:
        yield article


def _paragraphs(files: list[Path]) -> Iterator[str]:
    for text in read_text(files, sample_by="paragraph"):
        yield from re.split(r"\n\s*\n", text)  # a blank line may have spaces


def _in_pieces(texts: Documents) -> Iterator[str]:
    """The texts; those longer than the limit are cut, at a space if there is one."""
    for text in texts():
        text, start = text.strip(), 0
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


def _docstrings(file: Path, split: str) -> Iterator[str]:
    return iter(json.loads(file.read_text(encoding="utf-8"))[split])


def _checksum(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(file.name.encode("utf-8", "surrogateescape"))
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
