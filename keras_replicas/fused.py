# SPDX-License-Identifier: Apache-2.0
"""Functions that XLA compiles singly, on a CPU: one pass over memory, where TensorFlow's operations take one each."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf
from keras.src import backend


def fuse(least: int = 0) -> Callable[[Callable], Callable]:
    """Decorates a function of tensors so that XLA compiles it, for each shape that it meets, where that pays.

    That is where the first tensor's last axis has at least `least` elements, and no GPU is seen: on a GPU, XLA needs
    more than TensorFlow installs.
    """

    def decorate(function):
        compiled = tf.function(function, autograph=False, jit_compile=True)

        @functools.wraps(function)
        def fused(first, *rest):
            pays = not tf.config.list_logical_devices("GPU") and (not least or (first.shape[-1] or 0) >= least)
            return (compiled if pays else function)(first, *rest)

        return fused

    return decorate


class _Fused(threading.local):
    """Whether this thread traces a forward pass with `fused_gelu`."""

    is_on = False


_fused, _gelu = _Fused(), backend.nn.gelu
backend.nn.gelu = lambda x, approximate=True: (fused_gelu if _fused.is_on else _gelu)(x, approximate)


@contextlib.contextmanager
def fuse_gelu() -> Iterator[None]:
    """While it lasts, `keras.activations.gelu` is `fused_gelu`, where no GPU is seen."""
    _fused.is_on = not tf.config.list_logical_devices("GPU")
    try:
        yield
    finally:
        _fused.is_on = False


def fused_gelu(x, approximate=True) -> tf.Tensor:
    """GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), one pass forward and one back; see `fuse`.

    It is computed in float32 or wider, and its gradient from the input alone, so that nothing else is kept for it.

    Args:
        x: floats of any shape.
        approximate: whether to use tanh instead of the error function.
    """

    @tf.custom_gradient
    def value_with_gradient(x):
        return _value(x, approximate), lambda upstream: _gradient(x, upstream, approximate)

    return value_with_gradient(tf.convert_to_tensor(x))


# Shared by all layers, so that each shape is compiled once.
@fuse()
def _value(x, approximate):
    return tf.cast(tf.nn.gelu(_at_least_float32(x), approximate), x.dtype)


@fuse()
def _gradient(x, upstream, approximate):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.gelu(_at_least_float32(x), approximate)
    return tape.gradient(y, x, tf.cast(upstream, y.dtype))


def _at_least_float32(x):
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
