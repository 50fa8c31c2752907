# SPDX-License-Identifier: Apache-2.0
"""Folders of rows that a user names: written once, local or remote, and opened; with `tf.train.Example`, converted.

Shards of `tf.train.Example` are those of BERT's pipelines: int64 `token_ids` or `input_ids` of texts of tokens.
"""

import contextlib
import fnmatch
import functools
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from keras_replicas import UserError

from ..files import MALFORMED, cached, one_line, read_json
from ..untrusted import check_preset
from .rows import AFTER, BEFORE, LONGEST, Rows, fingerprint, open_rows, write_rows
from .tables import tell
from .vocabulary import in_order, load_wordpieces, vectors, wordpieces

NAMES = {"train": "*train*.tfrecord*", "validation": "*valid*.tfrecord*", "test": "*test*.tfrecord*"}
MOST_BYTES = 2**20  # of an example
FEATURES = {name: tf.io.RaggedFeature(tf.int64) for name in ("token_ids", "input_ids")}  # a missing one is empty


def keep_in(folder: str, name: str, inputs: list[str], write: Callable[[Path], None]) -> Path:
    """For `corpus_rows`: keeps rows in a folder, which may be remote, such as `gs://bucket/rows`.

    Raises a `UserError` when the folder holds something else, or the file system does not answer.
    """
    folder = folder.rstrip("/")
    with _answering(folder):
        has_rows = tf.io.gfile.exists(f"{folder}/manifest.json")
    if not has_rows:
        made = cached(name, inputs, write)
        with _answering(folder):
            there = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
            if others := {file.rstrip("/") for file in there} - {path.name for path in made.iterdir()}:
                raise UserError(f"{folder} holds {min(others)}, but no manifest.json of rows: give another folder")
            _copy(str(made), folder)
    path = _local(folder)
    found = read_json(path / "manifest.json") or {}
    if [found.get("facts"), found.get("length")] != json.loads(inputs[0]):
        raise UserError(f"{folder} has rows of another corpus, tokenizer or length: give another folder")
    return path


def holds_examples(folder: str) -> bool:
    """Whether a folder has shards of `tf.train.Example` with their tokenizer; a `UserError` as of `keep_in`."""
    with _answering(folder):
        there = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
    return not {"vocab.txt", "tokenizer.json"}.isdisjoint(there) and "manifest.json" not in there


def open_folder(folder: str, longest: float = math.inf) -> tuple[dict[str, Rows], keras_hub.models.Tokenizer]:
    """The rows of each split in a folder, of at most `longest` tokens each, and the tokenizer of their ids.

    A remote folder is copied to the cache first; one of `tf.train.Example`, in files named as in `NAMES`, with BERT's
    `vocab.txt` or Hugging Face's `tokenizer.json` of BERT, RoBERTa or GPT-2, is converted into the cache. Raises a
    `UserError` when there are no rows, they are too long or damaged, or the file system does not answer.
    """
    path = _local(folder.rstrip("/"))
    rows, saved = open_rows(path), path / "tokenizer"
    if (length := rows["train"].length) > longest:
        raise UserError(f"the rows of {folder} have {length} tokens, not {longest}: take longer sequences")
    with one_line(f"{folder} has no tokenizer of its rows", ": give another folder", MALFORMED):
        check_preset(saved, keras_form=True)
        # `Tokenizer.from_preset` would look for a backbone.
        tokenizer = keras.saving.deserialize_keras_object(read_json(saved / "tokenizer.json"))
        tokenizer.load_assets(str(saved / "assets/tokenizer"))
    for of_split in rows.values():
        of_split.counts(tokenizer.vocabulary_size())
    return rows, tokenizer


def _local(folder: str) -> Path:
    """Where the rows of a folder lie on this machine."""
    with _answering(folder):
        if not tf.io.gfile.exists(f"{folder}/manifest.json"):
            return _converted(folder)
        if "://" not in folder:
            return Path(folder)
        manifest = tf.io.gfile.GFile(f"{folder}/manifest.json").read()
        return cached("rows", [folder, manifest], lambda path: _copy(folder, str(path)))


def _answering(folder: str) -> contextlib.AbstractContextManager:
    """Raises a `UserError` when the folder's file system does not answer."""
    return one_line(f"cannot use {folder}", ": give another folder", (tf.errors.OpError,))


def _copy(source: str, target: str) -> None:
    """Copies a folder of rows, from or to any file system that TensorFlow knows; the manifest comes last."""
    for folder, _, files in [*tf.io.gfile.walk(source)][::-1]:
        copy = target + folder.rstrip("/").removeprefix(source)
        tf.io.gfile.makedirs(copy)
        for file in sorted(files, key=lambda name: name == "manifest.json"):
            tf.io.gfile.copy(f"{folder.rstrip('/')}/{file}", f"{copy}/{file}", overwrite=True)


