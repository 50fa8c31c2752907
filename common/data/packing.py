# SPDX-License-Identifier: Apache-2.0
"""Turns documents into sequences of token ids of one length, and caches them."""

import itertools
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf
from tokenizers import Tokenizer

from common.data.byte_pairs import Vocabulary, special_ids
from common.data.corpora import NEEDED_SPLITS
from common.data.order import NO_EXAMPLE
from common.data.sources import Documents
from common.files import cached_file
from keras_replicas import UserError

DOCUMENTS_AT_ONCE = 256  # tokenised in one call, on all cores
BUCKETS = (32, 64, 128, 256, 512)


def make_sequences(documents: Documents, vocabulary: Vocabulary, seq_length: int, pack: bool) -> tf.Tensor:
    """Tokenises documents into sequences, or takes them from the cache.

    Args:
        documents: opens the stream; it must give the same ones each time.
        vocabulary: the vocabulary of the ids.
        seq_length: tokens in a sequence, including [CLS] and [SEP].
        pack: True to concatenate the documents, each with [SEP] at its end, and cut them every `seq_length - 2` tokens,
            so that only the last sequence has padding; False for one sequence per line, truncated to `seq_length`.

    Returns:
        A tensor [sequences, seq_length] of ids, uint16 or int32, in host memory; each sequence is [CLS], tokens,
        [SEP], and [PAD] to its end.

    Raises:
        UserError: when there are tokens, and all are unknown to the vocabulary.
    """
    dtype = np.dtype(np.uint16 if len(vocabulary.pieces) <= 2**16 else np.int32)
    tokenizer, ids = vocabulary.tokenizer(), special_ids(vocabulary)

    def write(path: Path) -> None:
        texts = documents() if pack else (line for document in documents() for line in document.splitlines())
        encoded = filter(None, _encoded(texts, tokenizer))
        room = seq_length - 2
        with path.open("wb") as file:
            for body in _packed(encoded, ids["end"], room) if pack else (tokens[:room] for tokens in encoded):
                sequence = np.full(seq_length, ids["pad"], dtype)
                sequence[: len(body) + 2] = [ids["start"], *body, ids["end"]]
                file.write(sequence.tobytes())

    inputs = itertools.chain([tokenizer.to_str(), str(seq_length), str(pack)], documents())
    path = cached_file("sequences", inputs, write)
    empty = np.empty((0, seq_length), dtype)
    sequences = np.memmap(path, dtype, mode="r").reshape(-1, seq_length) if path.stat().st_size else empty
    teach_nothing = [number for name, number in ids.items() if name != "mask"]
    if len(sequences) and all(np.isin(sequence, teach_nothing).all() for sequence in sequences):
        raise UserError(
            "the vocabulary has none of the text's words. Give one made for this text, or none to train one"
        )
    with tf.device("CPU"):
        return tf.constant(sequences)


def make_all_sequences(
    corpus: dict[str, Documents], vocabulary: Vocabulary, seq_length: int, pack: bool
) -> dict[str, tf.Tensor]:
    """`make_sequences` for each split. A test split without any is left out, with a message."""
    sequences = {split: make_sequences(text, vocabulary, seq_length, pack) for split, text in corpus.items()}
    empty = [split for split, part in sequences.items() if not len(part) and split not in NEEDED_SPLITS]
    for split in empty:
        print(f"{split}: no text; this split is left out", flush=True)
    return {split: part for split, part in sequences.items() if split not in empty}


def _packed(encoded: Iterable[list[int]], end: int, length: int) -> Iterator[list[int]]:
    waiting = []
    for ids in encoded:
        waiting += [*ids, end]
        whole = len(waiting) // length * length
        yield from (waiting[start : start + length] for start in range(0, whole, length))
        del waiting[:whole]
    if waiting:
        yield waiting


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    texts = iter(texts)
    while group := list(itertools.islice(texts, DOCUMENTS_AT_ONCE)):
        for encoding in tokenizer.encode_batch_fast(group, add_special_tokens=False):
            yield encoding.ids


def checksums(sequences: dict[str, tf.Tensor]) -> dict[str, int]:
    """A checksum of the sequences of each split."""
    return {split: zlib.crc32(part.numpy()) for split, part in sequences.items()}


def count_tokens(sequences: dict[str, tf.Tensor], vocabulary: Vocabulary) -> dict[str, tuple[int, int]]:
    """The number of sequences in each split, and of tokens in them, without padding."""
    pad_id = special_ids(vocabulary)["pad"]
    return {split: (len(part), int(np.count_nonzero(part.numpy() != pad_id))) for split, part in sequences.items()}


def read_sequences(sequences: tf.Tensor, examples: tf.Tensor, pad_id: int, trim: bool) -> tf.Tensor:
    """Token ids of the examples, int32 [examples, length], for use in `Dataset.map`.

    Args:
        sequences: tensor [sequences, seq_length].
        examples: int64 vector; `order.NO_EXAMPLE` gives a row of padding.
        pad_id: id of [PAD].
        trim: cut padding to the shortest bucket length (32, 64, 128, ...) that holds the longest of these examples.
    """
    ids = tf.cast(tf.gather(sequences, tf.maximum(examples, 0)), tf.int32)
    ids = tf.where((examples == NO_EXAMPLE)[:, None], pad_id, ids)
    if not trim:
        return ids
    longest = tf.reduce_max(tf.math.count_nonzero(ids != pad_id, axis=1))
    buckets = tf.constant([*BUCKETS, max(sequences.shape[1], *BUCKETS)], tf.int64)
    return ids[:, : tf.reduce_min(tf.boolean_mask(buckets, buckets >= longest))]
