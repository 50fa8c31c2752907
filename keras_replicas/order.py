# SPDX-License-Identifier: Apache-2.0
"""The order of examples as a pure function of (seed, epoch, position).

A run is a sequence of positions 0, 1, 2, ...: step k takes the positions [k * batch, (k + 1) * batch), where batch is
the global batch size. Nothing else decides which example is at a position: not which process reads it, how many read,
or how often the run was interrupted. So every step holds the same examples for any number of replicas.

An epoch has steps_per_epoch(examples, batch) steps. If the last one is partial, it is padded with example -1. A
function that makes batches gives it weight 0, so that every batch has the same shape; of arrays, it takes no row.
"""

import tensorflow as tf

NO_EXAMPLE = -1


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Steps in which every example is used once: the ratio, rounded up."""
    return -(-num_examples // global_batch_size)


def locate(positions: tf.Tensor, num_examples: int, global_batch_size: int, shuffle_seed: int | None) -> tuple:
    """The epoch and the example at each position of a run.

    Step k of a run, counted from 0, holds the positions [k * global_batch_size, (k + 1) * global_batch_size). The order
    of an epoch is TensorFlow's `tf.random.experimental.index_shuffle` by the seed and the epoch, with 16 rounds.

    Args:
        positions: int64 vector, counted from 0 at the beginning of the run.
        num_examples: in the data set.
        global_batch_size: examples in one step, over all replicas.
        shuffle_seed: for a new order in each epoch; None for no shuffling.

    Returns:
        Two int64 vectors of the same length. The first holds epochs, from 0; the second holds examples, in
        [0, num_examples), or -1 for padding.
    """
    positions_per_epoch = steps_per_epoch(num_examples, global_batch_size) * global_batch_size
    epochs, in_epoch = positions // positions_per_epoch, positions % positions_per_epoch
    example = tf.minimum(in_epoch, num_examples - 1)
    if shuffle_seed is not None:
        # The op under tf.random.experimental.index_shuffle, whose wrapper fails on a vector of seeds (TensorFlow 2.21);
        # its 4 rounds leave orders of 10,000 correlated with 0, 1, 2, ... (sd 0.017); 16 do not (0.009; chance: 0.010).
        seeds = [tf.fill(tf.shape(epochs), tf.constant(shuffle_seed, tf.int64)), epochs, tf.zeros_like(epochs)]
        highest = tf.fill(tf.shape(in_epoch), tf.cast(num_examples - 1, tf.int64))
        example = tf.raw_ops.RandomIndexShuffle(
            index=example, seed=tf.stack(seeds, axis=1), max_index=highest, rounds=16
        )
    return epochs, tf.where(in_epoch < num_examples, example, NO_EXAMPLE)
