# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids on disk: written once, memory-mapped, and read in any order.

    manifest.json                   what the rows are of: facts given by the writer; counts and checksums of each split
    tokenizer/                      KerasHub's tokenizer of the ids
    train-00000.tfrecord, ...       shards of a split: TFRecords of one size, so that row i of a shard lies at i x size

A record is int32 numbers: how many tokens a row has, and their ids, padded with -1 to the length of all rows. A token
that is no label, in a prompt for example, stands as -2 - id.
"""

import functools
import hashlib
import itertools
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from keras_replicas import Batches, UserError

from ..files import cached, read_json, write_json
from .corpora import Corpus
from .examples_to_rows import example_rows, find_examples
from .vocabulary import encode, tokenizer_from_files

BEFORE, AFTER = 12, 4  # bytes of TFRecord's own around a record: its length and a checksum of that; a checksum
SHARD_BYTES = 2**28  # at most
NO_LABEL = -2  # minus the id


class Rows:
    """The rows of a split, as `open_rows` finds them.

    Attributes:
        length: token ids in a row, with padding.
        tokens: in all rows, without padding.
        checksum: of all shards.
    """

    def __init__(self, folder: Path, split: str, length: int, facts: dict[str, Any]):
        self.length, self.tokens, self.checksum = length, facts["tokens"], facts["checksum"]
        self._size, self._rows = BEFORE + 4 * (1 + length) + AFTER, facts["rows"]
        self._in_a_shard = _rows_in_a_shard(length)
        self._paths = _shards(folder, split, self._rows, length)
        self._shards = []
        with tf.device("CPU"):  # of a file, this is a tensor in memory that is mapped to it
            for path in self._paths:
                shape = [path.stat().st_size // self._size, self._size]
                self._shards.append(
                    tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=shape, memory_region_name=str(path.resolve()))
                )

    def __len__(self):
        return self._rows

    def read(self, examples: tf.Tensor, trim: bool = False) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Rows as tensors, for use in `Dataset.map`.

        Args:
            examples: int64 vector of rows; -1 gives a row of padding.
            trim: whether to cut off what is padding in all these rows, but for a multiple of 32.

        Returns:
            Token ids, int32 [examples, length], 0 for padding; whether each is a token, and whether it is a label.
        """
        wanted = tf.maximum(examples, 0)
        shard = wanted // self._in_a_shard
        places = [tf.cast(tf.where(shard == number)[:, 0], tf.int32) for number in range(len(self._shards))]
        parts = [tf.gather(wanted, place) % self._in_a_shard for place in places]
        records = [tf.gather(shard, part) for shard, part in zip(self._shards, parts, strict=True)]
        record = tf.ensure_shape(tf.dynamic_stitch(places, records), [*examples.shape, self._size])
        numbers = tf.bitcast(tf.reshape(record[:, BEFORE:-AFTER], [-1, 1 + self.length, 4]), tf.int32)
        counts, ids = tf.where(examples < 0, 0, numbers[:, 0]), numbers[:, 1:]
        if trim:
            longest = tf.maximum(tf.reduce_max(counts), 1)  # where all is padding, a model still needs some
            ids = ids[:, : tf.minimum(-(-longest // 32) * 32, self.length)]
        is_token = tf.range(tf.shape(ids)[1]) < counts[:, None]
        is_label = is_token & (ids >= 0)
        return tf.where(is_token, tf.where(is_label, ids, NO_LABEL - ids), 0), is_token, is_label

    def batches(self, make_batch: Any, batch_size: int, shuffle: bool, seed: int) -> "RowBatches":
        """Batches that `make_batch` makes of epochs and rows; see `keras_replicas.Batches`."""
        return RowBatches(self, make_batch, batch_size, shuffle, seed)

    def counts(self, vocabulary_size: int) -> np.ndarray:
        """How often each id occurs, int64 [vocabulary_size]."""
        counts = np.zeros(vocabulary_size, np.int64)
        for path in self._paths:
            records = np.memmap(path, np.uint8, "r").reshape(-1, self._size)
            for first in range(0, len(records), 4096):
                part = np.ascontiguousarray(records[first : first + 4096, BEFORE + 4 : -AFTER]).view(np.int32)
                part = np.where(part <= NO_LABEL, NO_LABEL - part, part)
                counts += np.bincount(part[part >= 0], minlength=vocabulary_size)
        return counts


class RowBatches(Batches):
    """`Batches` of `rows`, which workers must have alike, and a run from its beginning to its end."""

    def __init__(self, rows: Rows, make_batch: Any, batch_size: int, shuffle: bool, seed: int):
        super().__init__(make_batch, batch_size, size=len(rows), shuffle=shuffle, seed=seed)
        self.rows = rows

    def fingerprint(self) -> dict[str, Any]:
        """See `Batches`."""
        return super().fingerprint() | {"checksum of the rows": self.rows.checksum}


def text_rows(
    texts: Iterable[np.ndarray], length: int, before: tuple = (), after: tuple = (), overlap: int = 0
) -> Iterator[np.ndarray]:
    """All texts as one row of ids, cut into rows of `length`; the last one may be shorter.

    Args:
        texts: the ids of each.
        length: of the rows.
        before, after: ids that are put before and after each text that has any.
        overlap: how many ids each row begins with that end the row before it.
    """
    waiting: list[np.ndarray] = []
    size = 0
    for ids in texts:
        if len(ids):
            waiting += [np.array([*before, *ids, *after], np.int32)]
            size += len(waiting[-1])
        if size >= max(length, 2**16):
            row = np.concatenate(waiting)
            count = (len(row) - overlap) // (length - overlap)
            yield from (row[start : start + length] for start in range(0, count * (length - overlap), length - overlap))
            waiting = [row[count * (length - overlap) :]]
            size = len(waiting[0])
    row = np.concatenate(waiting) if waiting else np.empty(0, np.int32)
    for start in range(0, len(row) - overlap, length - overlap):
        yield row[start : start + length]


def write_rows(
    folder: Path, splits: Mapping[str, Iterable[np.ndarray]], length: int, tokenizer: Any, facts: dict[str, Any]
) -> None:
    """Writes rows to a folder, which is complete when its manifest is there; progress is shown if it takes long.

    Args:
        folder: created if missing.
        splits: rows of ids, each at most `length`; those of no label as -2 - id.
        length: of all rows.
        tokenizer: KerasHub's, of the ids.
        facts: what the rows are of, which JSON must hold, for the manifest.

    Raises:
        UserError: when a split but `test` has no rows.
        OSError: when the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split, rows in splits.items():
        shown = iter(tqdm(rows, f"tokens of {split}", unit=" rows", delay=5, mininterval=1))
        number = tokens = checksum = 0
        for shard in itertools.count():
            part = itertools.islice(shown, _rows_in_a_shard(length))
            path, first = folder / _shard(split, shard), next(part, None)
            if first is None:
                break
            with tf.io.TFRecordWriter(str(path)) as writer:
                for row in itertools.chain([first], part):
                    record = np.full(1 + length, -1, np.int32)
                    record[0], record[1 : 1 + len(row)] = len(row), row
                    writer.write(record.tobytes())
                    number, tokens = number + 1, tokens + len(row)
            checksum = _checksum(path, checksum)
        if number or split != "test":
            counts[split] = {"rows": number, "tokens": tokens, "checksum": checksum}
        if not number and split != "test":
            raise UserError(f"no text is left for {split}: give more")
    tokenizer.save_to_preset(str(folder / "tokenizer"))
    write_json(folder / "manifest.json", {"facts": facts, "length": length, "splits": counts})


def corpus_rows(
    corpus: Corpus,
    tokenizer: keras_hub.models.Tokenizer,
    length: int,
    *,
    pack: bool = True,
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
    overlap: int = 0,
    folder: str = "",
) -> dict[str, Rows]:
    """The rows of a corpus's splits, written where they are not yet.

    Args:
        corpus: the texts.
        tokenizer: which makes ids of them.
        length, before, after, overlap: see `text_rows`.
        pack: False for a row for each line of a text, cut to `length`, in place of `text_rows`.
        folder: where they are kept, which may be remote, such as `gs://bucket/rows`; empty for this machine's cache.

    Raises:
        UserError: as `write_rows` and `open_rows`; when the folder has rows of something else.
    """
    facts = {"corpus": corpus.fingerprint, "tokenizer": fingerprint(tokenizer), "pack": pack}
    facts |= {"before": list(before), "after": list(after), "overlap": overlap}

    def write(path: Path) -> None:
        splits: dict[str, Iterable[np.ndarray]] = {}
        for split, texts in corpus.splits.items():
            if pack:
                splits[split] = text_rows(encode(texts(), tokenizer), length, before, after, overlap)
            else:
                lines = (line for text in texts() for line in text.splitlines())
                splits[split] = (ids[:length] for ids in encode(lines, tokenizer) if len(ids))
        write_rows(path, splits, length, tokenizer, facts)

    folder = folder.rstrip("/")
    if not folder or not _answered(tf.io.gfile.exists, f"{folder}/manifest.json"):
        made = cached("rows", [json.dumps([facts, length])], write)
        if not folder:
            return open_rows(str(made))
        there = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
        if others := {name.rstrip("/") for name in there} - {path.name for path in made.iterdir()}:
            raise UserError(f"{folder} holds {min(others)}, but no manifest.json of rows: give another folder")
        _answered(functools.partial(_copy, str(made)), folder)
    found = read_json(_local(folder) / "manifest.json") or {}
    if (found.get("facts"), found.get("length")) != (facts, length):
        raise UserError(f"{folder} has rows of another corpus, tokenizer or length: give another folder")
    return open_rows(folder)


def open_rows(folder: str) -> dict[str, Rows]:
    """The rows of each split in a folder that `write_rows` has filled. A remote one is copied to the cache first.

    In a folder of `tf.train.Example`, as BERT's pipelines write them, they are converted into the cache first: see
    `examples_to_rows`.

    Raises:
        UserError: when there are none, or they are damaged, or cannot be read.
    """
    place = _local(folder)
    manifest = read_json(place / "manifest.json") or {}
    try:
        length, splits = manifest["length"], manifest["splits"]
        for split, facts in splits.items():
            checksum = 0
            for path in _shards(place, split, facts["rows"], length):
                checksum = _checksum(path, checksum)
            if checksum != facts["checksum"]:
                raise UserError(f"the rows of {split} in {place} are damaged: remove the folder")
        return {split: Rows(place, split, length, facts) for split, facts in splits.items()}
    except (TypeError, KeyError, OSError) as error:
        raise UserError(f"{place} has no rows of text, or not all of them ({error!r}): remove the folder") from error


def rows_tokenizer(folder: str) -> keras_hub.models.Tokenizer:
    """The tokenizer of the rows in a folder; see `open_rows`. Raises a `UserError` when there is none."""
    place = _local(folder) / "tokenizer"
    try:  # `Tokenizer.from_preset` would look for a backbone
        tokenizer = keras.saving.deserialize_keras_object(read_json(place / "tokenizer.json"))
        tokenizer.load_assets(str(place / "assets/tokenizer"))
        return tokenizer
    except (AttributeError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{folder} has no tokenizer of its rows: give another folder") from error


def fingerprint(tokenizer: keras_hub.models.Tokenizer) -> str:
    """A hash of what determines the ids of a text: the tokenizer's class, settings and assets."""
    settings = {"class": type(tokenizer).__name__} | tokenizer.get_config() | {"name": ""}  # which counts the instances
    digest = hashlib.sha256(json.dumps(settings, default=str).encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_assets(folder)
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _local(folder: str) -> Path:
    """Where the rows of a folder lie on this machine."""
    folder = folder.rstrip("/")
    if not _answered(tf.io.gfile.exists, f"{folder}/manifest.json"):
        files = find_examples(folder)
        tokenizer = tokenizer_from_files(folder)
        stats = [(path, tf.io.gfile.stat(path)) for path in itertools.chain(*files.values())]
        inputs = [fingerprint(tokenizer), *(f"{path} {stat.length} {stat.mtime_nsec}" for path, stat in stats)]

        def convert(path: Path) -> None:
            write_rows(path, *example_rows(files, tokenizer), tokenizer, {"examples": files})

        return _answered(lambda _: cached("rows", inputs, convert), folder)
    if "://" not in folder:
        return Path(folder)
    manifest = _answered(lambda path: tf.io.gfile.GFile(path).read(), f"{folder}/manifest.json")
    return _answered(lambda _: cached("rows", [folder, manifest], lambda path: _copy(folder, str(path))), folder)


def _rows_in_a_shard(length: int) -> int:
    return SHARD_BYTES // (BEFORE + 4 * (1 + length) + AFTER)


def _shard(split: str, number: int) -> str:
    return f"{split}-{number:05}.tfrecord"


def _shards(folder: Path, split: str, rows: int, length: int) -> list[Path]:
    return [folder / _shard(split, number) for number in range(-(-rows // _rows_in_a_shard(length)))]


def _checksum(path: Path, before: int) -> int:
    """The CRC-32 of a file's content, after that of others."""
    with path.open("rb") as file:
        while content := file.read(2**22):
            before = zlib.crc32(content, before)
    return before


def _copy(source: str, target: str) -> None:
    """Copies a folder of rows, from or to any file system that TensorFlow knows; the manifest comes last."""
    for folder, _, files in [*tf.io.gfile.walk(source)][::-1]:
        place = target + folder.rstrip("/").removeprefix(source)
        tf.io.gfile.makedirs(place)
        for file in sorted(files, key=lambda name: name == "manifest.json"):
            tf.io.gfile.copy(f"{source}{place.removeprefix(target)}/{file}", f"{place}/{file}", overwrite=True)


def _answered(operation: Callable, path: str) -> Any:
    """What an operation of `tf.io.gfile` returns; a `UserError` when the file system does not answer."""
    try:
        return operation(path)
    except tf.errors.OpError as error:
        why = (error.message or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot use {path} ({why}): give another folder") from error
