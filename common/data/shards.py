# SPDX-License-Identifier: Apache-2.0
"""A corpus as TFRecord shards: token ids in sequences of one length, and a manifest that counts them.

    manifest.json                           what is there: tokenizer, sequence length, counts, checksums
    tokenizer.json                          the tokenizer, as Hugging Face's libraries load it
    train-00000-of-00008-1163.tfrecord      shard 0 of 8, with 1,163 sequences
    train-counts.npy                        how often each id occurs in the training split

A record is a `tf.train.Example` whose `token_ids` are a start token, text, and an end token. The folder may be any that
`tf.io.gfile` knows.
"""

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from common.data.byte_pairs import Vocabulary, read_vocabulary
from common.data.corpora import NEEDED_SPLITS, Documents
from common.data.tokens import TokenRow, write_tokens
from common.errors import UserError
from common.run.run_folder import UNFINISHED, flush, remove_unfinished

LEAST_SHARDS = 8  # of a split, so that several readers can share them
SHARD_TOKENS = 2**25  # in a shard at most, about 64 MB
RECORDS_AT_ONCE = 1024
READ_AT_ONCE = 2**22  # bytes


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a corpus.

    Attributes:
        folder: where they are.
        vocabulary: whose ids they hold.
        manifest: `made_from`, `tokenizer` (a hash), `seq_length`, and `splits`. A split has `documents`, `tokens`,
            `sequences`, `dropped_tokens`, and `shards`, each with `file`, `sequences`, `bytes` and `crc32`. To the
            token, tokens + documents = sequences x (seq_length - 2) + dropped_tokens.
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
        return np.load(io.BytesIO(_read(f"{self.folder}/train-counts.npy")))


def find_shards(folder: str, made_from: dict[str, Any]) -> Shards | None:
    """The shards in a folder, every byte of them checked; None where some are still to be written.

    Args:
        folder: of `write_shards`.
        made_from: what they must be made from.

    Raises:
        UserError: when they are made from something else, a file is damaged, or the folder cannot be read.
    """
    path = f"{folder}/manifest.json"
    if not _answered(tf.io.gfile.exists, path):
        return None
    try:
        manifest = json.loads(_read(path))
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
        size, crc32 = _size_and_crc32(path)
        if not size:
            return None
        if (size, crc32) != (shard["bytes"], shard["crc32"]):
            what = "cut short" if size < shard["bytes"] else "damaged"
            raise UserError(f"{path} is {what}. Remove it: it is written again")
    path = f"{folder}/tokenizer.json"
    if not tf.io.gfile.exists(path) or _hash(_read(path)) != manifest["tokenizer"]:
        raise UserError(f"{path} is not that of the shards beside it. Remove {folder}, or give another --data")
    found = open_shards(folder)
    return found if _counts_all_tokens(found) else None


def _counts_all_tokens(shards: Shards) -> bool:
    """False where `train-counts.npy` is missing or damaged: its sum is known."""
    train = shards.manifest["splits"]["train"]
    try:
        counts = shards.token_counts()
    except (tf.errors.NotFoundError, ValueError, EOFError):
        return False
    return counts.shape == (len(shards.vocabulary.pieces),) and counts.sum() == train["tokens"] + train["documents"]


