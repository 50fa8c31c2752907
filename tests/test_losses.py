import keras
import numpy as np
import pytest
import tensorflow as tf

from common.training.explicit_step import batch_sums
from common.training.losses import MANY, CrossEntropy, LabelAccuracy, cross_entropy


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
        for loss in (keras_own, CrossEntropy())
    )
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("labels", [0, 3])
def test_with_many_classes_it_is_near_what_float64_gives(labels):
    draw, classes = np.random.default_rng(0), 100_000
    logits = tf.constant(draw.normal(size=(2, labels, classes)) * 3, tf.float32)
    data = tf.constant(draw.integers(0, classes, (2, labels)), tf.int32), tf.ones([2, labels])
    found = loss_and_gradient(CrossEntropy(), logits, *data)
    expected = loss_and_gradient(CrossEntropy(dtype="float64"), tf.cast(logits, tf.float64), *data)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-7)
    np.testing.assert_allclose(found[1], expected[1], atol=5e-7)


@pytest.mark.parametrize("classes", [MANY - 1, MANY])
def test_xla_compiles_it_for_many_classes(classes):
    specs = tf.TensorSpec([2, classes]), tf.TensorSpec([2], tf.int32)
    operations = tf.function(cross_entropy).get_concrete_function(*specs).graph.get_operations()
    assert any("_XlaMustCompile" in each.node_def.attr for each in operations) == (classes == MANY)


def test_it_is_taken_of_bfloat16_in_float32():
    logits, labels, weights = examples((3, 5), 3.0)
    halves = tf.cast(logits, tf.bfloat16)
    value, gradient = loss_and_gradient(CrossEntropy(), halves, labels, weights)
    expected = loss_and_gradient(CrossEntropy(), tf.cast(halves, tf.float32), labels, weights)
    assert value.dtype == tf.float32 and gradient.dtype == tf.bfloat16
    np.testing.assert_array_equal(value, expected[0])
    np.testing.assert_array_equal(gradient, tf.cast(expected[1], tf.bfloat16))


def test_accuracy_counts_labels_that_have_the_highest_logit():
    logits = tf.constant([[[0.0, 2.0, 1.0], [5.0, -1.0, 0.0]], [[1.0, 1.0, 0.0], [0.0, 0.0, 9.0]]])
    labels, weights = tf.constant([[1, 1], [0, 2]]), tf.constant([[1.0, 1.0], [1.0, 0.0]])
    sums = batch_sums({"padding_mask": tf.ones([2, 4])}, labels, weights, logits, tf.constant(0.0))
    assert (sums["accuracy"], sums["labels"], sums["tokens"], sums["slots"]) == (2.0, 3.0, 8.0, 8.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_regression_the_loss_is_a_sum_of_squared_errors_and_there_is_no_accuracy(dtype):
    """As the recipes compile it: labels are [examples], and what the model gives [examples, 1]."""
    draw = np.random.default_rng(0)
    labels, outputs, weights = draw.uniform(0, 5, 6), draw.uniform(0, 5, (6, 1)), np.array([1, 1, 1, 1, 0, 0])
    labels, outputs = tf.constant(labels, tf.float32), tf.cast(outputs, dtype)
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(loss=keras.losses.MeanSquaredError("sum"))
    loss = model.compute_loss(None, labels, outputs, tf.constant(weights, tf.float32))
    expected = np.sum((tf.cast(outputs, tf.float32).numpy()[:4, 0] - labels.numpy()[:4]) ** 2)
    assert loss.dtype == tf.float32 and float(loss) == pytest.approx(expected, rel=1e-6)
    sums = batch_sums({"padding_mask": tf.ones([6, 4])}, labels, tf.constant(weights, tf.float32), outputs, loss)
    assert "accuracy" not in sums and sums["labels"] == 4.0 and sums["loss"] == loss


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_a_label_counts_only_as_the_first_of_the_highest(dtype, jit):
    """A quarter of these labels ties, and argmax says who is right: as the evaluations of Keras and of ours do."""
    draw = np.random.default_rng(0)
    logits = draw.integers(0, 4, (30, 20, 6)) / 2
    labels, weights = draw.integers(0, 6, (30, 20)), draw.random((30, 20))
    right = logits.argmax(axis=-1) == labels
    tied = np.take_along_axis(logits, labels[..., None], -1)[..., 0] == logits.max(axis=-1)
    assert (tied & ~right).mean() > 0.1
    accuracy = tf.function(
        lambda logits: batch_sums(
            {"padding_mask": tf.ones([2, 4])},
            tf.constant(labels),
            tf.constant(weights, tf.float32),
            logits,
            tf.constant(0.0),
        )["accuracy"],
        jit_compile=jit,
    )
    assert float(accuracy(tf.constant(logits, dtype))) == pytest.approx((right * weights).sum(), rel=1e-5)


def test_each_label_counts_alike_however_far_a_batch_is_padded():
    right, wrong = [0.0, 9.0], [9.0, 0.0]
    metric = LabelAccuracy()
    metric.update_state(tf.ones([1, 4], tf.int32), tf.constant([[right, wrong, wrong, wrong]]), tf.ones([1, 4]))
    metric.update_state(tf.ones([1, 2], tf.int32), tf.constant([[right, wrong]]), tf.constant([[1.0, 0.0]]))
    assert metric.result() == 2 / 5


def test_the_accuracy_is_described_by_its_name_and_dtype():
    metric = LabelAccuracy("hits", "float64")
    again = LabelAccuracy.from_config(metric.get_config())
    assert (again.name, again.dtype) == ("hits", "float64")
