# SPDX-License-Identifier: Apache-2.0
"""GELU in one pass over memory forward and one back, on a CPU, where TensorFlow takes some ten each, and keeps them."""

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf
from keras.src import backend


class _Fused(threading.local):
    """Whether this thread traces a forward pass with it."""

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
    """GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), compiled by XLA for each shape that it meets.

    It is computed in float32 at least, and its gradient of its input alone, so that nothing else is kept for it.

    Args:
        x: floats of any shape.
        approximate: by tanh, or by the error function.
    """

    @tf.custom_gradient
    def value_with_gradient(x):
        return _value(x, approximate), lambda upstream: _gradient(x, upstream, approximate)

    return value_with_gradient(tf.convert_to_tensor(x))


# One for all layers: each shape is compiled once.
@tf.function(autograph=False, jit_compile=True)
def _value(x, approximate):
    return tf.cast(tf.nn.gelu(_at_least_float32(x), approximate), x.dtype)


@tf.function(autograph=False, jit_compile=True)
def _gradient(x, upstream, approximate):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.gelu(_at_least_float32(x), approximate)
    return tape.gradient(y, x, tf.cast(upstream, y.dtype))


def _at_least_float32(x):
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
