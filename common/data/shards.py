# SPDX-License-Identifier: Apache-2.0
"""A corpus as TFRecord shards: token ids in sequences of one length, and a manifest that counts them.

    manifest.json                           the contents: tokenizer, sequence length, counts, checksums
    tokenizer.json                          the tokenizer, as Hugging Face's libraries load it
    train-00000-of-00008-1163.tfrecord      shard 0 of 8, with 1,163 sequences
    train-counts.npy                        how often each id occurs in the training split

A record is a `tf.train.Example` whose `token_ids` are a start token, text, and an end token. The folder may be any that
`tf.io.gfile` knows.
"""

import dataclasses
import hashlib
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from common.data.byte_pairs import BytePairs, Vocabulary
from common.data.corpora import HUB, NAMES, hub_name
from common.data.docstrings import docstring_file
from common.data.sources import from_hub
from common.data.wordpiece import WordPieces
from keras_replicas import UserError

READ_AT_ONCE = 2**22  # bytes


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a corpus in a folder, the vocabulary of their token ids, and their manifest.

    The manifest has `made_from`, `tokenizer` (a hash), `seq_length`, and `splits`. A split has `documents`, `tokens`,
    `sequences`, `dropped_tokens`, and `shards`, each with `file`, `sequences`, `bytes` and `crc32`. They add up:
    tokens + documents = sequences x (seq_length - 2) + dropped_tokens.
    """

    folder: str
    vocabulary: Vocabulary
    manifest: dict[str, Any]

    def files(self, split: str) -> list[dict[str, Any]]:
        """The shards of a split, as in the manifest."""
        return self.manifest["splits"][split]["shards"]

    def sizes(self) -> dict[str, int]:
        """The number of sequences in each split."""
        return {split: counts["sequences"] for split, counts in self.manifest["splits"].items()}

    def count_tokens(self) -> dict[str, tuple[int, int]]:
        """The number of sequences in each split, and of tokens in them."""
        return {split: (size, size * self.manifest["seq_length"]) for split, size in self.sizes().items()}

    def checksums(self) -> dict[str, int]:
        """A checksum of the shards of each split."""
        return {split: zlib.crc32(json.dumps(self.files(split)).encode()) for split in self.sizes()}

    def token_counts(self) -> np.ndarray:
        """How often each id occurs in the training split."""
        return np.load(io.BytesIO(read_bytes(f"{self.folder}/train-counts.npy")))


def find_shards(folder: str, made_from: dict[str, Any]) -> Shards | None:
    """The shards in a folder, with every byte checked; None if some are still to be written.

    Raises:
        UserError: when they are made from something else, a file is damaged, or the folder cannot be read.
    """
    path = f"{folder}/manifest.json"
    if not answered(tf.io.gfile.exists, path):
        return None
    try:
        manifest = json.loads(read_bytes(path))
        theirs, splits = manifest["made_from"], manifest.get("splits", {})
        files = [shard for split in splits.values() for shard in split["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged. Remove {folder}, or give another --data") from error
    for name, value in made_from.items():
        if theirs.get(name) != value:
            raise UserError(
                f"{path}: its shards have {name} {theirs.get(name)!r}, not {value!r}. "
                "Remove them, or give another --data"
            )
    if not splits:
        return None
    for shard in files:
        path = f"{folder}/{shard['file']}"
        size, crc32 = size_and_crc32(path)
        if not size:
            return None
        if (size, crc32) != (shard["bytes"], shard["crc32"]):
            what = "cut short" if size < shard["bytes"] else "damaged"
            raise UserError(f"{path} is {what}. Remove it; it will be written again")
    path = f"{folder}/tokenizer.json"
    if not tf.io.gfile.exists(path) or short_hash(read_bytes(path)) != manifest["tokenizer"]:
        raise UserError(f"{path} does not match the shards beside it. Remove {folder}, or give another --data")
    found = open_shards(folder)
    return found if _counts_all_tokens(found) else None


def _counts_all_tokens(shards: Shards) -> bool:
    """False if `train-counts.npy`, whose sum is known, is missing or damaged."""
    train = shards.manifest["splits"]["train"]
    try:
        counts = shards.token_counts()
    except (tf.errors.NotFoundError, ValueError, EOFError):
        return False
    return counts.shape == (len(shards.vocabulary.pieces),) and counts.sum() == train["tokens"] + train["documents"]


def open_shards(folder: str) -> Shards:
    """The shards in a folder, as `find_shards` has found them or `write_shards` has left them."""
    tokenizer = json.loads(read_bytes(f"{folder}/tokenizer.json"))
    model = tokenizer["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    vocabulary: Vocabulary
    if model["type"] == "BPE":
        vocabulary = BytePairs(pieces, [" ".join(pair) for pair in model["merges"]])
    else:
        bert = tokenizer["normalizer"]["normalizers"][-1]
        vocabulary = WordPieces(pieces, bert["lowercase"], bert["strip_accents"])
    return Shards(folder, vocabulary, json.loads(read_bytes(f"{folder}/manifest.json")))


def fingerprint(corpus: str) -> str:
    """A hash that changes with the text of a corpus of `open_corpus`; every byte of files is read."""
    digest, path, files = hashlib.sha256(), Path(corpus), []
    if corpus == "docstrings":
        files = [docstring_file()]
    elif corpus in NAMES or corpus.startswith(HUB):
        builder = from_hub("load_dataset_builder", *hub_name(corpus))
        digest.update(f"{builder.config_id} {builder.hash}".encode())  # a hash of the commit on the Hub
    elif path.is_file():
        files = [path]
    else:
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".tokens") and p.is_file())
    for file in files:
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def read_bytes(path: str) -> bytes:
    """A file's content, wherever `tf.io.gfile` finds it."""
    with tf.io.gfile.GFile(path, "rb") as file:
        return file.read()


def size_and_crc32(path: str) -> tuple[int, int]:
    """A file's size and checksum; 0 and 0 if it does not exist."""
    size = crc32 = 0
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            while part := file.read(READ_AT_ONCE):
                size += len(part)
                crc32 = zlib.crc32(part, crc32)
    except tf.errors.NotFoundError:
        pass
    return size, crc32


def short_hash(content: bytes) -> str:
    """The first 16 hexadecimal digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def answered(ask: Callable[[str], Any], path: str) -> Any:
    """The result of a function of `tf.io.gfile`; a `UserError` when it cannot use the path."""
    try:
        return ask(path)
    except tf.errors.UnimplementedError as error:
        raise UserError(
            f"TensorFlow cannot open {path}. For gs:// there is a package, up to Python 3.12: "
            "pip install 'tensorflow[gcs-filesystem]'"
        ) from error
    except tf.errors.OpError as error:
        raise UserError(f"cannot use the folder {path} ({error.message.splitlines()[0]})") from error
