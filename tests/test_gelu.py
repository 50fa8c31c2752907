# SPDX-License-Identifier: Apache-2.0
"""GELU in one pass: what Keras's is, in its value and gradient, and in a step's forward pass alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.training import gelu
from common.training.data_parallel import data_parallel


def value_and_gradient(function, x, upstream):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y, tape.gradient(y, x, upstream)


@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-14), ("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("examples", [0, 7])
def test_it_is_keras_gelu(approximate, dtype, error, examples):
    numbers = np.random.default_rng(0).normal(size=(2, examples, 9)) * 2
    x, upstream = tf.cast(numbers[0], dtype), tf.cast(numbers[1], dtype)
    found = value_and_gradient(lambda x: gelu.fused_gelu(x, approximate), x, upstream)
    exact = [tf.cast(each, "float64") for each in (x, upstream)]
    expected = value_and_gradient(lambda x: keras.activations.gelu(x, approximate=approximate), *exact)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(tf.cast(one, "float64"), other, rtol=error, atol=error)


def passes():
    """Times that the one pass was traced."""
    return gelu._value.experimental_get_tracing_count()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_it_is_in_a_step_that_is_not_compiled_and_nowhere_else(jit_compile):
    activation = keras.layers.Dense(11, activation="gelu")  # of a width that no other test has
    model = data_parallel(keras.Sequential)([activation, keras.layers.Dense(1)])
    x, before = np.ones((4, 3), np.float32), passes()
    model.compile("sgd", "mse", jit_compile=jit_compile)
    model.fit(x, np.ones((4, 1), np.float32), verbose=0)
    in_fit = passes()
    assert (in_fit > before) != jit_compile
    model(x), tf.function(model)(x)
    assert passes() == in_fit
    assert activation.get_config()["activation"] == "gelu"
