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
    """Of this thread: what calls go through, a function of (optimizer, gradients, variables); and all optimizers."""

    handler: Callable | None = None
    listed: list[keras.Optimizer] | None = None


_thread = _Thread()


def all_optimizers() -> list[keras.Optimizer]:
    """All optimizers of this process. A step may keep its own in a list, in a closure, in a module."""
    if _thread.listed is not None:
        return _thread.listed
    # Not isinstance, which would ask each object for its `__class__`, and load modules that load lazily. Nor
    # gc.get_referrers of the classes, which is twice as fast, and has crashed.
    return [each for each in gc.get_objects() if issubclass(type(each), keras.Optimizer)]


@contextlib.contextmanager
def optimizers_listed_once() -> Iterator[None]:
    """Context in which `all_optimizers` looks through all objects only once: there may be a million."""
    before = _thread.listed
    _thread.listed = all_optimizers()
    try:
        yield
    finally:
        _thread.listed = before


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