def _converted(folder: str) -> Path:
    """The rows of shards of `tf.train.Example`, without start, end and padding; the longest has their length."""
    names = sorted(tf.io.gfile.listdir(folder)) if tf.io.gfile.isdir(folder) else []
    files: dict[str, list[str]] = {split: [] for split in NAMES}
    for name in names:
        found = name.replace("latest", "")  # which is no test
        if fits := [split for split, pattern in NAMES.items() if fnmatch.fnmatch(found, pattern)]:
            files[fits[-1]].append(f"{folder}/{name}")  # "pretraining_valid" has both words
    if not files["train"] or not files["validation"]:
        raise UserError(f"{folder} has no rows of text, and no {NAMES['train']} with {NAMES['validation']}")
    tokenizer = _tokenizer_of_examples(folder)
    texts = {split: functools.partial(_texts, files[split], tokenizer) for split in files if files[split]}
    stats = [(path, tf.io.gfile.stat(path)) for path in itertools.chain(*files.values())]
    inputs = [fingerprint(tokenizer), *(f"{path} {stat.length} {stat.mtime_nsec}" for path, stat in stats)]

    def write(path: Path) -> None:
        for file in itertools.chain(*files.values()):
            _check_records(file)
        sizes = [(len(ids), ids.min(), ids.max()) for of_split in texts.values() for ids in of_split()]
        known = range(tokenizer.vocabulary_size())
        if not sizes or not all(lowest in known and highest in known for _, lowest, highest in sizes):
            raise UserError(f"the files of {folder} have no ids, or ids that their tokenizer lacks")
        if (length := max(length for length, *_ in sizes)) > LONGEST:
            raise UserError(f"a text in the files of {folder} has {length} tokens: cut it to {LONGEST}")
        splits = {split: of_split() for split, of_split in texts.items()}
        write_rows(path, splits, length, tokenizer, {"examples": files})

    return cached("rows", inputs, write)


def _check_records(path: str) -> None:
    """Raises a UserError for a record of a length that none has: TensorFlow would take that memory before it reads."""
    folder, name = path.rsplit("/", 1)
    with (
        one_line(f"cannot use {folder}", ": give another folder", (ValueError, EOFError, OSError, zlib.error)),
        tf.io.gfile.GFile(path, "rb") as raw,
        gzip.open(raw) if path.endswith(".gz") else raw as file,
    ):
        while header := file.read(BEFORE):
            length = int.from_bytes(header[:8], "little")
            if length > MOST_BYTES or len(file.read(length + AFTER)) < length + AFTER:
                raise ValueError(f"{name} has a record of {length:,} bytes")


def _texts(files: list[str], tokenizer: keras_hub.models.Tokenizer) -> Iterator[np.ndarray]:
    pad = tokenizer.pad_token_id
    for records in tf.data.TFRecordDataset(files, "GZIP" if files[0].endswith(".gz") else None).batch(256):
        ids_of = tf.io.parse_example(records, FEATURES)
        if tf.reduce_any(tf.reduce_all([ids_of[name].row_lengths() > 0 for name in FEATURES], axis=0)):
            raise UserError(f"{files[0]} has examples with both {' and '.join(FEATURES)}: keep one of them")
        for padded in vectors(tf.concat([ids_of[name] for name in FEATURES], axis=1)):
            ids = np.trim_zeros(padded - pad, "b") + pad
            if len(ids) < len(padded) and pad not in tokenizer.special_token_ids:
                tell(f"{files[0]} has texts that end in {tokenizer.id_to_token(pad)!r}: it is left out, as padding")
            ends = [np.sum(ids[:1] == tokenizer.start_token_id), np.sum(ids[-1:] == tokenizer.end_token_id)]
            if len(ids) > sum(ends):
                yield ids[ends[0] : len(ids) - ends[1]]


def _tokenizer_of_examples(folder: str) -> keras_hub.models.Tokenizer:
    pieces, path = f"{folder}/vocab.txt", f"{folder}/tokenizer.json"
    if tf.io.gfile.exists(pieces):
        return load_wordpieces(pieces)
    if not tf.io.gfile.exists(path):
        raise UserError(f"{folder} has no manifest.json of rows, and neither vocab.txt nor tokenizer.json of examples")
    with one_line(f"{path} is no tokenizer of BERT, RoBERTa or GPT-2", errors=MALFORMED):
        model = json.loads(tf.io.gfile.GFile(path).read())["model"]
        ids = model["vocab"]
        if model["type"] == "WordPiece":
            return wordpieces(in_order(ids), path)
        kind = keras_hub.models.RobertaTokenizer if "<mask>" in ids else keras_hub.models.GPT2Tokenizer
        return kind(ids, [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
