"""Scaling, the schedule, the loss and the optimizers."""

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from common import language_model
from common.language_model import matrix_axes, muon
from common.training import Accuracy, CrossEntropy, WarmUpPolynomialDecay, adamw, scale
from tests.conftest import assert_same


@pytest.mark.parametrize(("rule", "rate"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_the_batch_grows_with_the_replicas_and_the_rate_by_a_rule(rule, rate, capsys):
    assert scale(8, 0.1, 4, rule) == (32, pytest.approx(rate))
    told = f"global batch: 8 examples x 4 replica(s) = 32\npeak learning rate: {rate:g}, {rule} scaling of 0.1\n"
    assert capsys.readouterr().out == told
    assert scale(8, 0.1, 1, rule) == (8, 0.1)


def test_one_continuous_curve_from_above_zero_to_the_peak_to_zero():
    schedule = WarmUpPolynomialDecay(peak=0.5, total_steps=100, warmup=0.09)
    rates = np.array([float(schedule(step)) for step in range(101)])
    assert rates[0] == pytest.approx(0.05) and rates.argmax() == 9 and rates[9] == pytest.approx(0.5)
    np.testing.assert_allclose(np.diff(rates[:10]), 0.05, rtol=1e-4)
    np.testing.assert_allclose(np.diff(rates[9:]), -0.5 / 91, rtol=1e-4)
    assert rates[100] == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize(("total_steps", "warmup"), [(1, 0.1), (1, 0.99), (2, 0.5), (3, 0.99)])
def test_the_shortest_run_reaches_the_peak_and_never_zero(total_steps, warmup):
    rates = [float(WarmUpPolynomialDecay(0.5, total_steps, warmup)(step)) for step in range(total_steps)]
    assert max(rates) == pytest.approx(0.5) and min(rates) > 0


def test_the_schedule_survives_saving():
    schedule = WarmUpPolynomialDecay(0.5, 10, 0.3)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert again.get_config() == schedule.get_config() and float(again(7)) == float(schedule(7))


def loss_and_gradient(loss, logits, labels, weights):
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(labels, logits, sample_weight=weights)
    return value, tape.gradient(value, logits)


def examples(shape, scale, classes=50):
    draw = np.random.default_rng(0)
    logits = tf.constant(scale * draw.normal(size=(*shape, classes)), tf.float32)
    return logits, tf.constant(draw.integers(0, classes, shape), tf.int32), tf.constant(draw.random(shape), tf.float32)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])  # exp(1e4) is more than a float can hold
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_the_loss_is_the_cross_entropy_of_keras(shape, scale, jit):
    for reduction in ("sum", "mean_with_sample_weight"):
        theirs = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        ours = CrossEntropy.from_config(CrossEntropy(reduction=reduction).get_config())
        found, expected = (
            tf.function(lambda *data, loss=loss: loss_and_gradient(loss, *data), jit_compile=jit)
            for loss in (ours, theirs)
        )
        logits, labels, weights = examples(shape, scale)
        for data in ((logits, labels, weights), (logits, labels[..., None], weights)):
            for mine, other, rtol in zip(found(*data), expected(*data), (1e-6, 1e-5), strict=True):
                np.testing.assert_allclose(mine, other, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("labels", [0, 3])
def test_with_many_classes_the_loss_is_near_what_float64_gives(labels):
    logits, *data = examples((2, labels), 3, 100_000)
    found = loss_and_gradient(CrossEntropy(reduction="sum"), logits, *data)
    expected = loss_and_gradient(CrossEntropy(reduction="sum", dtype="float64"), tf.cast(logits, tf.float64), *data)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-7)
    np.testing.assert_allclose(found[1], expected[1], atol=5e-7)


def test_the_loss_is_taken_of_bfloat16_in_float32():
    logits, *data = examples((3, 5), 3.0)
    halves = tf.cast(logits, tf.bfloat16)
    value, gradient = loss_and_gradient(CrossEntropy(reduction="sum"), halves, *data)
    expected = loss_and_gradient(CrossEntropy(reduction="sum"), tf.cast(halves, tf.float32), *data)
    assert value.dtype == tf.float32 and gradient.dtype == tf.bfloat16
    np.testing.assert_array_equal(value, expected[0])
    np.testing.assert_array_equal(gradient, tf.cast(expected[1], tf.bfloat16))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_the_accuracy_is_that_of_keras(shape, jit):
    logits, labels, weights = examples(shape, 1.0, 4)
    found, expected = Accuracy.from_config(Accuracy().get_config()), keras.metrics.SparseCategoricalAccuracy("accuracy")
    for metric, ids in itertools.product((found, expected), (labels, labels[..., None])):
        tf.function(metric.update_state, jit_compile=jit)(ids, logits, weights)
    assert found.name == expected.name and float(found.result()) == pytest.approx(float(expected.result()), rel=1e-6)


def test_the_accuracy_of_many_classes_is_right_in_bfloat16():
    accuracy = Accuracy()
    accuracy.update_state(tf.range(1000), tf.one_hot(tf.range(1, 1001), 1001, dtype=tf.bfloat16))
    assert float(accuracy.result()) == 0.0  # 0.49 by Keras


