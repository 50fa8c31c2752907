# SPDX-License-Identifier: Apache-2.0
"""From documents to sequences of token ids of one length, kept in the cache."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf
from tokenizers import Tokenizer

from common.caching import cached_file
from common.corpora import Documents
from common.order import NO_EXAMPLE
from common.wordpiece import CLS, PAD, SEP

DOCUMENTS_AT_ONCE = 256  # tokenised in one call, on all cores
BUCKETS = (32, 64, 128, 256, 512)


def make_sequences(documents: Documents, tokenizer: Tokenizer, seq_length: int, pack: bool) -> tf.Tensor:
    """Tokenises documents into sequences, or takes them from the cache.

    Args:
        documents: opens the stream of documents; called twice, it must give the same ones.
        tokenizer: a WordPiece tokenizer; its vocabulary has [PAD], [CLS] and [SEP].
        seq_length: tokens in a sequence, [CLS] and [SEP] included.
        pack: True for documents, each with [SEP] at its end, concatenated and cut every `seq_length - 2` tokens, so
            that only the last sequence has padding; False for one sequence a line, cut at `seq_length`.

    Returns:
        A tensor [sequences, seq_length] of ids, uint16 or int32, in host memory; each sequence is [CLS], tokens,
        [SEP], and [PAD] to its end.
    """
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.int32)

    def write(path: Path) -> None:
        ids = (_packed if pack else _one_per_line)(documents(), tokenizer, seq_length - 2)
        with path.open("wb") as file:
            for body in ids:
                sequence = np.full(seq_length, tokenizer.token_to_id(PAD), dtype)
                sequence[: len(body) + 2] = [tokenizer.token_to_id(CLS), *body, tokenizer.token_to_id(SEP)]
                file.write(sequence.tobytes())

    inputs = itertools.chain([tokenizer.to_str(), str(seq_length), str(pack)], documents())
    path = cached_file("sequences", inputs, write)
    with tf.device("CPU"):
        return tf.constant(
            np.memmap(path, dtype, mode="r").reshape(-1, seq_length)
            if path.stat().st_size
            else np.empty((0, seq_length), dtype)
        )


def _packed(documents: Iterable[str], tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    waiting = []
    for ids in filter(None, _encoded(documents, tokenizer)):
        waiting += [*ids, tokenizer.token_to_id(SEP)]
        whole = len(waiting) // length * length
        yield from (waiting[start : start + length] for start in range(0, whole, length))
        del waiting[:whole]
    if waiting:
        yield waiting


def _one_per_line(documents: Iterable[str], tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    lines = (line for document in documents for line in document.splitlines())
    return (ids[:length] for ids in _encoded(lines, tokenizer) if ids)


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    texts = iter(texts)
    while group := list(itertools.islice(texts, DOCUMENTS_AT_ONCE)):
        for encoding in tokenizer.encode_batch_fast(group, add_special_tokens=False):
            yield encoding.ids


def read_sequences(sequences: tf.Tensor, examples: tf.Tensor, pad_id: int, trim: bool) -> tf.Tensor:
    """Token ids of the examples, for use in `Dataset.map`.

    Args:
        sequences: tensor [sequences, seq_length].
        examples: int64 vector; `order.NO_EXAMPLE` gives a row of padding, which has no token and no label and so weighs
            nothing.
        pad_id: id of [PAD].
        trim: cut padding off to the shortest bucket length (32, 64, 128, ...) that holds the longest of these examples.

    Returns:
        int32 [examples, seq_length], or, trimmed, [examples, None].
    """
    ids = tf.cast(tf.gather(sequences, tf.maximum(examples, 0)), tf.int32)
    ids = tf.where((examples == NO_EXAMPLE)[:, None], pad_id, ids)
    if not trim:
        return ids
    longest = tf.reduce_max(tf.math.count_nonzero(ids != pad_id, axis=1))
    buckets = tf.constant([*BUCKETS, max(sequences.shape[1], *BUCKETS)], tf.int64)
    return ids[:, : tf.reduce_min(tf.boolean_mask(buckets, buckets >= longest))]
