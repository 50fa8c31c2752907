# SPDX-License-Identifier: Apache-2.0
"""GELU in one pass and dropout by 16 bits: what Keras's are, and only in models of ours that are compiled."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.training import fused
from common.training.fused import Dropout
from tests.test_data_parallel import make_model


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


def dropped(layer, shape, dtype=tf.float32, jit=False):
    @tf.function(jit_compile=jit)
    def run():
        ones = tf.ones(shape, dtype)
        with tf.GradientTape() as tape:
            tape.watch(ones)
            result = layer(ones, training=True)
        return result, tape.gradient(result, ones)

    return run()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.99])
def test_it_drops_the_rate_and_keeps_the_mean(rate, jit):
    result, gradient = dropped(Dropout(rate, seed=1), [100, 999], jit=jit)
    stays = np.asarray(result) > 0
    assert stays.mean() == pytest.approx(1 - rate, abs=4 * np.sqrt(rate * (1 - rate) / stays.size))
    np.testing.assert_allclose(np.asarray(result)[stays], 1 / (1 - rate), rtol=1e-3)
    np.testing.assert_array_equal(gradient, result)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16])
@pytest.mark.parametrize("rate", [0.99998, 0.999995, 1.0])
def test_a_rate_that_drops_nearly_all_gives_finite_numbers(rate, dtype):
    result, _ = dropped(Dropout(rate, seed=1), [1000, 999], dtype)
    result = np.asarray(result)
    assert np.isfinite(result).all() and 0 < np.count_nonzero(result) < 100


def test_units_are_dropped_by_themselves():
    draws = [np.asarray(dropped(Dropout(0.5, seed=seed), [100_000])[0]) > 0 for seed in (1, 2)]
    for distance in (1, 2, 3, 4, 8, 64):
        assert abs(np.corrcoef(draws[0][:-distance], draws[0][distance:])[0, 1]) < 0.015
    assert abs(np.corrcoef(*draws)[0, 1]) < 0.015


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_it_keeps_the_format(dtype):
    result, gradient = dropped(Dropout(0.25, seed=1, dtype=dtype.name), [7, 3], dtype)
    assert result.dtype == gradient.dtype == dtype


def test_out_of_training_nothing_is_dropped():
    ones = tf.ones([50])
    np.testing.assert_array_equal(Dropout(0.5)(ones, training=False), ones)
    np.testing.assert_array_equal(Dropout(0.0)(ones, training=True), ones)


def test_a_compiled_model_has_it_and_is_described_as_before():
    """KerasHub's BERT has the tanh form of GELU; Keras's own, by default, the exact one."""
    model = make_model(1, dropout=0.1)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dropout)]
    assert layers and all(layer.call.func is Dropout.call for layer in layers)
    (block,) = model.backbone.transformer_layers
    assert block._feedforward_intermediate_dense.activation is fused.fused_gelu
    assert "common" not in str(model.get_config())
    dense = keras.layers.Dense(3, activation="gelu")
    fused.make_fast(keras.Sequential([keras.Input([2]), dense]))
    x = tf.constant([-1.0, 0.5])
    np.testing.assert_allclose(dense.activation(x), keras.activations.gelu(x), rtol=1e-5)
