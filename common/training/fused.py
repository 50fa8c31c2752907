# SPDX-License-Identifier: Apache-2.0
"""Layers and functions in fewer passes over memory on a CPU, where TensorFlow's operations take one each."""

import functools
from collections.abc import Callable

import keras
import keras_hub  # noqa: F401  # registers its activation
import tensorflow as tf


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


class Dropout(keras.layers.Dropout):
    """As Keras's, with 16 random bits for each unit, where Keras draws 32 and converts them to a float.

    The rate is rounded to a multiple of 2^-16, and at most 1 - 2^-15; what stays is divided by the share that stays.
    """

    def call(self, inputs, training=False):
        """Drops units in training; see `keras.layers.Dropout`."""
        dropped = min(round(self.rate * 2**16), 2**16 - 2)  # float16 holds 2^15, but not 2^16
        if not training or not dropped:
            return inputs
        units = tf.size(inputs)
        seed = tf.cast(self.seed_generator.next(), tf.int64)
        words = tf.random.stateless_uniform([(units + 3) // 4], seed, minval=None, maxval=None, dtype=tf.uint64)
        numbers = tf.reshape(tf.reshape(tf.bitcast(words, tf.uint16), [-1])[:units], tf.shape(inputs))
        stays = numbers >= tf.constant(dropped, tf.uint16)
        return inputs * (tf.cast(stays, inputs.dtype) * tf.constant(2**16 / (2**16 - dropped), inputs.dtype))


def make_fast(model: keras.Model) -> None:
    """Makes the layers of a built model compute dropout like `Dropout` here, and GELU by `fused_gelu`.

    KerasHub offers no way to choose them. What is saved of its models does not change.
    """
    gelus = {
        keras.activations.gelu: functools.partial(fused_gelu, approximate=False),
        keras.saving.get_registered_object("keras_hub>gelu_approximate"): fused_gelu,
    }
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.Dropout and layer.noise_shape is None:
            layer.call = functools.partial(Dropout.call, layer)
        if type(layer) in (keras.layers.Dense, keras.layers.EinsumDense) and layer.activation in gelus:
            layer.activation = gelus[layer.activation]
