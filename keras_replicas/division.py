# SPDX-License-Identifier: Apache-2.0
"""How batches are divided over replicas: rows of dense, ragged and sparse tensors."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.device_copies import do_not_tune_device_copies, untuned
from keras_replicas.errors import UserError

UNLIKE_ROWS = (
    "the tensors of a batch have unlike numbers of rows, so replicas cannot take parts of it: give each the same "
    "first axis, one row for each example, or use one replica"
)
_options_lock = threading.Lock()  # of the strategies, for threads that train at the same time


def bounds_of_part(rows: Any, replica: Any, replicas: int) -> tuple[Any, Any]:
    """Where a replica's part of a batch begins and ends, without the end.

    Parts differ by one row at most, and none is larger than the first. Where there are fewer rows than replicas, some
    parts are empty, not always the last.

    Args:
        rows: of the batch.
        replica: its number.
        replicas: how many there are.
    """
    return -(-rows * replica // replicas), -(-rows * (replica + 1) // replicas)


def parts_of(dataset: tf.data.Dataset, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """The parts of whole batches for the replicas of an input pipeline.

    Each tensor of a batch is divided by its own number of rows, as by `bounds_of_part`.
    """
    replicas, first, here = replicas_of(context)
    if replicas == 1:
        return dataset

    def part_of(leaf, replica):
        if leaf is None:
            return None
        part = slice_rows(leaf, *bounds_of_part(tf.cast(count_rows(leaf), tf.int64), replica, replicas))
        if isinstance(leaf, tf.Tensor) and leaf.shape[0] and leaf.shape[0] % replicas == 0:
            part = tf.ensure_shape(part, [leaf.shape[0] // replicas, *leaf.shape[1:]])
        return part

    def parts(*batch):
        batch = batch if isinstance(dataset.element_spec, tuple) else batch[0]
        here_alone = tf.data.Dataset.range(first, first + here)
        return here_alone.map(lambda replica: tf.nest.map_structure(lambda leaf: part_of(leaf, replica), batch))

    return dataset.flat_map(parts).prefetch(2 * here)


def divide_batch(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """A batch of tensors as one value for each replica, in the replicas' order: its part, as by `bounds_of_part`."""
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return batch

    def divided(leaf):
        def part(context):
            rows = tf.cast(count_rows(leaf), tf.int64)
            return slice_rows(leaf, *bounds_of_part(rows, context.replica_id_in_sync_group, replicas))

        return None if leaf is None else strategy.experimental_distribute_values_from_function(part)

    return keras.tree.map_structure(divided, batch)


def divide(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """A distributed data set of the parts of whole batches, for one pass over the data.

    TensorFlow's `experimental_distribute_dataset` divides a short last batch as if it were a full one: of 3 rows in
    batches of 8, one of two replicas gets all.
    """
    return distribute_parts(strategy, lambda context: parts_of(dataset, context))


def distribute_parts(
    strategy: tf.distribute.Strategy,
    make_parts: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    options: tf.distribute.InputOptions | None = None,
) -> tf.distribute.DistributedDataset:
    """A distributed data set of what a function makes for each input pipeline: parts for its replicas, in turn."""
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

    return iter(distribute_parts(strategy, make_parts, iterator._options))  # the same object: it is part of the type


def _with_shapes_of(specs: Any, part: Any) -> Any:
    """Tensors of which no more is known than a data set's specs say."""

    def with_shape(leaf, spec):
        if not isinstance(spec, tf.TensorSpec):
            return leaf
        return tf.ensure_shape(tf.compat.v1.placeholder_with_default(leaf, None), spec.shape)

    return tf.nest.map_structure(with_shape, part, specs)


def replicas_of(context: tf.distribute.InputContext) -> tuple[int, int, int]:
    """The number of all replicas, the first one of an input pipeline, and how many it has."""
    here = context.num_replicas_in_sync // context.num_input_pipelines
    return context.num_replicas_in_sync, context.input_pipeline_id * here, here


def refuse_unlike_rows(batch: Any) -> None:
    """Refuses a batch whose tensors, or specs of tensors, are known to have unlike numbers of rows.

    Raises:
        UserError: when they are, or one has no axis of rows.
    """
    refuse_scalars(batch)
    shapes = _shapes_of(batch)
    known = {shape[0] for shape in shapes if shape.rank and shape[0] is not None}
    if len(known) > 1:
        raise UserError(f"{UNLIKE_ROWS}. Here there are {' and '.join(map(str, sorted(known)))} rows")


def refuse_scalars(batch: Any) -> None:
    """Refuses a batch with a tensor, or a spec of one, that has no axis of rows.

    Raises:
        UserError: when there is one.
    """
    shapes = _shapes_of(batch)
    if any(shape.rank == 0 for shape in shapes):
        raise UserError(f"{UNLIKE_ROWS}. Here the shapes are {', '.join(map(str, shapes))}")


def _shapes_of(batch: Any) -> list[tf.TensorShape]:
    return [leaf.shape for leaf in tf.nest.flatten(batch) if leaf is not None and hasattr(leaf, "shape")]


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


def concat_rows(leaves: Sequence[Any]) -> Any:
    """The rows of dense, ragged or sparse tensors, one tensor after the other."""
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(leaves))
    return tf.concat(leaves, axis=0)


def sparse_rows(like: tf.SparseTensor, indices: tf.Tensor, values: tf.Tensor, rows: Any) -> tf.SparseTensor:
    """A sparse tensor of some rows, of whose other axes as much is known as of another tensor's."""
    others = [size or like.dense_shape[axis] for axis, size in enumerate(like.shape) if axis]
    return tf.SparseTensor(indices, values, tf.stack([tf.cast(size, tf.int64) for size in (rows, *others)]))


def count_rows(leaf: Any) -> Any:
    """The length of the first axis of a dense, ragged or sparse tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    return leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)[0]


def as_tensor(rows: Any) -> Any:
    """A tensor of rows: dense, ragged or sparse, SciPy's sparse matrices too. A sparse one has its entries in order."""
    if hasattr(rows, "tocoo"):
        entries = rows.tocoo()
        indices = np.stack([entries.row, entries.col], axis=1).astype(np.int64)
        rows = tf.SparseTensor(indices, entries.data, entries.shape)
    if isinstance(rows, tf.SparseTensor):
        return tf.sparse.reorder(rows)
    return rows if isinstance(rows, tf.RaggedTensor) else tf.convert_to_tensor(rows)
