# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers over replicas. Call them in a replica's step, that is, in what `strategy.run` runs."""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.private import get_keras_mask, set_keras_mask, strategy_seen

# Workers add up tensors of about this many bytes at once, and begin while gradients of earlier layers are computed.
PACKS = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=2**22)


def replicas() -> int:
    """The number of replicas of all workers."""
    # Not that of the strategy: in a replica's pass, that is 1; see `empty.OneReplica`.
    return (tf.distribute.get_replica_context() or tf.distribute.get_strategy()).num_replicas_in_sync


def replica_context() -> tf.distribute.ReplicaContext:
    """TensorFlow's handle of this replica.

    Raises:
        RuntimeError: outside of a replica's step.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError("call this in a replica's step, in what strategy.run runs")
    return context


def sum_over_replicas(values: Any) -> Any:
    """Adds up tensors over all replicas of all workers, in one all-reduce. Every replica must call it.

    Args:
        values: a nested structure of tensors of any shape and any dtype of numbers, with the same structure, shapes and
            dtypes on every replica. A `tf.IndexedSlices`, as is the gradient of an embedding, becomes a dense tensor.

    Returns:
        The same structure of sums, each in its tensor's shape and dtype, the same on every replica.

    Raises:
        RuntimeError: outside of a replica's step.
    """
    context = replica_context()
    # Collectives need dense tensors on this replica's device.
    values = tf.nest.map_structure(lambda value: tf.identity(tf.convert_to_tensor(value)), values)
    if replicas() == 1 or not tf.nest.flatten(values):
        return values
    dtypes = tf.nest.map_structure(lambda value: value.dtype, values)
    # TensorFlow keeps int32 in host memory, from which it does not reduce.
    values = tf.nest.map_structure(lambda value: tf.cast(value, tf.int64) if value.dtype == tf.int32 else value, values)
    return tf.nest.map_structure(tf.cast, context.all_reduce(tf.distribute.ReduceOp.SUM, values, PACKS), dtypes)


def gather_over_replicas(values: Any) -> Any:
    """Concatenates tensors of all replicas of all workers along the first axis. Every replica must call it.

    Args:
        values: a nested structure of tensors, of at least one axis. The first may have another length on each replica.

    Returns:
        The same structure, in the replicas' order, the same on every replica. Dtypes are kept, but bfloat16 becomes
        float32: TensorFlow's collectives, which workers and NCCL use, cannot gather it.

    Raises:
        RuntimeError: outside of a replica's step.
    """

    def gatherable(value):
        return tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else tf.identity(value)

    return replica_context().all_gather(tf.nest.map_structure(gatherable, values), axis=0)


def first_replica(strategy: tf.distribute.Strategy, values: Any) -> Any:
    """What `strategy.run` returned, as tensors: those of this worker's first replica.

    Use it for values that are the same on all replicas, such as those of `sum_over_replicas`.

    Args:
        strategy: the one that ran the step.
        values: a nested structure, as `strategy.run` returns it.
    """
    return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)


def sum_rows(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up some rows of a table over all replicas. Each row is in the result once: optimizers square what they get.

    Replicas send the rows, not the table.
    """
    rows = _each_once(rows)
    if replicas() == 1:
        return rows
    values, indices = gather_over_replicas((rows.values, rows.indices))
    return _each_once(tf.IndexedSlices(tf.cast(values, rows.dtype), indices, rows.dense_shape))


def _each_once(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    indices, slots = tf.unique(rows.indices)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(rows.values, slots, tf.size(indices)), indices, rows.dense_shape
    )


def gather(values: Any) -> Any:
    """The tensors of all replicas, concatenated, with their masks and in their dtypes; no gradient flows."""

    def gathered(tensor):
        if tensor is None:
            return None
        tensor, mask = tf.convert_to_tensor(tensor), get_keras_mask(tensor)
        sent = tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else tensor  # collectives gather no booleans
        result = gather_over_replicas(tf.stop_gradient(sent))
        result = tf.ensure_shape(tf.cast(result, tensor.dtype), [None, *tensor.shape[1:]])
        if mask is not None:
            set_keras_mask(result, gathered(mask))
        return result

    return keras.tree.map_structure(gathered, values)


def gather_around(values: Any) -> Any:
    """As `gather`, but this replica's rows are the tensors themselves, through which gradients flow."""
    if any(leaf is not None and not leaf.shape.rank for leaf in keras.tree.flatten(values)):
        raise ValueError("an output without a batch axis is of one replica's examples: a loss of the batch needs one")
    replica = replica_context().replica_id_in_sync_group
    first = next(leaf for leaf in keras.tree.flatten(values) if leaf is not None)
    sizes = gather(tf.shape(first)[:1])
    start, end = tf.reduce_sum(sizes[:replica]), tf.reduce_sum(sizes[: replica + 1])

    def put(tensor, gathered):
        if tensor is None:
            return None
        result = tf.concat([gathered[:start], tensor, gathered[end:]], axis=0)
        if (mask := get_keras_mask(gathered)) is not None:
            set_keras_mask(result, mask)
        return result

    return keras.tree.map_structure(put, values, gather(values))


def local_value(variable: keras.Variable) -> tf.Variable:
    """This replica's copy of a Keras variable; the variable itself, if there is only one."""
    value = variable._value  # not `value`, which a stateless scope replaces
    return value._get() if isinstance(value, tf.distribute.DistributedValues) else value


def is_first_replica() -> tf.Tensor:
    """Whether this replica is the first of all workers'."""
    return tf.equal(replica_context().replica_id_in_sync_group, 0)


def assign_sum(variable: keras.Variable, value: tf.Tensor) -> None:
    """Gives a value to a variable that is the sum over replicas: the first replica holds it all, the others nothing."""
    keeps = is_first_replica() | is_shared(variable)
    local_value(variable).assign(tf.where(keeps, value, tf.zeros_like(value)))


def is_shared(variable: keras.Variable) -> bool:
    """Whether the replicas share one copy of a Keras variable, as when it was made outside the strategy's scope."""
    return not isinstance(variable._value, tf.distribute.DistributedValues)


def no_strategy() -> contextlib.AbstractContextManager[None]:
    """While it lasts, Keras and TensorFlow see no strategy; nothing in it may reduce."""
    return strategy_seen()
