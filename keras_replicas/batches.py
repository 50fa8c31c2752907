# SPDX-License-Identifier: Apache-2.0
"""Data that begins at any step, and is divided over the replicas.

Two methods make data such, whatever its class: see `BeginsAnywhere`. `Batches` has them; `data.py` gives them to
whatever `fit` takes.
"""

import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.device_copies import do_not_tune_device_copies, untuned
from keras_replicas.errors import UserError
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

        The rows of a batch are divided evenly, and the first parts are the larger. What a function makes has
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
    return _distribute_parts(strategy, lambda context: data.iter_from_step(step, context), options)


def divide(
    strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, alike: bool = True
) -> tf.distribute.DistributedDataset:
    """A distributed data set of the parts of whole batches, for one pass over the data.

    TensorFlow's `experimental_distribute_dataset` divides a short last batch as if it were a full one: of 3 rows in
    batches of 8, one of two replicas gets all.

    Args:
        strategy: over whose replicas it is divided.
        dataset: of whole batches.
        alike: as of `parts_of`.
    """
    return _distribute_parts(strategy, lambda context: parts_of(dataset, context, alike))


_options_lock = threading.Lock()  # of the strategies, for threads that train at the same time


def _distribute_parts(strategy, make_parts, options=None):
    do_not_tune_device_copies()

    # Parallel calls and prefetching stay as the pipeline's code sets them, and deleting an iterator does not wait.
    def parts(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return untuned(make_parts(context))

    with _options_lock:
        devices = getattr(strategy.extended, "_input_workers_devices", None)
        try:
            return strategy.distribute_datasets_from_function(parts, options)
        finally:
            if devices:  # TensorFlow 2.21 keeps the option for the data sets that come, and each replica would read all
                strategy.extended._input_workers_devices = devices


def iterator_over(strategy: tf.distribute.Strategy, batch: Any, iterator: Any) -> Any:
    """An iterator over one batch, which another iterator gave, of that one's type: so no `tf.function` traces it anew.

    Returns:
        The iterator; None where the batch has inputs that are not given.
    """
    specs = keras.tree.map_structure(lambda spec: getattr(spec, "_value_specs", [spec])[0], iterator.element_spec)
    of_replicas = [strategy.experimental_local_results(leaf) for leaf in keras.tree.flatten(batch)]
    if any(isinstance(leaf, tf.experimental.Optional) or leaf is None for leaves in of_replicas for leaf in leaves):
        return None
    parts = [keras.tree.pack_sequence_as(batch, list(leaves)) for leaves in zip(*of_replicas, strict=True)]

    def make_parts(context):
        _, first, here = replicas_of(context)
        chosen = [tf.data.Dataset.from_tensors(parts[(first + number) % len(parts)]) for number in range(here)]
        dataset = chosen[0]
        for other in chosen[1:]:
            dataset = dataset.concatenate(other)
        return dataset.map(lambda *part: _with_shapes_of(specs, part if isinstance(specs, tuple) else part[0]))

    return iter(_distribute_parts(strategy, make_parts, iterator._options))  # the same object: it is part of the type


def _with_shapes_of(specs: Any, part: Any) -> Any:
    """Tensors of which no more is known than a data set's specs say."""

    def with_shape(leaf, spec):
        if not isinstance(spec, tf.TensorSpec):
            return leaf
        return tf.ensure_shape(tf.compat.v1.placeholder_with_default(leaf, None), spec.shape)

    return tf.nest.map_structure(with_shape, part, specs)


def bounds_of_part(rows: Any, replica: Any, replicas: int) -> tuple[Any, Any]:
    """Where a replica's part of a batch begins and ends, without the end.

    Parts differ by one row at most, and the first ones are the larger: a replica has none only where there are fewer
    rows than replicas.

    Args:
        rows: of the batch.
        replica: its number.
        replicas: how many there are.
    """
    return -(-rows * replica // replicas), -(-rows * (replica + 1) // replicas)


def replicas_of(context: tf.distribute.InputContext) -> tuple[int, int, int]:
    """The number of all replicas, the first one of an input pipeline, and how many it has."""
    here = context.num_replicas_in_sync // context.num_input_pipelines
    return context.num_replicas_in_sync, context.input_pipeline_id * here, here


def parts_of(dataset: tf.data.Dataset, context: tf.distribute.InputContext, alike: bool = True) -> tf.data.Dataset:
    """The parts of whole batches for the replicas of an input pipeline, divided as by `bounds_of_part`.

    Args:
        dataset: of whole batches.
        context: of the input pipeline.
        alike: whether all tensors of a batch must have the same number of rows. A custom step may get others, such as
            of labelled and unlabelled examples: each is then divided by its own number.

    Raises:
        UserError: when tensors of a batch have unlike numbers of rows. Where shapes do not tell, reading the data
            raises an `InvalidArgumentError` with the same sentence.
    """
    replicas, first, here = replicas_of(context)
    if replicas == 1:
        return dataset
    if alike:
        refuse_unlike_rows(dataset.element_spec)

    def part_of(leaf, common, replica):
        if leaf is None:
            return None
        rows = common if alike else tf.cast(count_rows(leaf), tf.int64)
        part = slice_rows(leaf, *bounds_of_part(rows, replica, replicas))
        if isinstance(leaf, tf.Tensor) and leaf.shape[0] and leaf.shape[0] % replicas == 0:
            part = tf.ensure_shape(part, [leaf.shape[0] // replicas, *leaf.shape[1:]])
        return part

    @tf.autograph.experimental.do_not_convert
    def parts(*batch):
        batch = batch if isinstance(dataset.element_spec, tuple) else batch[0]
        common = common_rows(batch) if alike else None
        here_alone = tf.data.Dataset.range(first, first + here)
        return here_alone.map(lambda replica: tf.nest.map_structure(lambda leaf: part_of(leaf, common, replica), batch))

    return dataset.flat_map(parts).prefetch(2 * here)


UNLIKE_ROWS = (
    "the tensors of a batch have unlike numbers of rows, so replicas cannot take parts of it: give each the same "
    "first axis, one row for each example, or use one replica"
)


def refuse_unlike_rows(batch: Any) -> None:
    """Refuses a batch whose tensors, or specs of tensors, are known to have unlike numbers of rows.

    Raises:
        UserError: when they are, or one has no axis of rows.
    """
    shapes = [leaf.shape for leaf in tf.nest.flatten(batch) if leaf is not None and hasattr(leaf, "shape")]
    if any(shape.rank == 0 for shape in shapes):
        raise UserError(f"{UNLIKE_ROWS}. Here the shapes are {', '.join(map(str, shapes))}")
    known = {shape[0] for shape in shapes if shape.rank and shape[0] is not None}
    if len(known) > 1:
        raise UserError(f"{UNLIKE_ROWS}. Here there are {' and '.join(map(str, sorted(known)))} rows")


def common_rows(batch: Any) -> Any:
    """The number of rows of a batch, which all its tensors have; an int64.

    Raises:
        InvalidArgumentError: of TensorFlow, with the sentence `UNLIKE_ROWS`, when they have unlike numbers.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    rows = [tf.cast(count_rows(leaf), tf.int64) for leaf in leaves]
    checks = [tf.debugging.assert_equal(other, rows[0], UNLIKE_ROWS) for other in rows[1:]]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(rows[0])


def slice_rows(leaf: Any, start: Any, end: Any) -> Any:
    """The rows from `start` to `end`, without it, of a dense, ragged or sparse tensor."""
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:end]
    start, end = tf.cast(start, tf.int64), tf.cast(end, tf.int64)
    shape = leaf.dense_shape
    begin = tf.concat([[start], tf.zeros_like(shape[1:])], axis=0)
    found = tf.sparse.slice(leaf, begin, tf.concat([[end - start], shape[1:]], axis=0))
    return sparse_rows(leaf, found.indices, found.values, end - start)


def sparse_rows(like: tf.SparseTensor, indices: tf.Tensor, values: tf.Tensor, rows: Any) -> tf.SparseTensor:
    """A sparse tensor of some rows, of whose other axes as much is known as of another tensor's."""
    others = [size or like.dense_shape[axis] for axis, size in enumerate(like.shape) if axis]
    return tf.SparseTensor(indices, values, tf.stack([tf.cast(size, tf.int64) for size in (rows, *others)]))


def count_rows(leaf: Any) -> Any:
    """The length of the first axis of a dense, ragged or sparse tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    return leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)[0]


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


def as_tensor(rows: Any) -> Any:
    """A tensor of rows: dense, ragged or sparse, SciPy's sparse matrices too. A sparse one has its entries in order."""
    if hasattr(rows, "tocoo"):
        entries = rows.tocoo()
        indices = np.stack([entries.row, entries.col], axis=1).astype(np.int64)
        rows = tf.SparseTensor(indices, entries.data, entries.shape)
    if isinstance(rows, tf.SparseTensor):
        return tf.sparse.reorder(rows)
    return rows if isinstance(rows, tf.RaggedTensor) else tf.convert_to_tensor(rows)
