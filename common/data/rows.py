# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids on disk: written once, memory-mapped, and read in any order.

    manifest.json                   what the rows are of: facts given by the writer; counts and checksums of each split
    tokenizer/                      KerasHub's tokenizer of the ids
    train-00000.tfrecord, ...       shards of a split: TFRecords of one size, so that row i of a shard lies at i x size

A record is int32 numbers: how many tokens a row has, and their ids, padded with -1 to the length of all rows. A token
that is no label, in a prompt for example, stands as -2 - id.
"""

import contextlib
import hashlib
import itertools
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from keras_replicas import Batches, UserError

from ..files import MALFORMED, cached, one_line, read_json, tell_if_few, write_json
from .corpora import SPLITS, Corpus
from .vocabulary import encode, not_seen, tell, unknown_id

BEFORE, AFTER = 12, 4  # bytes of TFRecord's own around a record: its length and a checksum of that; a checksum
SHARD_BYTES = 2**28  # at most
NO_LABEL = -2  # minus the id
FEW_TOKENS = 2000  # a masked language model predicts some 300 of them: chance moves its loss by 0.15 nats
LONGEST = 2**16 + 1  # tokens in a row


class Rows:
    """The rows of a split, as `open_rows` finds them: each of `length` token ids, with padding.

    The `checksum` is of all shards; `not_seen` is what `vocabulary.not_seen` says of the texts.
    """

    def __init__(self, shards: list[Path], rows: int, length: int, checksum: int, not_seen: dict[str, Any]):
        self._counts: np.ndarray | None = None
        self._rows, self.length, self.checksum, self.not_seen = rows, length, checksum, not_seen
        self._size, self._in_a_shard, self._shards = _size(length), SHARD_BYTES // _size(length), []
        for path in shards:
            shape = [path.stat().st_size // self._size, self._size]
            with tf.device("CPU"):  # of a file, this is a tensor in memory that is mapped to it
                shard = tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=shape, memory_region_name=str(path.resolve()))
            self._shards.append(shard)

    def __len__(self):
        return self._rows

    @tf.autograph.experimental.do_not_convert  # AutoGraph finds nothing to convert, and takes its time
    def read(self, examples: tf.Tensor, trim: bool = False) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Token ids, int32 [examples, length], 0 for padding; whether each is a token, and whether it is a label.

        Of the `examples`, an int64 vector of rows, -1 gives a row of padding. To `trim` is to cut off what is padding
        in all of them, to a multiple of 32 tokens.
        """
        wanted = tf.maximum(examples, 0)
        shard, in_shard = wanted // self._in_a_shard, wanted % self._in_a_shard
        orders = [tf.where(shard == number)[:, 0] for number in range(len(self._shards))]
        records = [tf.gather(s, tf.gather(in_shard, order)) for s, order in zip(self._shards, orders, strict=True)]
        record = tf.dynamic_stitch([tf.cast(order, tf.int32) for order in orders], records)
        record = tf.ensure_shape(record, [*examples.shape, self._size])
        values = tf.bitcast(tf.reshape(record[:, BEFORE:-AFTER], [-1, 1 + self.length, 4]), tf.int32)
        counts, ids = tf.where(examples < 0, 0, values[:, 0]), values[:, 1:]
        if trim:
            longest = tf.maximum(tf.reduce_max(counts), 1)  # where all is padding, a model still needs some
            ids = ids[:, : -(-longest // 32) * 32]
        is_token = tf.range(tf.shape(ids)[1]) < counts[:, None]
        is_label = is_token & (ids >= 0)
        return tf.where(is_token, tf.where(is_label, ids, NO_LABEL - ids), 0), is_token, is_label

    def counts(self, vocabulary_size: int) -> np.ndarray:
        """How often each id occurs, int64 [vocabulary_size]; a `UserError` when there are others."""
        if self._counts is not None:  # when the rows were opened
            return self._counts
        counts = np.zeros(vocabulary_size, np.int64)
        for first in range(0, len(self), 4096):
            with tf.device("CPU"):  # where the rows are
                ids, is_token, _ = self.read(tf.range(first, min(first + 4096, len(self)), dtype=tf.int64))
            tokens = ids.numpy()[is_token.numpy()]
            if np.any(tokens < 0) or np.any(tokens >= vocabulary_size):
                raise UserError(f"the rows have an id that is not in their tokenizer, of {vocabulary_size} tokens")
            counts += np.bincount(tokens, minlength=vocabulary_size)
        self._counts = counts
        return counts


class RowBatches(Batches):
    """`Batches` that a function makes of epochs and `rows`, which workers must have alike, and a resumed run, too."""

    def __init__(self, rows: Rows, make_batch: Callable, batch_size: int, *, shuffle: bool, seed: int):
        super().__init__(make_batch, batch_size, size=len(rows), shuffle=shuffle, seed=seed)
        self.rows, self.not_seen = rows, rows.not_seen

    def fingerprint(self) -> dict[str, Any]:
        """Facts that must be the same on all workers, and in a resumed run."""
        return super().fingerprint() | {"checksum of the rows": self.rows.checksum}


def text_rows(
    texts: Iterable[np.ndarray], length: int, before: tuple = (), after: tuple = (), overlap: int = 0
) -> Iterator[np.ndarray]:
    """All texts' ids as one row, cut into rows of `length`; the last one may be shorter.

    Each text that has ids is put between those of `before` and `after`. A row begins with the last `overlap` ids of the
    one before.
    """
    row, step, texts = np.empty(0, np.int32), length - overlap, filter(len, texts)
    around = np.array(before, np.int32), np.array(after, np.int32)
    while some := [*itertools.islice(texts, 1024)]:
        row = np.concatenate([row, *(piece for ids in some for piece in (around[0], ids, around[1]))])
        end = max(len(row) - overlap, 0) // step * step
        yield from (row[start : start + length] for start in range(0, end, step))
        row = row[end:]
    if len(row) > overlap:
        yield row


def write_rows(
    folder: Path, splits: Mapping[str, Iterable[np.ndarray]], length: int, tokenizer: Any, facts: dict[str, Any]
) -> None:
    """Writes rows to a folder, which is complete when its manifest is there; progress is shown if it takes long.

    Rows of `splits` are ids of the `tokenizer`, those of no label as -2 - id; they are cut or padded to `length`. The
    `facts`, which JSON must hold, are for the manifest. Raises a `UserError` when a split but `test` has no rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    unknown = unknown_id(tokenizer)
    for split, rows in splits.items():
        shown = tqdm(rows, f"tokens of {split}", unit=" rows", delay=5, mininterval=1)
        unknowns = 0
        lengths: list[int] = []
        shards: list[Path] = []
        with contextlib.ExitStack() as files:
            for row in shown:
                if len(lengths) % (SHARD_BYTES // _size(length)) == 0:
                    files.close()
                    shards.append(folder / f"{split}-{len(shards):05}.tfrecord")
                    writer = files.enter_context(tf.io.TFRecordWriter(str(shards[-1])))
                record = np.full(1 + length, -1, np.int32)
                lengths.append(len(row))
                unknowns += int(np.sum((row == unknown) | (row == NO_LABEL - unknown)))
                row = row[:length]
                record[0], record[1 : 1 + len(row)] = len(row), row
                writer.write(record.tobytes())
        if lengths:
            tokens = sum(min(each, length) for each in lengths)
            facts_of = {"rows": len(lengths), "tokens": tokens, "checksum": _checksum(shards)}
            counts[split] = facts_of | {"not_seen": not_seen(lengths, length, unknowns)}
        elif split != "test":
            raise UserError(f"no text is left for the split {split}: give more text")
    tokenizer.save_to_preset(str(folder / "tokenizer"))
    write_json(folder / "manifest.json", {"facts": facts, "length": length, "splits": counts})


def corpus_rows(
    corpus: Corpus,
    tokenizer: keras_hub.models.Tokenizer,
    length: int,
    *,
    pack: bool = True,
    before: tuple = (),
    after: tuple = (),
    overlap: int = 0,
    keep: Callable[..., Path] = cached,
) -> dict[str, Rows]:
    """The rows of a corpus's splits, made by `text_rows`, and written where they are not yet.

    With `pack` False, each line of a text is a row, cut to `length`. The cache keeps rows, or `row_folders.keep_in`.
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
                splits[split] = (ids for ids in encode(lines, tokenizer) if len(ids))
        write_rows(path, splits, length, tokenizer, facts)

    return open_rows(keep("rows", [json.dumps([facts, length])], write))


def open_rows(folder: Path) -> dict[str, Rows]:
    """The rows of each split in a folder of `write_rows`; a `UserError` when there are none, or they are damaged."""
    manifest, splits = read_json(folder / "manifest.json") or {}, {}
    with one_line(f"{folder} has no rows of text, or not all of them", ": remove the folder", MALFORMED):
        for split, facts in manifest["splits"].items():
            if split not in SPLITS or not 0 < manifest["length"] <= LONGEST:
                raise ValueError(f"the split {split!r} has rows of {manifest['length']!r} tokens")
            shards = sorted(folder.glob(f"{split}-*.tfrecord"))
            size = sum(file.stat().st_size for file in shards)
            if size != facts["rows"] * _size(manifest["length"]):
                raise ValueError(f"the rows of {split} have {size:,} bytes, not those of {facts['rows']} rows")
            if _checksum(shards) != facts["checksum"]:
                raise ValueError(f"the rows of {split} are damaged")
            unseen = facts.get("not_seen", {})
            splits[split] = Rows(shards, facts["rows"], manifest["length"], facts["checksum"], unseen)
            tell(split, unseen)
            if split != "train":
                tell_if_few(split, facts["tokens"], FEW_TOKENS, "tokens")
    return splits


def fingerprint(tokenizer: keras_hub.models.Tokenizer) -> str:
    """A hash of what determines the ids of a text: the tokenizer's class, settings and assets."""
    settings = {"class": type(tokenizer).__name__} | tokenizer.get_config() | {"name": ""}  # which counts the instances
    values = {name: sorted(map(str, value)) if isinstance(value, list) else value for name, value in settings.items()}
    digest = hashlib.sha256(json.dumps(values, default=str).encode())  # a list of tokens may come from a set
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_assets(folder)
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _size(length: int) -> int:
    """Bytes of a record."""
    return BEFORE + 4 * (1 + length) + AFTER


def _checksum(paths: list[Path]) -> int:
    """The CRC-32 of the files' content, one after the other."""
    checksum = 0
    for path in paths:
        checksum = zlib.crc32(np.memmap(path, np.uint8, "r").data, checksum)
    return checksum
