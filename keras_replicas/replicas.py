# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers over replicas. Call them in a replica's step, that is, in what `strategy.run` runs."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.origins import SAME_ON_REPLICAS
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
    # Not the strategy's public number, which is 1 where a model is to compute as on one device (`one_replica_seen`).
    return tf.distribute.get_strategy().extended._num_replicas_in_sync


class _Seen(threading.local):
    """What this thread is shown."""

    one_replica = False


_seen = _Seen()


@contextlib.contextmanager
def one_replica_seen(hidden: bool = True) -> Iterator[None]:
    """Context in which this thread sees a strategy of one replica, if `hide_replicas` was called for the strategy.

    Keras and users divide by `num_replicas_in_sync` what is summed over replicas. Here nothing is to be divided.

    Args:
        hidden: False shows the true number again, for the reductions inside such a context.
    """
    before, _seen.one_replica = _seen.one_replica, hidden
    try:
        yield
    finally:
        _seen.one_replica = before


def hide_replicas(strategy: tf.distribute.Strategy) -> None:
    """Lets `one_replica_seen` act on a strategy, on its replica contexts, and on every reference to it."""
    kind: Any = type(strategy)
    if hasattr(kind, "hides_replicas"):
        return

    def num_replicas_in_sync(self):
        return 1 if _seen.one_replica else kind.num_replicas_in_sync.fget(self)

    attributes = {"hides_replicas": True, "num_replicas_in_sync": property(num_replicas_in_sync)}
    strategy.__class__ = type(kind.__name__, (kind,), attributes | {"__module__": kind.__module__})


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
    replica_context()  # raises outside of a replica's step
    # Collectives need dense tensors on this replica's device.
    values = tf.nest.map_structure(lambda value: tf.identity(tf.convert_to_tensor(value)), values)
    tensors = tf.nest.flatten(values)
    if replicas() == 1 or not tensors:
        return values
    # TensorFlow keeps int32 in host memory, from which it does not reduce.
    sent = [tf.cast(tensor, tf.int64) if tensor.dtype == tf.int32 else tensor for tensor in tensors]
    with tf.name_scope(SAME_ON_REPLICAS):
        totals = [tf.cast(total, tensor.dtype) for total, tensor in zip(_all_reduce(*sent), tensors, strict=True)]
    return tf.nest.pack_sequence_as(values, totals)


@tf.custom_gradient
def _all_reduce(*tensors: tf.Tensor) -> tuple[Any, Callable]:
    """Sums tensors over replicas; the gradient is the sum of the replicas' gradients, and has a gradient itself."""

    def gradient(*upstream):
        return _all_reduce(*upstream)

    return tuple(_reduce([tf.stop_gradient(tensor) for tensor in tensors])), gradient


def reduce_without_gradient(tensor: tf.Tensor) -> tf.Tensor:
    """Sums a tensor over replicas, for an operation that defines its own gradient."""
    return _reduce([tf.stop_gradient(tensor)])[0]


def _reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over replicas; each must come from `tf.stop_gradient`.

    TensorFlow's `all_reduce` searches the graph backwards from its results for variables, through the reduction into
    the other replicas' graphs. With a reduction in each layer, that takes time that grows with the square of the
    number of layers. The search ends at `tf.stop_gradient`.
    """
    context = replica_context()
    totals = list(tensors)
    # TensorFlow packs tensors of one dtype, and of known shapes, only.
    kinds = [(str(tensor.dtype), tensor.shape.is_fully_defined()) for tensor in tensors]
    for kind in sorted({*kinds}):
        chosen = [index for index, of in enumerate(kinds) if of == kind]
        options = PACKS if kind[1] else None
        with one_replica_seen(False):
            reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, [tensors[index] for index in chosen], options)
        for index, total in zip(chosen, reduced, strict=True):
            totals[index] = total
    return totals


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
        sent = tf.identity(tf.stop_gradient(tf.cast(tensor, CARRIED_BY.get(tensor.dtype, tensor.dtype))))
        with tf.name_scope(SAME_ON_REPLICAS), one_replica_seen(False):
            return tf.identity(tf.cast(context.all_gather(sent, axis=0), tensor.dtype))

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


def is_reduced_apart(gradient: Any, variable: keras.Variable) -> bool:
    """Whether a gradient is no dense tensor that is summed with the others: rows of a table, or a weight's value."""
    return isinstance(gradient, tf.IndexedSlices) or variable.overwrite_with_gradient


def reduce_gradients(gradients: dict[int, Any], variables: Sequence[keras.Variable]) -> dict[int, Any]:
    """Sums gradients over all replicas.

    Dense tensors are summed in one reduction. For the rows of a table, the replicas gather rows. A weight that its
    gradient overwrites, such as float8's largest value, gets the largest of all.

    Args:
        gradients: by the variable's index, tensors or `tf.IndexedSlices`; the same indices on every replica.
        variables: the Keras variables.
    """
    dense, reduced = {}, {}
    for index, gradient in gradients.items():
        if variables[index].overwrite_with_gradient:
            values = gather_over_replicas(gradient[None]) if replicas() > 1 else gradient[None]
            reduced[index] = tf.reduce_max(values, axis=0)
        elif isinstance(gradient, tf.IndexedSlices):
            reduced[index] = sum_rows(gradient)
        else:
            dense[index] = gradient
    return reduced | sum_over_replicas(dense)


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
