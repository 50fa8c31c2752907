# SPDX-License-Identifier: Apache-2.0
"""Writes a corpus as shards; see `shards.py` for what they are."""

import atexit
import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from common.data.byte_pairs import Vocabulary, special_ids, train_byte_pairs
from common.data.corpora import NEEDED_SPLITS, open_corpus
from common.data.shards import answered, find_shards, fingerprint, read_bytes, short_hash, size_and_crc32
from common.data.sources import Documents
from common.data.tokens import TokenRow, write_tokens
from common.data.wordpiece import train_wordpieces
from common.files import UNFINISHED, flush, remove_unfinished
from keras_replicas import UserError

LEAST_SHARDS = 8  # per split, so that several readers can share them
SHARD_TOKENS = 2**25  # maximum per shard, about 64 MB
RECORDS_AT_ONCE = 1024
OPTIONS = ("corpus", "architecture", "vocabulary_size", "seq_length", "shards")  # what `make_shards` depends on


def make_shards(options: dict[str, Any], folder: str, scratch: str, dry_run: bool = False) -> str:
    """Finds a corpus's shards in a folder, or trains a vocabulary and writes them; returns the folder.

    Args:
        options: values of the `OPTIONS`, by name; `architecture` is `bert` for WordPiece or `roberta` for byte pairs.
        folder: the folder of the shards; empty in a dry run without one.
        scratch: see `write_shards`.
        dry_run: leave no files: missing shards are written to a folder that is deleted when the process exits.

    Raises:
        UserError: as `open_corpus`, `find_shards` and `write_shards`.
    """
    made_from = options | {"corpus": fingerprint(options["corpus"])}
    if folder and find_shards(folder, made_from):
        return folder
    if dry_run:
        folder = scratch = tempfile.mkdtemp(prefix="shards-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    corpus = open_corpus(options["corpus"])
    train = train_wordpieces if options["architecture"] == "bert" else train_byte_pairs
    vocabulary: Vocabulary = train(corpus["train"], options["vocabulary_size"])
    write_shards(corpus, vocabulary, options["seq_length"], options["shards"], folder, scratch, made_from)
    return folder


def write_shards(
    corpus: dict[str, Documents],
    vocabulary: Vocabulary,
    seq_length: int,
    num_shards: int,
    folder: str,
    scratch: str,
    made_from: dict[str, Any],
) -> None:
    """Writes a corpus's shards, or resumes an interrupted write.

    All text of a split is one row of tokens, each document followed by an end token, cut every `seq_length - 2` tokens.
    Only the shorter rest is dropped, and counted; a test split without a sequence is left out. The manifest is
    completed last; a shard that exists before then is kept if all its records can be read. If several processes
    write to one local folder, one does the work and the others wait for it; if they cannot lock it, the last to rename
    wins, with the same bytes.

    Args:
        corpus, vocabulary: the text, and its tokens.
        seq_length: tokens in a sequence, including start and end.
        num_shards: shards per split; 0: 8, or as many as keep each under 64 MB.
        folder: destination.
        scratch: a local folder for the tokens until they are written.
        made_from: what identifies these shards, for `find_shards`.

    Raises:
        UserError: when the folder cannot be used, or has shards of another tokenizer, or files of the same names; when
            the vocabulary has none of a split's words, so that nothing in it could be masked.
        OSError: `ENOSPC`, when the disk is full.
    """
    answered(tf.io.gfile.makedirs, folder)
    with _locked(folder):
        if find_shards(folder, made_from):
            return
        tokenizer, special = vocabulary.tokenizer(), special_ids(vocabulary)
        never_masked = [number for name, number in special.items() if name != "mask"]
        manifest = _begin_manifest(folder, made_from, tokenizer.to_str(pretty=True).encode(), seq_length)
        tokens = Path(scratch, short_hash(json.dumps(manifest).encode()))
        splits: dict[str, dict[str, Any]] = {}
        for split, documents in corpus.items():
            print(f"tokenising {split}", flush=True)
            row = write_tokens(documents(), tokenizer, special["end"], tokens / split)
            sequences, dropped = divmod(row.length, seq_length - 2)
            if not sequences and split not in NEEDED_SPLITS:
                print(f"{split}: too little text for one sequence; this split is left out", flush=True)
                continue
            counts = row.counts(len(vocabulary.pieces))
            if sequences and not np.delete(counts, never_masked).any():
                raise UserError(
                    f"the vocabulary, trained on the training text, has none of the words of {split}. "
                    "Give text of the same kind in all splits"
                )
            count = min(num_shards or max(LEAST_SHARDS, -(-row.length // SHARD_TOKENS)), max(sequences, 1))
            edges = [sequences * i // count for i in range(count + 1)]
            shards = []
            for i, (first, last) in enumerate(itertools.pairwise(edges)):
                name = f"{split}-{i:05}-of-{count:05}-{last - first}.tfrecord"
                if not _holds(f"{folder}/{name}", last - first):
                    _write_records(f"{folder}/{name}", _sequences(row, special, first, last, seq_length))
                size, crc32 = size_and_crc32(f"{folder}/{name}")
                shards.append({"file": name, "sequences": last - first, "bytes": size, "crc32": crc32})
            splits[split] = {
                "documents": row.documents,
                "tokens": row.length - row.documents,
                "sequences": sequences,
                "dropped_tokens": dropped,
                "shards": shards,
            }
            print(f"{split}: {sequences:,} sequences in {count} shards, {dropped} tokens dropped", flush=True)
            if split == "train":
                content = io.BytesIO()
                np.save(content, counts)
                _write_bytes(f"{folder}/train-counts.npy", content.getvalue())
        _write_bytes(f"{folder}/manifest.json", json.dumps(manifest | {"splits": splits}, indent=2).encode())
        shutil.rmtree(tokens)
        with contextlib.suppress(OSError):  # there is something else in it
            Path(scratch).rmdir()


def _begin_manifest(folder: str, made_from: dict[str, Any], tokenizer: bytes, seq_length: int) -> dict[str, Any]:
    """Writes the manifest, still without splits, and the tokenizer, unless other files are in their place."""
    manifest = {"made_from": made_from, "tokenizer": short_hash(tokenizer), "seq_length": seq_length}
    path = f"{folder}/manifest.json"
    begun = json.loads(read_bytes(path)) if tf.io.gfile.exists(path) else {}
    there = tf.io.gfile.listdir(folder)  # not glob: the folder's own name may have a bracket
    if any(name.endswith(".tfrecord") for name in there) and begun.get("tokenizer") != manifest["tokenizer"]:
        raise UserError(f"{folder} holds .tfrecord files of another tokenizer. Remove them, or give another --data")
    if not begun and (foreign := sorted({"tokenizer.json", "train-counts.npy"} & {*there})):
        raise UserError(f"{folder} holds {', '.join(foreign)}, but no manifest.json of shards. Give another --data")
    if {name: begun.get(name) for name in manifest} != manifest:
        _write_bytes(path, json.dumps(manifest).encode())  # first: it tells whose files follow
    _write_bytes(f"{folder}/tokenizer.json", tokenizer)
    return manifest


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Holds a local folder's lock, and removes the unfinished files of killed processes there."""
    if "://" in folder:
        yield
        return
    try:
        lock = open(f"{folder}/.shards.lock", "a")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot write to the folder {folder} ({error.strerror}). Give another --data") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that writes shards to {folder}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield
            return
        remove_unfinished(Path(folder))
        yield


def _sequences(row: TokenRow, special: dict[str, int], first: int, last: int, seq_length: int) -> Iterator[np.ndarray]:
    """The sequences from `first` to before `last`, read a few at a time, so that memory does not grow."""
    for at in range(first, last, RECORDS_AT_ONCE):
        until = min(at + RECORDS_AT_ONCE, last)
        body = row[at * (seq_length - 2) : until * (seq_length - 2)].reshape(until - at, seq_length - 2)
        yield from np.pad(body, [[0, 0], [1, 1]], constant_values=((0, 0), (special["start"], special["end"])))


def _write_records(path: str, sequences: Iterator[np.ndarray]) -> None:
    with _whole(path) as unfinished, tf.io.TFRecordWriter(unfinished) as writer:
        for ids in sequences:
            values = tf.train.Feature(int64_list=tf.train.Int64List(value=ids.tolist()))
            example = tf.train.Example(features=tf.train.Features(feature={"token_ids": values}))
            writer.write(example.SerializeToString())


def _write_bytes(path: str, content: bytes) -> None:
    with _whole(path) as unfinished, tf.io.gfile.GFile(unfinished, "wb") as file:
        file.write(content)


@contextlib.contextmanager
def _whole(path: str) -> Iterator[str]:
    """The name of a file to write, which is renamed when complete. A full disk raises an `OSError`, as in Python."""
    unfinished = path + UNFINISHED
    try:
        yield unfinished
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path) from error
    if "://" not in path:
        flush(Path(unfinished))  # or the new name could be on the disk before the content
    tf.io.gfile.rename(unfinished, path, overwrite=True)


def _holds(path: str, sequences: int) -> bool:
    """Whether a shard exists, and has that many records, each of which matches its checksum."""
    try:
        return int(tf.data.TFRecordDataset(path).reduce(0, lambda number, _: number + 1)) == sequences
    except (tf.errors.NotFoundError, tf.errors.DataLossError):
        return False
