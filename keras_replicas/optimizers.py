# SPDX-License-Identifier: Apache-2.0
"""What an optimizer must be told where gradients are already summed over replicas."""

import inspect

import keras


def do_not_reduce_again(optimizer: keras.optimizers.Optimizer) -> None:
    """Tells a Keras optimizer that the gradients it is given are already summed over replicas.

    Keras has no public switch for that. Only this one optimizer is changed.

    Raises:
        RuntimeError: when Keras's optimizers have changed so that they cannot be told.
    """
    reduce = optimizer._all_reduce_sum_gradients
    if list(inspect.signature(reduce).parameters) != ["grads_and_vars"]:
        raise RuntimeError(f"this Keras's optimizers differ from those of 3.15: {reduce}")
    optimizer._all_reduce_sum_gradients = _reduced_already
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        do_not_reduce_again(optimizer.inner_optimizer)


def _reduced_already(grads_and_vars):
    return list(grads_and_vars)
