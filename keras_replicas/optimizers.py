# SPDX-License-Identifier: Apache-2.0
"""An optimizer's update, where gradients are already added up over replicas."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.errors import UserError
from keras_replicas.noise import share_global_seed
from keras_replicas.private import GLOBAL_SEED_GENERATOR, get_global_attribute
from keras_replicas.replicas import is_shared, no_strategy, own_copies, replica_context, replicas, unique_rows


def refuse_made_outside_scope(optimizer: keras.Optimizer) -> None:
    """Refuses an optimizer that cannot update a model of the current strategy.

    Call it in the strategy's scope, where there is a strategy.

    Raises:
        UserError: when the optimizer was made outside the scope: replicas would share its variables.
    """
    counter = getattr(optimizer, "_iterations", None)
    if tf.distribute.has_strategy() and counter is not None and is_shared(counter):
        raise UserError(
            f"the optimizer {optimizer.name} was made outside the strategy's scope: make it, and call compile, in "
            "`with strategy.scope():`"
        )


def apply_summed(optimizer: keras.Optimizer, gradients: Sequence, variables: Sequence[keras.Variable]) -> None:
    """Updates variables by gradients that are already added up over replicas, as by `sum_over_replicas`.

    Keras's `optimizer.apply` adds up gradients over replicas itself: given sums, it would take each N times. Here,
    every replica updates its copy of each variable by the same gradients, as on one device; so clipping, accumulation
    over steps, moving averages and the scale of the loss are right, too.

    In a replica's step, that is, in what `strategy.run` runs::

        gradients, labels = sum_over_replicas((tape.gradient(loss_sum, variables), labels))
        apply_summed(optimizer, [gradient / labels for gradient in gradients], variables)

    Args:
        optimizer: made and built in the strategy's scope.
        gradients: for each variable, a tensor of its shape, a `tf.IndexedSlices` that has each row once, or None. They
            must be the same on all replicas. If the optimizer scales the loss, they are those of the scaled loss.
        variables: Keras variables for which the optimizer is built, such as `model.trainable_variables`.

    Raises:
        ValueError: when the optimizer is not built, or gradients and variables differ in number.
        RuntimeError: outside of a replica's step.
    """
    replica_context()
    if not optimizer.built:
        raise ValueError("in the strategy's scope, first call optimizer.build(model.trainable_variables)")
    if optimizer.loss_scale_factor:  # by which Keras cannot divide rows
        gradients = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
    with _no_draws_of_tensorflow(optimizer), without_strategy(optimizer, variables):
        share_global_seed()
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))


# Random operations whose seed is no argument: each replica would draw other numbers.
STATEFUL_DRAWS = ("RandomStandardNormal", "TruncatedNormal", "RandomUniform", "RandomUniformInt", "RandomShuffle")


@contextlib.contextmanager
def _no_draws_of_tensorflow(optimizer: keras.Optimizer) -> Iterator[None]:
    """Context of an update, after which it is known that all replicas have made the same one.

    Raises:
        UserError: when the optimizer has drawn random numbers that are others on each replica, and so are the weights.
    """
    graph = None if tf.executing_eagerly() or replicas() == 1 else tf.compat.v1.get_default_graph()
    before = 0 if graph is None else len(graph.get_operations())
    yield
    added = [] if graph is None else graph.get_operations()[before:]
    if any(operation.type in STATEFUL_DRAWS for operation in added):
        raise UserError(
            f"the optimizer {optimizer.name} draws random numbers by tf.random, which differ between replicas: "
            "draw them by keras.random, as keras.random.normal(...)"
        )


@contextlib.contextmanager
def without_strategy(optimizer: keras.Optimizer, variables: Iterable[keras.Variable]) -> Iterator[None]:
    """While it lasts, the optimizer and the variables are those of this replica alone, without a strategy.

    In a strategy, Keras asks the other replicas inside a `tf.cond`, which fails (keras-team/keras#20582). No other
    replica sees the swap: a strategy switches between its replicas' threads at reductions only, and here is none.
    """
    optimizers = _with_inner(optimizer)
    strategies = [each._distribution_strategy for each in optimizers]
    with own_copies([*variables_of_optimizer(optimizer), *variables, *_seeds_of(optimizers)]), no_strategy():
        for each in optimizers:
            each._distribution_strategy = tf.distribute.get_strategy()
        try:
            yield
        finally:
            for each, strategy in zip(optimizers, strategies, strict=True):
                each._distribution_strategy = strategy


def variables_of_optimizer(optimizer: Any) -> list[keras.Variable]:
    """All variables of an optimizer, and of those within it.

    Keras does not list the product of `Nadam` within a `LossScaleOptimizer`.
    """
    found = {}
    for each in _with_inner(optimizer):
        attributes = [value for value in vars(each).values() if isinstance(value, keras.Variable)]
        for variable in (*each.variables, *attributes):
            found[id(variable)] = variable
    return list(found.values())


def _with_inner(optimizer: Any) -> list[Any]:
    """An optimizer, and those of a `MultiOptimizer` and within a `LossScaleOptimizer`."""
    inner = [optimizer.inner_optimizer] if hasattr(optimizer, "inner_optimizer") else []
    return [optimizer, *getattr(optimizer, "optimizers", []), *inner]


def _seeds_of(optimizers: Iterable[Any]) -> list[keras.Variable]:
    """The states of the generators from which optimizers may draw: their own, and Keras's global one."""
    generators = [value for each in optimizers for value in vars(each).values()]
    generators.append(get_global_attribute(GLOBAL_SEED_GENERATOR))
    return [each.state for each in generators if isinstance(each, keras.random.SeedGenerator)]


@contextlib.contextmanager
def each_row_once(optimizer: Any, dense: bool) -> Iterator[None]:
    """While it lasts, the optimizer is given each row of a table once, or all: Keras's square rows one by one."""

    def once(gradient):
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        return tf.convert_to_tensor(gradient) if dense else unique_rows(gradient)

    def apply_gradients(pairs):
        return type(optimizer).apply_gradients(optimizer, [(once(gradient), variable) for gradient, variable in pairs])

    if optimizer is not None:
        vars(optimizer)["apply_gradients"] = apply_gradients  # assigned as usual, it would be tracked
    try:
        yield
    finally:
        if optimizer is not None:
            del vars(optimizer)["apply_gradients"]
