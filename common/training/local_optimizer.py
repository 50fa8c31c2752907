# SPDX-License-Identifier: Apache-2.0
"""An optimizer's step on one replica's own copies of the variables, as on a single device."""

import contextlib
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib


def local_value(variable: keras.Variable) -> tf.Variable:
    """This replica's own copy of a Keras variable; the variable itself, where there is but one. Call it in a step."""
    value = variable._value
    return value._get() if isinstance(value, tf.distribute.DistributedValues) else value


@contextlib.contextmanager
def no_strategy() -> Iterator[None]:
    """While it lasts, Keras and TensorFlow see no strategy. Use it in a replica's step; nothing in it may reduce."""
    distribute_lib._push_per_thread_mode(distribute_lib._DefaultReplicaThreadMode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def on_local_copies(optimizer: keras.Optimizer, variables: Iterable[keras.Variable]) -> Iterator[None]:
    """While it lasts, the optimizer and the variables are those of this replica alone. Use it in a replica's step.

    Every replica has the same gradient of the whole batch, so each updates its own copies, and all stay the same.
    Clipping, accumulation over steps, moving averages and the scale of the loss are then what Keras computes on one
    device: in a strategy, Keras asks the other replicas inside of a `tf.cond`, which fails (keras-team/keras#20582).
    A strategy runs its replicas' threads one at a time from one reduction to the next, and here is none.
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
