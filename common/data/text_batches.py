# SPDX-License-Identifier: Apache-2.0
"""Inputs of BERT's classifier from labelled texts: encoded once, read in an order that is a function of seed and step.

Each batch is padded to the shortest of a few bucket lengths that holds its longest example, not to the maximum: few,
because TensorFlow traces a graph for each.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from common.data.byte_pairs import Vocabulary, special_ids
from common.data.labelled import LabelledTexts
from common.data.order import NO_EXAMPLE, Scaled, locate, steps_per_epoch
from common.data.packing import read_sequences


def token_ids(texts: Sequence[tuple[str, ...]], vocabulary: Vocabulary) -> list[list[list[int]]]:
    """The ids of each example's texts, without special tokens."""
    tokenizer = vocabulary.tokenizer()
    columns = [tokenizer.encode_batch_fast(column, add_special_tokens=False) for column in zip(*texts, strict=True)]
    return [[part.ids for part in parts] for parts in zip(*columns, strict=True)]


def encode(texts: Sequence[tuple[str, ...]], vocabulary: Vocabulary, seq_length: int) -> np.ndarray:
    """Token ids, [examples, seq_length]: [CLS] first [SEP], or [CLS] first [SEP] second [SEP], then [PAD].

    Two texts that are too long are truncated to equal shares, and what one does not use goes to the other, as in
    KerasHub's packer.
    """
    special = special_ids(vocabulary)
    start, end = special["start"], special["end"]
    dtype = np.uint16 if len(vocabulary.pieces) <= 2**16 else np.int32
    encoded = np.full((len(texts), seq_length), special["pad"], dtype)
    for row, (first, *second) in zip(encoded, token_ids(texts, vocabulary), strict=True):
        room = seq_length - len(second) - 2
        if second:
            other = second[0][: max(room // 2, room - len(first))]
            ids = [start, *first[: room - len(other)], end, *other, end]
        else:
            ids = [start, *first[:room], end]
        row[: len(ids)] = ids
    return encoded


@dataclass(frozen=True)
class EncodedTexts:
    """Labelled texts, the vocabulary that encoded them, and the ids of each split, from `encode`."""

    texts: LabelledTexts
    vocabulary: Vocabulary
    ids: dict[str, np.ndarray]

    @classmethod
    def of(cls, texts: LabelledTexts, vocabulary: Vocabulary, seq_length: int) -> "EncodedTexts":
        """Encodes all splits, each example to at most `seq_length` tokens."""
        ids = {split: encode(part.texts, vocabulary, seq_length) for split, part in texts.splits.items()}
        return cls(texts, vocabulary, ids)

    def sizes(self) -> dict[str, int]:
        """The number of examples in each split."""
        return {split: len(ids) for split, ids in self.ids.items()}

    def checksums(self) -> dict[str, int]:
        """A checksum of the ids and labels of each split."""
        dtype = self.texts.label_dtype
        labels = {split: np.array(part.labels or [], dtype).data for split, part in self.texts.splits.items()}
        return {split: zlib.crc32(labels[split], zlib.crc32(ids.data)) for split, ids in self.ids.items()}

    def steps(self, split: str, scaled: Scaled) -> int:
        """Steps in which every example of a split is used once."""
        return steps_per_epoch(len(self.ids[split]), scaled.global_batch_size)

    def batches(
        self,
        split: str,
        scaled: Scaled,
        steps: range,
        shuffle_seed: int | None = None,
        num_shards: int = 1,
        shard: int = 0,
    ) -> tf.data.Dataset:
        """One shard's batches (x, examples), of a replica's size each: a pure function of the seed and the step.

        They are for these steps of the run. A seed gives a new order in each epoch; None, no shuffling.

        Returns:
            BERT's inputs, int32 [batch size, length of the global batch]; and rows of the split, int64 [batch size],
            `order.NO_EXAMPLE` for padding.
        """
        batch_of = self._batch_of(split, scaled.global_batch_size, shuffle_seed)

        def replica_batches(step):
            own = tf.nest.map_structure(lambda part: part[shard::num_shards], batch_of(step))
            return tf.nest.map_structure(
                lambda part: tf.reshape(part, tf.concat([[-1, scaled.batch_size], tf.shape(part)[1:]], axis=0)), own
            )

        numbers = tf.data.Dataset.range(steps.start, steps.stop)
        return numbers.map(replica_batches, num_parallel_calls=2).unbatch().prefetch(8)

    def labelled_batches(self, split: str, *arguments, **shard) -> tf.data.Dataset:
        """As `batches`, but (x, y, weight): labels, and weights, 0 for padding."""
        return self.batches(split, *arguments, **shard).map(self._with_labels(split))

    def labelled_batch(self, split: str, batch_size: int, shuffle_seed: int) -> Callable[[tf.Tensor], tuple]:
        """A function from a step, int64, to its batch (x, y, weight), for use in a graph; see `labelled_batches`."""
        batch_of, with_labels = self._batch_of(split, batch_size, shuffle_seed), self._with_labels(split)
        return lambda step: with_labels(*batch_of(step))

    def _batch_of(self, split: str, batch_size: int, shuffle_seed: int | None) -> Callable:
        special = special_ids(self.vocabulary)
        pad, end = special["pad"], special["end"]
        with tf.device("CPU"):
            sequences = tf.constant(self.ids[split])

        def batch_of(step):
            positions = step * batch_size + tf.range(batch_size, dtype=tf.int64)
            _, examples = locate(positions, len(sequences), batch_size, shuffle_seed)
            ids = read_sequences(sequences, examples, pad, trim=True)
            is_token = tf.cast(ids != pad, tf.int32)
            segments = tf.minimum(tf.cumsum(tf.cast(ids == end, tf.int32), axis=1, exclusive=True), 1) * is_token
            return {"token_ids": ids, "segment_ids": segments, "padding_mask": is_token}, examples

        return batch_of

    def _with_labels(self, split: str) -> Callable:
        labels = self.texts.splits[split].labels
        assert labels is not None, "the split has no labels"
        by_example = tf.constant(labels, self.texts.label_dtype)

        def look_up(x, examples):
            return x, tf.gather(by_example, tf.maximum(examples, 0)), tf.cast(examples != NO_EXAMPLE, tf.float32)

        return look_up


def in_order(batches: Iterable[tuple[tf.Tensor, tf.Tensor]], num_examples: int) -> np.ndarray:
    """Rows for all examples, [examples, columns], from batches of (examples, rows), in which each comes once."""
    parts = [(examples.numpy(), rows.numpy()) for examples, rows in batches]
    result = np.full((num_examples, parts[0][1].shape[1]), np.nan, np.float32)
    for examples, rows in parts:
        result[examples[examples != NO_EXAMPLE]] = rows[examples != NO_EXAMPLE]
    return result
