# SPDX-License-Identifier: Apache-2.0
"""Data that begins at any step, and is divided over the replicas.

Two methods make data such, whatever its class: see `BeginsAnywhere`. `Batches` has them; `data.py` gives them to
whatever `fit` takes.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from keras_replicas.division import as_tensor, bounds_of_part, count_rows, distribute_parts, replicas_of
from keras_replicas.order import NO_EXAMPLE, locate, steps_per_epoch


class BeginsAnywhere(Protocol):
    """Data of any class that has these two methods, as `Batches` has."""

    def __len__(self) -> int:
        """The steps in an epoch."""

    def iter_from_step(self, step: int, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """A `tf.data.Dataset` of the run's batches from that step on, without end, as parts for replicas.

        Args:
            step: the first one, counted from 0.
            context: of an input pipeline, for whose replicas the parts are: first a part of a batch for each of them,
                in their order, then parts of the next batch.
        """


class Batches:
    """Batches of arrays, or of what a function makes, in an order that is a function of seed and epoch alone.

    A run that is resumed begins in the middle of an epoch with the very rows that are next, for any number of replicas
    and workers. Give it to `fit`, `evaluate` or `predict` as `x`, or to `distribute`.

    Args:
        source: a structure of arrays with the same number of rows, such as `(x, y)` or `(x, y, sample_weight)`; or a
            function of two int64 vectors, epochs and examples, in TensorFlow operations, that returns the batch of
            these examples. It is given equally many examples for each replica in each step, so that shapes are known;
            -1 stands where the last batch of an epoch has no more: what it returns there must have weight 0, and
            `predict` has an output for it.
        batch_size: of the whole batch, over all replicas of all workers.
        size: the number of examples, where `source` is a function.
        shuffle: whether the order is random, another in each epoch.
        seed: of that order.

    Raises:
        ValueError: when arrays differ in their number of rows or have none, or `batch_size` or `size` is below 1.
        TypeError: when an array is sparse.
    """

    def __init__(self, source: Any, batch_size: int, *, size: int | None = None, shuffle: bool = True, seed: int = 0):
        if callable(source):
            self._make_batch: Callable | None = source
            self._arrays = None
        else:
            if any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(source)):
                raise TypeError(
                    "Batches cannot reorder the rows of a sparse tensor: give fit a tf.data.Dataset of batches"
                )
            with tf.device("CPU:0"):
                self._arrays = tf.nest.map_structure(as_tensor, source)
            sizes = {int(count_rows(leaf)) for leaf in tf.nest.flatten(self._arrays)}
            if len(sizes) != 1:
                raise ValueError(f"arrays must have the same number of rows, not {sorted(sizes)}")
            self._make_batch, size = None, sizes.pop()
        if batch_size < 1 or not size or size < 1:
            raise ValueError(f"batch_size and the number of examples must be at least 1, not {batch_size} and {size}")
        self.batch_size, self.size, self.shuffle, self.seed = batch_size, size, shuffle, seed

    def __len__(self):
        return steps_per_epoch(self.size, self.batch_size)

    def iter_from_step(self, step: int, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """The batches from `step` on, as parts for the replicas of `context`: see `batches.BeginsAnywhere`.

        The rows of a batch are divided as evenly as possible. What a function makes has
        `batch_size` / replicas rows in every part, rounded up, of which some may be no examples.
        """
        replicas, first, here = replicas_of(context)
        part = -(-self.batch_size // replicas)
        even = self._make_batch or (self.size % self.batch_size == self.batch_size % replicas == 0)

        def make_part(number):
            batch = number // here
            rows = tf.minimum(self.size - batch % len(self) * self.batch_size, self.batch_size)
            start, end = bounds_of_part(rows, first + number % here, replicas)
            offsets = start + tf.range(part, dtype=tf.int64)
            positions = batch * self.batch_size + offsets
            epochs, examples = locate(positions, self.size, self.batch_size, self.seed if self.shuffle else None)
            examples = tf.where(offsets < end, examples, NO_EXAMPLE)
            if self._make_batch:
                return self._make_batch(epochs, examples)
            if not even:
                examples = tf.boolean_mask(examples, examples != NO_EXAMPLE)
            return tf.nest.map_structure(lambda array: tf.gather(array, examples), self._arrays)

        part_numbers = tf.data.Dataset.range(step * here, tf.int64.max)
        return part_numbers.map(make_part, num_parallel_calls=2).prefetch(8)

    def fingerprint(self) -> dict[str, Any]:
        """Facts that must be the same on all workers."""
        ends = [
            array[end] for array in ([] if self._arrays is None else tf.nest.flatten(self._arrays)) for end in (0, -1)
        ]
        return {"rows": self.size, "checksum of the first and the last row": checksum(ends)}


def distribute(
    strategy: tf.distribute.Strategy, data: BeginsAnywhere, step: int = 0
) -> tf.distribute.DistributedDataset:
    """A distributed data set: each replica's part of each batch, from a step on.

    Args:
        strategy: from `make_strategy`.
        data: with two methods, such as `Batches`: see `batches.BeginsAnywhere`.
        step: the first one, counted from 0.

    Returns:
        A `tf.distribute.DistributedDataset` without end.
    """
    options, one_reader = None, getattr(data, "one_reader", False) and strategy.num_replicas_in_sync > 1
    if isinstance(strategy, tf.distribute.MirroredStrategy) and not one_reader:
        # Each replica reads its own part, and none is held ready on its device: up to a fifth faster on CPUs.
        options = tf.distribute.InputOptions(
            experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
            experimental_fetch_to_device=False,
        )
    return distribute_parts(strategy, lambda context: data.iter_from_step(step, context), options)


def checksum(tensors: Iterable[Any]) -> int:
    """The CRC-32 of all values, one tensor after the other; strings count too."""
    crc32 = 0
    for tensor in tf.nest.flatten(list(tensors), expand_composites=True):
        values = np.asarray(tensor)
        content = (
            b"\0".join(map(bytes, values.ravel())) if values.dtype == object else np.ascontiguousarray(values).tobytes()
        )
        crc32 = zlib.crc32(content, crc32)
    return crc32