def stepped(optimizer, values, name="kernel", layer="attention"):
    """What an optimizer makes of variables in three steps by gradients that depend on place and step."""
    with keras.name_scope(layer):
        variables = [keras.Variable(value, name=name) for value in values]
    optimizer.build(variables)
    for step in range(3):
        optimizer.apply([tf.sin(value * 7 + 0.3 + step) for value in values], variables)
    return [np.array(variable) for variable in variables]


def numbers(shape):
    return np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(("name", "decay"), [("kernel", 0.3), ("bias", 0.0), ("gamma", 0.0), ("beta", 0.0)])
def test_adamw_is_that_of_keras_and_weight_decay_spares_biases_and_norms(name, decay):
    schedule, values = keras.optimizers.schedules.PolynomialDecay(0.1, 5), [numbers((3, 2)), numbers((2,))]
    theirs = keras.optimizers.AdamW(schedule, weight_decay=decay, beta_2=0.98, epsilon=1e-6)
    assert_same(stepped(adamw(schedule, 0.3), values, name), stepped(theirs, values), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("limit", [2**23, 50, 1])
def test_muon_takes_dense_kernels_as_kerass_does_in_stacks_of_any_size(limit, monkeypatch):
    monkeypatch.setattr(language_model, "STACK", limit)
    values = [numbers(shape) * (i + 1) for i, shape in enumerate([(4, 12), (12, 4), (4, 12), (5, 3), (4, 12)])]
    theirs = stepped(keras.optimizers.Muon(0.01, weight_decay=0.1), values)
    assert_same(stepped(muon(0.01, 0.1, clip_norm=None), values), theirs, rtol=1e-6, atol=1e-7)


# The kernel's shape as KerasHub has it, and the axis of its heads: a query's, an output's, Gemma's query's, one of a
# single head, and one of as many heads as each has columns.
KERNELS = [((6, 2, 3), 1), ((2, 3, 6), 0), ((2, 6, 3), 0), ((6, 1, 6), 1), ((9, 3, 3), 1)]


@pytest.mark.parametrize(("shape", "heads"), KERNELS, ids=str)
def test_muon_takes_each_head_as_a_matrix_of_its_own(shape, heads):
    kernel = numbers(shape)
    (ours,) = stepped(muon(0.01, 0.1, clip_norm=None), [kernel])
    theirs = stepped(keras.optimizers.Muon(0.01, weight_decay=0.1), [*np.moveaxis(kernel, heads, 0)])
    np.testing.assert_allclose(np.moveaxis(ours, heads, 0), theirs, rtol=1e-6, atol=1e-7)


def test_muon_takes_each_place_of_a_convolution_as_a_matrix():
    shapes = [(3, 3, 16, 8), (7, 7, 3, 64), (5, 8, 16)]
    assert [*map(matrix_axes, shapes)] == [[0, 1, 3, 2], [0, 1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize(
    ("shape", "name", "layer"),
    [
        ((5, 4), "embeddings", "token_embedding"),
        ((2, 3), "bias", "query"),
        ((4,), "gamma", "norm"),
        ((4, 2), "kernel", "logits"),
        ((4, 4), "kernel", "mlm_head"),
    ],
)
def test_muon_leaves_all_but_the_kernels_of_hidden_layers_to_adamw(shape, name, layer):
    (ours,) = stepped(muon(0.01, 0.1, clip_norm=None), [numbers(shape)], name, layer)
    # 0.4 of Muon's rate, which leaves the decay as it is.
    (theirs,) = stepped(adamw(0.004, 0.25), [numbers(shape)], name, layer)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_muons_iterations_are_in_bfloat16_where_layers_compute_in_it():
    values = [np.random.default_rng(0).normal(size=(16, 48)).astype(np.float32)]
    found = [stepped(muon(0.01, 0.0, clip_norm=None), values)[0]]
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        optimizer = muon(0.01, 0.0, clip_norm=None)
    finally:
        keras.config.set_dtype_policy(policy)
    found += stepped(optimizer, values)  # where the policy is another one, as in a replica's thread
    steps = [weights - values[0] for weights in found]
    difference = np.linalg.norm(steps[1] - steps[0]) / np.linalg.norm(steps[0])
    assert 1e-3 < difference < 0.1


def test_muon_takes_a_gradient_that_is_clipped():
    def moved(**options):
        biases = [keras.Variable(np.zeros(2, np.float32), name="bias") for _ in range(2)]
        optimizer = muon(0.1, **options)
        optimizer.build(biases)
        for factor in (1.0, 30.0):
            optimizer.apply([tf.ones(2) * 0.2 * factor, tf.ones(2) * factor], biases)
        return np.array(biases[0])

    # Clipped together, both gradients are the same, and AdamW goes as far in each step: 0.4 times the rate.
    assert moved() == pytest.approx([-0.08, -0.08], rel=1e-3) and abs(moved(clip_norm=None) + 0.08).min() > 0.005
