# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers over replicas. Call them in a replica's step, that is, in what `strategy.run` runs."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.private import get_keras_mask, set_keras_mask, strategy_seen

# Workers add up tensors of about this many bytes at once, and begin while gradients of earlier layers are computed.
PACKS = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=2**22)
# What collectives, by which workers gather, do not take, and in what it travels.
CARRIED_BY = {tf.bool: tf.int32, tf.uint8: tf.int32, tf.int8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32}
CARRIED_BY |= {tf.uint32: tf.int64, tf.bfloat16: tf.float32}


def map_given(function: Callable, *structures: Any) -> Any:
    """Maps structures as `keras.tree.map_structure` does, and keeps None, which stands for an input not given."""
    return keras.tree.map_structure(lambda first, *rest: None if first is None else function(first, *rest), *structures)


def replicas() -> int:
    """The number of replicas of all workers."""
    # Not that of the strategy: in a replica's pass, `empty.OneReplica` makes that 1.
    return (tf.distribute.get_replica_context() or tf.distribute.get_strategy()).num_replicas_in_sync


def replica_context() -> tf.distribute.ReplicaContext:
    """TensorFlow's handle of this replica.

    Raises:
        RuntimeError: outside of a replica's step.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError("this works in a replica's step only: call it in the function that strategy.run runs")
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
    tensors = tf.nest.flatten(values)
    if replicas() == 1 or not tensors:
        return values
    # TensorFlow keeps int32 in host memory, from which it does not reduce; and it packs tensors of one dtype, and of
    # known shapes, only.
    sent = [tf.cast(tensor, tf.int64) if tensor.dtype == tf.int32 else tensor for tensor in tensors]
    kinds = [(str(tensor.dtype), tensor.shape.is_fully_defined()) for tensor in sent]
    for kind in sorted({*kinds}):
        chosen, options = [index for index, of in enumerate(kinds) if of == kind], PACKS if kind[1] else None
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, [sent[index] for index in chosen], options)
        for index, total in zip(chosen, reduced, strict=True):
            sent[index] = tf.cast(total, tensors[index].dtype)
    return tf.nest.pack_sequence_as(values, sent)


def gather_over_replicas(values: Any) -> Any:
    """Concatenates tensors of all replicas of all workers along the first axis. Every replica must call it.

    Args:
        values: a nested structure of tensors, of at least one axis. The first may have another length on each replica.

    Returns:
        The same structure, in the replicas' order and in the tensors' dtypes, the same on every replica. No gradient
        flows.

    Raises:
        RuntimeError: outside of a replica's step.
    """
    context = replica_context()

    def gathered(tensor):
        if tensor.dtype == tf.string:
            return _gathered_strings(tensor)
        sent = tf.stop_gradient(tf.cast(tensor, CARRIED_BY.get(tensor.dtype, tensor.dtype)))
        return tf.cast(context.all_gather(tf.identity(sent), axis=0), tensor.dtype)

    return tf.nest.map_structure(gathered, values)


def _gathered_strings(strings: tf.Tensor) -> tf.Tensor:
    """As `gather_over_replicas`, of bytes that are filled up to the longest string's length."""
    lengths = gather_over_replicas(tf.strings.length(strings))
    longest = tf.reduce_max(tf.concat([tf.reshape(lengths, [-1]), [1]], axis=0))
    sent = tf.io.decode_raw(strings, tf.uint8, fixed_length=longest)
    table = tf.constant([bytes([value]) for value in range(256)])
    received = tf.gather(table, tf.cast(gather_over_replicas(sent), tf.int32))
    return tf.strings.substr(tf.strings.reduce_join(received, axis=-1), tf.zeros_like(lengths), lengths)


def first_replica(strategy: tf.distribute.Strategy, values: Any) -> Any:
    """What `strategy.run` returned, as tensors: those of this worker's first replica.

    Use it for values that are the same on all replicas, such as those of `sum_over_replicas`.

    Args:
        strategy: the one that ran the step.
        values: a nested structure, as `strategy.run` returns it.

    Returns:
        The same structure of tensors, each of its shape on one replica.
    """
    return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)


def sum_rows(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up some rows of a table over all replicas. Each row is in the result once: optimizers square what they get.

    Replicas send the rows, not the table.
    """
    rows = unique_rows(rows)
    if replicas() == 1:
        return rows
    values, indices = gather_over_replicas((rows.values, rows.indices))
    return unique_rows(tf.IndexedSlices(tf.cast(values, rows.dtype), indices, rows.dense_shape))


def unique_rows(rows: tf.IndexedSlices) -> tf.IndexedSlices:
    """The rows with each index once: their sum."""
    indices, slots = tf.unique(rows.indices)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(rows.values, slots, tf.size(indices)), indices, rows.dense_shape
    )


def gather(values: Any) -> Any:
    """The tensors of all replicas, concatenated, with their masks; ragged ones too. No gradient flows."""

    def gathered(tensor):
        if isinstance(tensor, tf.RaggedTensor):
            flat, lengths = gather_over_replicas((tensor.flat_values, tensor.nested_row_lengths()))
            return tf.RaggedTensor.from_nested_row_lengths(flat, lengths, validate=False)
        tensor, mask = tf.convert_to_tensor(tensor), get_keras_mask(tensor)
        result = tf.ensure_shape(gather_over_replicas(tensor), [None, *tensor.shape[1:]])
        if mask is not None:
            set_keras_mask(result, gathered(mask))
        return result

    return map_given(gathered, values)


def local_value(variable: keras.Variable) -> tf.Variable:
    """This replica's copy of a Keras variable; the variable itself, if there is only one."""
    value = variable._value  # not `value`, which a stateless scope replaces
    return value._get() if isinstance(value, tf.distribute.DistributedValues) else value


@contextlib.contextmanager
def own_copies(variables: Iterable[keras.Variable]) -> Iterator[None]:
    """While it lasts, these variables are this replica's copies, which can be assigned anywhere, as in a `tf.cond`."""
    swapped = {id(variable): (variable, variable._value, local_value(variable)) for variable in variables}.values()
    for variable, _, copy in swapped:
        variable._value = copy
    try:
        yield
    finally:
        for variable, container, _ in swapped:
            variable._value = container


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


def waiting_for(data: Any) -> contextlib.AbstractContextManager[None]:
    """While it lasts, operations wait for the data: at its end, when there is none, nothing is counted."""
    return tf.control_dependencies([leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None])


def no_strategy() -> contextlib.AbstractContextManager[None]:
    """While it lasts, Keras and TensorFlow see no strategy; nothing in it may reduce."""
    return strategy_seen()
