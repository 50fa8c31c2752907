# SPDX-License-Identifier: Apache-2.0
"""GELU in one pass: what Keras's is, in its value and gradient, and in a step's forward pass alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.training import fused
from keras_replicas.model import data_parallel


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
    found = value_and_gradient(lambda x: fused.fused_gelu(x, approximate), x, upstream)
    exact = [tf.cast(each, "float64") for each in (x, upstream)]
    expected = value_and_gradient(lambda x: keras.activations.gelu(x, approximate=approximate), *exact)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(tf.cast(one, "float64"), other, rtol=error, atol=error)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_it_is_in_a_step_that_is_not_compiled_and_nowhere_else(jit_compile, monkeypatch):
    seen, fused_gelu = [], fused.fused_gelu
    monkeypatch.setattr(fused, "fused_gelu", lambda *arguments: seen.append(1) or fused_gelu(*arguments))
    activation = keras.layers.Dense(11, activation="gelu")
    model = data_parallel(keras.Sequential)([activation, keras.layers.Dense(1)])
    x = np.ones((4, 3), np.float32)
    model.compile("sgd", "mse", jit_compile=jit_compile)
    model.fit(x, np.ones((4, 1), np.float32), verbose=0)
    assert len(seen) == (not jit_compile)
    model(x), tf.function(model)(x)
    assert len(seen) == (not jit_compile)
    assert activation.get_config()["activation"] == "gelu"


def test_xla_compiles_what_is_large_where_no_gpu_is_seen(monkeypatch):
    compiled = []
    double = fused.fuse(3)(lambda x: compiled.append(tf.inside_function()) or x + x)

    def check(size, expected):
        np.testing.assert_array_equal(double(tf.ones([2, size])), 2 * np.ones((2, size)))
        assert compiled.pop() == expected

    check(3, expected=True)
    check(2, expected=False)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    check(4, expected=False)
