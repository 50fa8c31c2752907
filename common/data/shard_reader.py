# SPDX-License-Identifier: Apache-2.0
"""Reads TFRecord shards in an order that is a pure function of (seed, epoch, position).

As in `keras_replicas.order`, a run is one sequence of positions, and step k takes those from k * batch on. They are
divided into lanes: position p is in lane p mod L, and lane l reads the shards l, l + L, l + 2 L, ... L is the greatest
common divisor of the number of shards and the global batch size, so it does not depend on the readers. Reader r of R
takes the positions r, r + R, ...: if R divides L, these are whole lanes, and no other reader opens their shards.

In each epoch a lane's shards are read in a new order, four at a time, and every 4,096 sequences are shuffled. Lanes
shorter than the longest are padded with positions without an example, which have weight 0.
"""

import math
from typing import Any

import tensorflow as tf

from common.data.order import NO_EXAMPLE
from common.data.shards import Shards

DRAWER = 4096  # sequences of a lane that are shuffled together
SHARDS_AT_ONCE = 4


def steps_in_shards(shards: list[dict[str, Any]], global_batch_size: int) -> int:
    """Steps in which every sequence is read once, for the shards of a split, as in the manifest."""
    lanes = math.gcd(len(shards), global_batch_size)
    longest = max(sum(shard["sequences"] for shard in shards[lane::lanes]) for lane in range(lanes))
    return -(-longest * lanes // global_batch_size)


def read_shards(
    written: Shards,
    split: str,
    global_batch_size: int,
    epochs: int,
    shuffle_seed: int | None = None,
    first_step: int = 0,
    num_readers: int = 1,
    reader: int = 0,
) -> tf.data.Dataset:
    """One reader's share of a run.

    Args:
        written, split: the shards, and which split of them to read.
        global_batch_size: sequences in one step, over all replicas.
        epochs: the number of epochs in the run.
        shuffle_seed: None for no shuffling.
        first_step: the step from which the run resumes.
        num_readers, reader: the number of readers, and this one's index.

    Returns:
        Scalars (epoch, example, record): an int64; an int64, the number of a sequence in its split, or -1 for padding;
        and a string for `decode_sequences`, empty for padding.
    """
    shards = written.files(split)
    lanes = math.gcd(len(shards), global_batch_size)
    places = steps_in_shards(shards, global_batch_size) * global_batch_size
    firsts = [sum(shard["sequences"] for shard in shards[:i]) for i in range(len(shards))]
    paths = [f"{written.folder}/{shard['file']}" for shard in shards]
    whole_lanes = lanes % num_readers == 0
    own = range(reader, lanes, num_readers) if whole_lanes else range(lanes)

    def shard(path: tf.Tensor, first: tf.Tensor) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path).enumerate(first)

    def lane(number: int, epoch: tf.Tensor) -> tf.data.Dataset:
        files = tf.constant(paths[number::lanes]), tf.constant(firsts[number::lanes], tf.int64)
        if shuffle_seed is not None:
            seed = shuffle_seed * 2**32 + epoch * lanes + number
            files = _shuffled(files, seed, -1)
        examples = tf.data.Dataset.from_tensor_slices(files).interleave(shard, cycle_length=SHARDS_AT_ONCE)
        if shuffle_seed is not None:
            drawers = examples.batch(DRAWER).enumerate()
            examples = drawers.map(lambda drawer, content: _shuffled(content, seed, drawer)).unbatch()
        missing = places // lanes - sum(part["sequences"] for part in shards[number::lanes])
        nothing = tf.data.Dataset.from_tensors((tf.constant(NO_EXAMPLE, tf.int64), "")).repeat(missing)
        return examples.concatenate(nothing)

    def epoch_row(epoch: tf.Tensor) -> tf.data.Dataset:
        turns = tf.data.Dataset.range(len(own)).repeat()
        row = tf.data.Dataset.choose_from_datasets([lane(number, epoch) for number in own], turns)
        return row.map(lambda example, record: (epoch, example, record))

    epoch, skipped = divmod(first_step * global_batch_size, places)
    row = tf.data.Dataset.range(epoch, epochs).flat_map(epoch_row)
    if whole_lanes:
        return row.skip(skipped // num_readers)
    return row.skip(skipped).shard(num_readers, reader)


def decode_sequences(records: tf.Tensor, seq_length: int, pad_id: int) -> tf.Tensor:
    """Token ids, int32 [batch, seq_length], from records of `read_shards`, for use in `Dataset.map`.

    An empty record, which has no token, gives a sequence of `pad_id`.
    """
    padding = tf.constant([pad_id] * seq_length, tf.int64)
    features = {"token_ids": tf.io.FixedLenFeature([seq_length], tf.int64, default_value=padding)}
    return tf.cast(tf.io.parse_example(records, features)["token_ids"], tf.int32)


def _shuffled(parts: tuple[tf.Tensor, tf.Tensor], seed: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Two tensors in the same new order, a function of seed and number alone; that of `Dataset.shuffle` is not."""
    noise = tf.random.stateless_uniform(tf.shape(parts[0]), tf.stack([seed, tf.cast(number, tf.int64)]))
    return tuple(tf.gather(part, tf.argsort(noise)) for part in parts)