def folder_of_dry_run(folder: str, made_from: dict[str, Any]) -> str:
    """A folder that holds such shards already; else, and where its name is empty, one that goes with the process.

    Raises:
        UserError: as `find_shards`.
    """
    if folder and find_shards(folder, made_from):
        return folder
    temporary = tempfile.mkdtemp(prefix="shards-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def open_shards(folder: str) -> Shards:
    """The shards in a folder, as `find_shards` has found them or `write_shards` has left them."""
    vocabulary = read_vocabulary(_read(f"{folder}/tokenizer.json").decode())
    return Shards(folder, vocabulary, json.loads(_read(f"{folder}/manifest.json")))


def write_shards(
    corpus: dict[str, Documents],
    vocabulary: Vocabulary,
    seq_length: int,
    num_shards: int,
    folder: str,
    scratch: str,
    made_from: dict[str, Any],
) -> None:
    """Writes a corpus's shards; interrupted, it goes on where it was.

    All text of a split is one row of tokens, each document's with an end token behind it, cut every `seq_length - 2`.
    Only the last piece, which is shorter, is dropped, and counted; a test split without a sequence is left out. The
    manifest comes last; a shard that is there before it is kept where all its records can be read. Of several processes
    that write to one local folder, one does, and the others wait for it; where they cannot lock it, the last to rename
    wins, with the same bytes.

    Args:
        corpus: of `open_corpus`.
        vocabulary: whose tokenizer is used.
        seq_length: tokens in a sequence, start and end included.
        num_shards: of each split; 0: 8, or as many as keep each under 64 MB.
        folder: where to.
        scratch: a local folder for the tokens until they are written.
        made_from: what tells these shards from any others, for `find_shards`.

    Raises:
        UserError: when the folder cannot be used, or holds shards by another tokenizer, or files by the names of these;
            when the vocabulary knows none of a split's words, so that nothing in it could be masked.
        OSError: `ENOSPC`, when the disk is full.
    """
    _answered(tf.io.gfile.makedirs, folder)
    with _locked(folder):
        if not find_shards(folder, made_from):
            _write_shards(corpus, vocabulary, seq_length, num_shards, folder, Path(scratch), made_from)


def _write_shards(
    corpus: dict[str, Documents],
    vocabulary: Vocabulary,
    seq_length: int,
    num_shards: int,
    folder: str,
    scratch: Path,
    made_from: dict[str, Any],
) -> None:
    tokenizer = vocabulary.tokenizer()
    special = vocabulary.special
    start, end = map(vocabulary.pieces.index, (special.start, special.end))
    never_masked = [*map(vocabulary.pieces.index, (special.pad, special.start, special.end, special.unknown))]
    saved_tokenizer = tokenizer.to_str(pretty=True).encode()
    manifest = {"made_from": made_from, "tokenizer": _hash(saved_tokenizer), "seq_length": seq_length}
    tokens = scratch / _hash(json.dumps(manifest).encode())
    path = f"{folder}/manifest.json"
    begun = json.loads(_read(path)) if tf.io.gfile.exists(path) else {}
    there = tf.io.gfile.listdir(folder)  # no pattern: the folder's own name may have a bracket
    others = any(name.endswith(".tfrecord") for name in there)
    if others and begun.get("tokenizer") != manifest["tokenizer"]:
        raise UserError(f"{folder} holds .tfrecord files by another tokenizer. Remove them, or give another --data")
    if not begun and (foreign := sorted({"tokenizer.json", "train-counts.npy"} & {*there})):
        raise UserError(f"{folder} holds {', '.join(foreign)}, but no manifest.json of shards. Give another --data")
    if {name: begun.get(name) for name in manifest} != manifest:
        _write_whole(path, json.dumps(manifest).encode())  # first: it tells whose the files are that follow
    _write_whole(f"{folder}/tokenizer.json", saved_tokenizer)
    splits: dict[str, dict[str, Any]] = {}
    for split, documents in corpus.items():
        print(f"tokenising {split}", flush=True)
        row = write_tokens(documents(), tokenizer, end, tokens / split)
        sequences, dropped = divmod(row.length, seq_length - 2)
        if not sequences and split not in NEEDED_SPLITS:
            print(f"{split}: too little text for one sequence, so it is left out", flush=True)
            continue
        counts = row.counts(len(vocabulary.pieces))
        if sequences and not np.delete(counts, never_masked).any():
            raise UserError(
                f"the vocabulary, trained on the training text, knows none of the words of {split}. "
                "Give text of the same kind in all splits"
            )
        count = min(num_shards or max(LEAST_SHARDS, -(-row.length // SHARD_TOKENS)), max(sequences, 1))
        edges = [sequences * i // count for i in range(count + 1)]
        splits[split] = {
            "documents": row.documents,
            "tokens": row.length - row.documents,
            "sequences": sequences,
            "dropped_tokens": dropped,
            "shards": [],
        }
        for i in range(count):
            name = f"{split}-{i:05}-of-{count:05}-{edges[i + 1] - edges[i]}.tfrecord"
            if not _holds(f"{folder}/{name}", edges[i + 1] - edges[i]):
                _write_records(f"{folder}/{name}", _sequences(row, start, end, edges[i], edges[i + 1], seq_length))
            size, crc32 = _size_and_crc32(f"{folder}/{name}")
            entry = {"file": name, "sequences": edges[i + 1] - edges[i], "bytes": size, "crc32": crc32}
            splits[split]["shards"].append(entry)
        print(f"{split}: {sequences:,} sequences in {count} shards, {dropped} tokens left over", flush=True)
        if split == "train":
            content = io.BytesIO()
            np.save(content, counts)
            _write_whole(f"{folder}/train-counts.npy", content.getvalue())
    _write_whole(path, json.dumps(manifest | {"splits": splits}, indent=2).encode())
    shutil.rmtree(tokens)
    with contextlib.suppress(OSError):  # there is something else in it
        scratch.rmdir()


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Holds a local folder's lock, once nobody else does, and removes what killed processes left there."""
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


def _sequences(row: TokenRow, start: int, end: int, first: int, last: int, seq_length: int) -> Iterator[np.ndarray]:
    """The sequences from `first` to before `last`, some at once, so that memory does not grow."""
    for at in range(first, last, RECORDS_AT_ONCE):
        until = min(at + RECORDS_AT_ONCE, last)
        body = row[at * (seq_length - 2) : until * (seq_length - 2)].reshape(until - at, seq_length - 2)
        yield from np.pad(body, [[0, 0], [1, 1]], constant_values=((0, 0), (start, end)))


def _write_records(path: str, sequences: Iterator[np.ndarray]) -> None:
    with _full_disk_as_python_tells_it(path), tf.io.TFRecordWriter(path + UNFINISHED) as writer:
        for ids in sequences:
            values = tf.train.Feature(int64_list=tf.train.Int64List(value=ids.tolist()))
            example = tf.train.Example(features=tf.train.Features(feature={"token_ids": values}))
            writer.write(example.SerializeToString())
    _rename(path + UNFINISHED, path)


def _write_whole(path: str, content: bytes) -> None:
    with _full_disk_as_python_tells_it(path), tf.io.gfile.GFile(path + UNFINISHED, "wb") as file:
        file.write(content)
    _rename(path + UNFINISHED, path)


def _rename(unfinished: str, path: str) -> None:
    if "://" not in path:
        flush(Path(unfinished))  # or the new name could be on the disk before the content
    tf.io.gfile.rename(unfinished, path, overwrite=True)


def _holds(path: str, sequences: int) -> bool:
    """Whether a shard is there, and has that many records, each of which agrees with its checksum."""
    try:
        return int(tf.data.TFRecordDataset(path).reduce(0, lambda number, _: number + 1)) == sequences
    except (tf.errors.NotFoundError, tf.errors.DataLossError):
        return False


@contextlib.contextmanager
def _full_disk_as_python_tells_it(path: str) -> Iterator[None]:
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path) from error


def _read(path: str) -> bytes:
    with tf.io.gfile.GFile(path, "rb") as file:
        return file.read()


def _size_and_crc32(path: str) -> tuple[int, int]:
    size = crc32 = 0
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            while part := file.read(READ_AT_ONCE):
                size += len(part)
                crc32 = zlib.crc32(part, crc32)
    except tf.errors.NotFoundError:
        pass
    return size, crc32


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _answered(ask, path: str):
    """What `tf.io.gfile` answers, or a message that a person understands."""
    try:
        return ask(path)
    except tf.errors.UnimplementedError as error:
        raise UserError(
            f"TensorFlow cannot open {path}. For gs:// there is a package, up to Python 3.12: "
            "pip install 'tensorflow[gcs-filesystem]'"
        ) from error
    except tf.errors.OpError as error:
        raise UserError(f"cannot use the folder {path} ({error.message.splitlines()[0]})") from error
