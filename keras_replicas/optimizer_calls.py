# SPDX-License-Identifier: Apache-2.0
"""The optimizers that a custom step calls, wherever it keeps them: their calls go through a function of ours."""

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

METHODS = ("apply", "apply_gradients")


class _Thread(threading.local):
    """What this thread's calls go through: a function of (optimizer, gradients, variables)."""

    handler: Callable | None = None


_thread = _Thread()


def all_optimizers() -> list[keras.Optimizer]:
    """All optimizers of this process. A step may keep its own in a list, in a closure, in a module."""
    # An instance refers to its class. Not isinstance, which would ask a referrer for its `__class__`, and load modules
    # that load lazily.
    referrers = gc.get_referrers(*_with_subclasses(keras.Optimizer))
    return [each for each in referrers if issubclass(type(each), keras.Optimizer)]


def _with_subclasses(of: type) -> list[type]:
    subclasses: list[type] = of.__subclasses__()
    found = [of]
    for subclass in subclasses:
        found += _with_subclasses(subclass)
    return found


@contextlib.contextmanager
def calls_replaceable(optimizers: Iterable[keras.Optimizer]) -> Iterator[None]:
    """Context in which `applied_by` has an effect on these optimizers, in any thread; no class is changed."""
    optimizers = [each for each in optimizers if METHODS[0] not in vars(each)]
    for optimizer in optimizers:
        for method in METHODS:  # assigned as usual, they would be tracked
            vars(optimizer)[method] = functools.partial(_call, optimizer, method)
    try:
        yield
    finally:
        for optimizer in optimizers:
            for method in METHODS:
                vars(optimizer).pop(method, None)


@contextlib.contextmanager
def applied_by(handler: Callable | None) -> Iterator[None]:
    """Context in which this thread's outermost calls of optimizers go to a function; None for the optimizers' own."""
    before, _thread.handler = _thread.handler, handler
    try:
        yield
    finally:
        _thread.handler = before


@tf.autograph.experimental.do_not_convert
def _call(optimizer, method, *positional, **options):
    handler = _thread.handler
    if handler is None:
        return getattr(type(optimizer), method)(optimizer, *positional, **options)
    pairs = _pairs(optimizer, method, *positional, **options)
    gradients = [gradient for gradient, _ in pairs]
    variables = [variable for _, variable in pairs]
    with applied_by(None):  # an optimizer may call another, or `apply` of its base class
        handler(optimizer, gradients, variables)
    return optimizer.iterations


def _pairs(optimizer, method, *positional, **options) -> list[tuple]:
    """The gradients and variables of a call."""
    if method == "apply_gradients":
        (pairs,) = (*positional, *options.values())
        return list(pairs)
    gradients, variables = _arguments_of_apply(*positional, **options)
    if variables is None and not optimizer.built:
        raise ValueError(f"{optimizer.name}.apply needs trainable_variables: it is not built yet")
    return list(zip(gradients, optimizer._trainable_variables if variables is None else variables, strict=True))


def _arguments_of_apply(grads, trainable_variables=None):
    return grads, trainable_variables
