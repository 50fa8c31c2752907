import keras
import numpy as np
import pytest
import tensorflow as tf

from common.training import CrossEntropy


def examples(shape, scale):
    draw = np.random.default_rng(0)
    logits = tf.constant(scale * draw.normal(size=(*shape, 50)), tf.float32)
    return logits, tf.constant(draw.integers(0, 50, shape), tf.int32), tf.constant(draw.random(shape), tf.float32)


def loss_and_gradient(loss, logits, labels, weights):
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(labels, logits, sample_weight=weights)
    return value, tape.gradient(value, logits)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])  # exp(1e4) is more than a float can hold
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_it_is_the_cross_entropy_of_keras(shape, scale, jit):
    keras_own = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    data = examples(shape, scale)
    expected, ours = (
        tf.function(lambda *data, loss=loss: loss_and_gradient(loss, *data), jit_compile=jit)(*data)
        for loss in (keras_own, CrossEntropy("sum"))
    )
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("labels", [0, 3])
def test_with_many_classes_it_is_near_what_float64_gives(labels):
    draw, classes = np.random.default_rng(0), 100_000
    logits = tf.constant(draw.normal(size=(2, labels, classes)) * 3, tf.float32)
    data = tf.constant(draw.integers(0, classes, (2, labels)), tf.int32), tf.ones([2, labels])
    found = loss_and_gradient(CrossEntropy("sum"), logits, *data)
    expected = loss_and_gradient(CrossEntropy("sum", dtype="float64"), tf.cast(logits, tf.float64), *data)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-7)
    np.testing.assert_allclose(found[1], expected[1], atol=5e-7)


def test_it_is_taken_of_bfloat16_in_float32():
    logits, labels, weights = examples((3, 5), 3.0)
    halves = tf.cast(logits, tf.bfloat16)
    value, gradient = loss_and_gradient(CrossEntropy("sum"), halves, labels, weights)
    expected = loss_and_gradient(CrossEntropy("sum"), tf.cast(halves, tf.float32), labels, weights)
    assert value.dtype == tf.float32 and gradient.dtype == tf.bfloat16
    np.testing.assert_array_equal(value, expected[0])
    np.testing.assert_array_equal(gradient, tf.cast(expected[1], tf.bfloat16))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_it_is_reduced_as_keras_reduces(reduction):
    logits, labels, weights = examples((3, 5), 1.0)
    keras_own = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    ours = CrossEntropy.from_config(CrossEntropy(reduction).get_config())
    expected = keras_own(labels, logits, sample_weight=weights)
    assert float(ours(labels, logits, sample_weight=weights)) == pytest.approx(float(expected), rel=1e-6)
