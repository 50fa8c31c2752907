# SPDX-License-Identifier: Apache-2.0
"""An order of examples that gives those of a batch similar lengths, so that there is little padding.

Like that of `order.py`, it is a pure function of the seed and the step.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_replicas.order import NO_EXAMPLE, Scaled, locate, shuffled, steps_per_epoch

MEGABATCH = 64  # batches whose examples are sorted by length together; a quarter of an epoch's, if that is fewer


def examples_by_length(
    steps: range, lengths: tf.Tensor, global_batch_size: int, shuffle_seed: int | None
) -> tf.data.Dataset:
    """The examples of these steps of a run, with similar lengths in each batch.

    The examples that `locate` gives to consecutive batches are sorted by length and divided again, as in transformers'
    `LengthGroupedSampler`; the new batches come in a random order.

    Args:
        steps: of the run.
        lengths: of the examples, int vector.
        global_batch_size: examples in one step, over all replicas.
        shuffle_seed: for a new order in each epoch; None, for the steps of one epoch, puts the shortest first.

    Returns:
        For each step, an int64 vector [global batch size]: examples, or -1 for padding.
    """
    if shuffle_seed is None:
        padding = tf.fill([-len(lengths) % global_batch_size], tf.constant(NO_EXAMPLE, tf.int64))
        order = tf.concat([tf.cast(tf.argsort(lengths, stable=True), tf.int64), padding], axis=0)
        batches = tf.data.Dataset.from_tensor_slices(tf.reshape(order, [-1, global_batch_size]))
        return batches.skip(steps.start).take(len(steps))
    ends = tf.constant([steps.start, steps.stop], tf.int64)
    (first, last), (place, _) = _megabatch_of(ends, len(lengths), global_batch_size)
    megabatches = tf.data.Dataset.range(first, last + 1)
    batches = megabatches.map(lambda number: _megabatch(number, lengths, global_batch_size, shuffle_seed)).unbatch()
    return batches.skip(place).take(len(steps))


def batches_by_length(
    steps: range,
    lengths: tf.Tensor,
    scaled: Scaled,
    shuffle_seed: int | None,
    read: Callable[[tf.Tensor], Any],
    num_shards: int = 1,
    shard: int = 0,
) -> tf.data.Dataset:
    """One shard's batches, each of one replica's size, of what `read` returns for the examples of a global batch.

    Args:
        steps, lengths, shuffle_seed: see `examples_by_length`.
        scaled: the batch sizes.
        read: maps examples, an int64 vector, to tensors [global batch size, ...].
        num_shards, shard: the number of shards, and this one's index.
    """

    def replica_batches(examples):
        own = tf.nest.map_structure(lambda part: part[shard::num_shards], read(examples))
        return tf.nest.map_structure(
            lambda part: tf.reshape(part, tf.concat([[-1, scaled.batch_size], tf.shape(part)[1:]], axis=0)), own
        )

    examples = examples_by_length(steps, lengths, scaled.global_batch_size, shuffle_seed)
    return examples.map(replica_batches, num_parallel_calls=2).unbatch()


def padded_length(examples: tf.Tensor, lengths: tf.Tensor, multiple: int) -> tf.Tensor:
    """The length of the longest of these examples, rounded up to a multiple."""
    return -(-tf.reduce_max(lengths_of(examples, lengths)) // multiple) * multiple


def _megabatch_of(step: tf.Tensor, num_examples: int, global_batch_size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The number of the megabatch, over all epochs, that holds a step, and the step's place in it."""
    steps = steps_per_epoch(num_examples, global_batch_size)
    size = _size(steps)
    return step // steps * -(-steps // size) + step % steps // size, step % steps % size


def _megabatch(number: tf.Tensor, lengths: tf.Tensor, global_batch_size: int, shuffle_seed: int) -> tf.Tensor:
    """The examples of the megabatch's steps, [steps, global batch size]."""
    steps = steps_per_epoch(len(lengths), global_batch_size)
    size = _size(steps)
    epoch, first = number // -(-steps // size), number % -(-steps // size) * size
    batches = tf.minimum(steps - first, size)
    positions = (epoch * steps + first) * global_batch_size + tf.range(batches * global_batch_size)
    _, examples = locate(positions, len(lengths), global_batch_size, shuffle_seed)
    by_length = tf.argsort(lengths_of(examples, lengths), stable=True)
    epochs, draws = tf.fill(batches[None], epoch), tf.fill(batches[None], 1 + first)
    order = shuffled(tf.range(batches), batches, shuffle_seed, epochs, draws)
    return tf.gather(tf.reshape(tf.gather(examples, by_length), [-1, global_batch_size]), order)


def _size(steps: int) -> int:
    """The number of batches in a megabatch: more would put the same examples together in every epoch."""
    return min(MEGABATCH, max(1, steps // 4))


def lengths_of(examples: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """The lengths of these examples, int64 [n]; 0 for padding."""
    return tf.where(examples == NO_EXAMPLE, 0, tf.gather(lengths, tf.maximum(examples, 0)))
