# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers over replicas, and what a replica does alone. Call all but `first_replica` in a replica's step."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from tensorflow.python.distribute import distribute_lib

MEANS = ("loss", "accuracy")  # over labels; in regression there is no accuracy
COUNTS = ("labels", "tokens", "slots")


def replicas() -> int:
    """The number of replicas."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def sum_over_replicas(values):
    """Sums tensors over all replicas of all workers, in a single all-reduce."""
    # Collectives need dense tensors on this replica's device.
    values = tf.nest.map_structure(lambda value: tf.identity(tf.convert_to_tensor(value)), values)
    if replicas() == 1 or not tf.nest.flatten(values):
        return values
    dtypes = tf.nest.map_structure(lambda value: value.dtype, values)
    # TensorFlow keeps int32 in host memory, from which it does not reduce.
    values = tf.nest.map_structure(lambda value: tf.cast(value, tf.int64) if value.dtype == tf.int32 else value, values)
    sums = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)
    return tf.nest.map_structure(tf.cast, sums, dtypes)


def gather_over_replicas(values):
    """All-gathers tensors over all replicas of all workers, along the first axis.

    Those in bfloat16 become float32: TensorFlow's collectives, which workers and NCCL use, cannot gather them.
    """

    def gatherable(value):
        return tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else tf.identity(value)

    return tf.distribute.get_replica_context().all_gather(tf.nest.map_structure(gatherable, values), axis=0)


def first_replica(strategy: tf.distribute.Strategy, values):
    """What `strategy.run` returned for this worker's first replica; for values that are the same on all."""
    return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)


def gather(values: Any) -> Any:
    """The tensors of all replicas, concatenated, with their masks and in their dtypes; no gradient flows."""

    def of_all(tensor):
        if tensor is None:
            return None
        tensor, mask = tf.convert_to_tensor(tensor), get_keras_mask(tensor)
        sent = tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else tensor  # collectives gather no booleans
        whole = gather_over_replicas(tf.stop_gradient(sent))
        whole = tf.ensure_shape(tf.cast(whole, tensor.dtype), [None, *tensor.shape[1:]])
        if mask is not None:
            set_keras_mask(whole, of_all(mask))
        return whole

    return keras.tree.map_structure(of_all, values)


def gather_around(values: Any) -> Any:
    """As `gather`, but this replica's own part is the tensor itself, through which gradients flow."""
    if any(leaf is not None and not leaf.shape.rank for leaf in keras.tree.flatten(values)):
        raise ValueError("an output without a batch dimension is a replica's own: a loss of the whole batch needs one")
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    own = next(leaf for leaf in keras.tree.flatten(values) if leaf is not None)
    sizes = gather(tf.shape(own)[:1])
    start, end = tf.reduce_sum(sizes[:replica]), tf.reduce_sum(sizes[: replica + 1])

    def put(own, whole):
        if own is None:
            return None
        result = tf.concat([whole[:start], own, whole[end:]], axis=0)
        if (mask := get_keras_mask(whole)) is not None:
            set_keras_mask(result, mask)
        return result

    return keras.tree.map_structure(put, values, gather(values))


def pack(values: Any) -> tuple[list[tf.Tensor], Any]:
    """Packs the float32 tensors, of which there must be at least one, into one vector, to be reduced at once.

    Returns:
        A list of that vector and the other tensors, and a function that unpacks such a list.
    """
    flat = tf.nest.flatten(values)
    small = [i for i, tensor in enumerate(flat) if tensor.dtype == tf.float32]
    vector = tf.concat([tf.reshape(flat[i], [-1]) for i in small], axis=0)
    packed = [vector, *[tensor for i, tensor in enumerate(flat) if i not in small]]

    def unpack(packed):
        parts = tf.split(packed[0], [flat[i].shape.num_elements() for i in small])
        large = iter(packed[1:])
        parts = {i: tf.reshape(part, flat[i].shape) for i, part in zip(small, parts, strict=True)}
        return tf.nest.pack_sequence_as(values, [parts[i] if i in parts else next(large) for i in range(len(flat))])

    return packed, unpack


def local_value(variable: keras.Variable) -> tf.Variable:
    """This replica's own copy of a Keras variable; the variable itself, if there is only one."""
    value = variable._value
    return value._get() if isinstance(value, tf.distribute.DistributedValues) else value


def is_first_replica() -> tf.Tensor:
    """Whether this replica is the first of all workers'."""
    return tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)


def is_shared(variable: keras.Variable) -> bool:
    """Whether the replicas share one copy of a Keras variable, as when it was made outside the strategy's scope."""
    return not isinstance(variable._value, tf.distribute.DistributedValues)


@contextlib.contextmanager
def no_strategy() -> Iterator[None]:
    """While it lasts, Keras and TensorFlow see no strategy; nothing in it may reduce."""
    distribute_lib._push_per_thread_mode(distribute_lib._DefaultReplicaThreadMode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def on_local_copies(optimizer: keras.Optimizer, variables: Iterable[keras.Variable]) -> Iterator[None]:
    """While it lasts, the optimizer and the variables are those of this replica alone.

    Every replica has the same gradient of the whole batch, so each updates its own copies, and all stay the same.
    Clipping, accumulation over steps, moving averages and the scale of the loss are then what Keras computes on one
    device: in a strategy, Keras asks the other replicas inside a `tf.cond`, which fails (keras-team/keras#20582). No
    other replica sees the swap: a strategy switches between its replicas' threads at reductions only, and here is none.
    """
    optimizers = [optimizer, *([optimizer.inner_optimizer] if hasattr(optimizer, "inner_optimizer") else [])]
    swapped = {id(v): v for v in [*optimizer.variables, *variables]}.values()
    containers = [variable._value for variable in swapped]
    strategies = [each._distribution_strategy for each in optimizers]
    copies = [local_value(variable) for variable in swapped]
    with no_strategy():
        for variable, copy in zip(swapped, copies, strict=True):
            variable._value = copy
        for each in optimizers:
            each._distribution_strategy = tf.distribute.get_strategy()
        try:
            yield
        finally:
            for variable, container in zip(swapped, containers, strict=True):
                variable._value = container
            for each, strategy in zip(optimizers, strategies, strict=True):
                each._distribution_strategy = strategy
