# SPDX-License-Identifier: Apache-2.0
"""Random draws of a custom step: TensorFlow's functions with a state, which no run could repeat after a kill."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

# By the name in `tf.random`, the options that follow the shape, in their order.
STATEFUL = {
    "normal": ("mean", "stddev", "dtype", "seed", "name"),
    "truncated_normal": ("mean", "stddev", "dtype", "seed", "name"),
    "uniform": ("minval", "maxval", "dtype", "seed", "name"),
}
STATELESS = ("stateless_normal", "stateless_truncated_normal", "stateless_uniform")
SHUFFLES = ((keras.random, "shuffle"), (tf.random, "shuffle"), (tf.random.experimental, "stateless_shuffle"))


class _Thread(threading.local):
    """Who draws for this thread: functions of (stateless function, shape, given seed, options); None: TensorFlow."""

    stateful: Callable | None = None
    stateless: Callable | None = None
    is_trial = False


_thread = _Thread()
_lock = threading.Lock()
_originals: list[tuple[Any, str, Callable]] = []
_users = 0


@contextlib.contextmanager
def draws_replaceable() -> Iterator[None]:
    """Context in which `drawn_by` has an effect, in any thread; other threads' draws stay TensorFlow's."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _replace()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _put_back()


@contextlib.contextmanager
def drawn_by(stateful: Callable | None, stateless: Callable | None = None, *, is_trial: bool = False) -> Iterator[None]:
    """Context in which this thread's random numbers come from given functions.

    Args:
        stateful: in place of `tf.random.normal`, `truncated_normal` and `uniform`, a function of (the stateless
            function of the same distribution, the shape, the seed that the caller gave or None, other options).
        stateless: the same in place of `tf.random.stateless_normal` and the like.
        is_trial: whether dropout drops nothing, and a shuffle reverses the order: it makes an example's results depend
            on the others, as a shuffle may, and always in the same way.
    """
    before = _thread.stateful, _thread.stateless, _thread.is_trial
    _thread.stateful, _thread.stateless, _thread.is_trial = stateful, stateless, is_trial
    try:
        yield
    finally:
        _thread.stateful, _thread.stateless, _thread.is_trial = before


def draw_for_each_example(function: Callable, shape: Any, seed: Any, **options: Any) -> tf.Tensor:
    """Draws the same fixed numbers for every example: `shape` is [examples, ...] or a scalar's."""
    shape = tf.convert_to_tensor(shape, tf.int32)
    if shape.shape[0] == 0:
        return function(shape=shape, seed=(1, 2), **options)
    return tf.broadcast_to(function(shape=shape[1:], seed=(1, 2), **options), shape)


def _replace() -> None:
    """Puts our functions in the place of TensorFlow's own."""
    for name, names in STATEFUL.items():
        _replace_one(tf.random, name, functools.partial(_stateful, getattr(tf.random, f"stateless_{name}"), names))
    for name in STATELESS:
        _replace_one(tf.random, name, _stateless)
    for module, name in SHUFFLES:
        _replace_one(module, name, _shuffle)
    _replace_one(tf.nn, "dropout", _dropout)
    _replace_one(tf.nn.experimental, "stateless_dropout", _dropout)


def _replace_one(module: Any, name: str, make: Callable) -> None:
    original = getattr(module, name)
    if not str(getattr(original, "__module__", "")).startswith(("tensorflow.", "keras.")):
        return  # somebody else has replaced it, as a test that holds its draws
    _originals.append((module, name, original))
    setattr(module, name, functools.wraps(original)(functools.partial(make, original)))


def _put_back() -> None:
    while _originals:
        setattr(*_originals.pop())


def _stateful(stateless, names, original, shape, *positional, **options):
    if _thread.stateful is None:
        return original(shape, *positional, **options)
    options |= dict(zip(names, positional, strict=False))
    seed = options.pop("seed", None)
    return _thread.stateful(stateless, shape, seed, **options)


def _stateless(original, shape, seed, *positional, **options):
    if _thread.stateless is None or positional:
        return original(shape, seed, *positional, **options)
    return _thread.stateless(original, shape, seed, **options)


def _dropout(original, x, *positional, **options):
    return x if _thread.is_trial else original(x, *positional, **options)


def _shuffle(original, x, *positional, **options):
    shuffle = functools.partial(reversed_shuffle, original) if _thread.is_trial else original
    return shuffle(x, *positional, **options)


def reversed_shuffle(original: Callable, x: Any, axis: Any = 0, *_: Any, **__: Any) -> tf.Tensor:
    """In place of one of `SHUFFLES`: the elements along the axis, in reversed order.

    Args:
        original: the function that shuffles; only Keras's takes an axis.
        x: what is shuffled.
        axis: of Keras's.
    """
    is_keras = original.__module__.startswith("keras.")
    return tf.reverse(tf.convert_to_tensor(x), [axis if is_keras else 0])
