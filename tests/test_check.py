"""`check`, on models with a fault each, and on models that are right though much about them is hard to compare."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from benchmarks.features import State
from keras_replicas import UserError, check, data_parallel
from keras_replicas.__main__ import main
from tests.conftest import ROOT, on_replicas

EXAMPLES = 13
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, 4)).astype("float32")
Y = RANDOM.integers(0, 3, EXAMPLES)
IDS = RANDOM.integers(1, 9, (EXAMPLES, 6)) * (np.arange(6) < RANDOM.integers(2, 7, (EXAMPLES, 1)))
SMALL = {"steps": 4, "batch_size": 4}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(*hidden, shape=(4,), optimizer="adam", **options):
    """What makes a model of these layers, the optimizer, which is compiled."""

    def build():
        model = keras.Sequential([keras.Input(shape), *(make() for make in hidden), layers.Dense(3)])
        model.compile(optimizer if isinstance(optimizer, str) else optimizer(), LOSS, **options)
        return model

    return build


def count(state, x, training):
    if training:
        state.assign_add(ops.cast(ops.shape(x)[0], state.dtype))


def counter():
    return State(count, "mean", None, 0.0)


def undeclared():
    return State(count, "none")


class Centre(layers.Layer):
    """By so little that the loss changes by about 1e-5."""

    def call(self, x, training=False):
        return x - 1e-4 * ops.mean(x, axis=0, keepdims=True)


class CentreInTraining(Centre):
    def call(self, x, training=False):
        return super().call(x) if training else x


class ToLongest(layers.Layer):
    """A mean over as many places as the longest example of the batch has."""

    def call(self, ids):
        longest = ops.max(ops.sum(ops.cast(ids > 0, "int32"), axis=1))
        return ops.mean(ops.one_hot(ids, 9, dtype=self.compute_dtype)[:, :longest], axis=1)


class Own(keras.Model):
    """A `train_step` of its own: its loss is a mean, divided by the replicas as Keras's is or not, or a sum."""

    def __init__(self, loss):
        super().__init__()
        self.dense, self.kind = layers.Dense(3), loss

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            loss = ops.sum(losses) if self.kind == "sum" else ops.mean(losses)
            if self.kind == "divided":
                loss /= self.distribute_strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, self.trainable_weights)
        if self.kind == "clipped":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.01)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def own(kind):
    def build():
        model = Own(kind)
        model.compile("sgd", LOSS)
        return model

    return build


SLOW = pytest.mark.slow


def fault(name, build, first, why, x=X, marks=()):
    return pytest.param(build, x, first, why, id=name, marks=marks)


FAULTS = [
    fault("clipped", own("clipped"), "weight own", "train_step: sgd gets neither a mean nor a sum over examples"),
    fault("counter", model_of(counter), "layer state", "after step 1, by 5e-01: 4 on one"),
    fault("centred", model_of(Centre), "training loss after step 1", "the outputs of the layer centre"),
    fault(
        "in training",
        model_of(CentreInTraining),
        "training loss after step 1",
        "the layer centre_in_training",
        marks=SLOW,
    ),
    fault("longest", model_of(ToLongest, shape=(6,)), "training loss", "the layer to_longest", IDS, marks=SLOW),
]


@pytest.mark.parametrize(("build", "x", "first", "why"), FAULTS)
def test_a_fault_is_found_and_named(build, x, first, why):
    found = check(build, x, Y, **SMALL)
    assert not found and f"DIFFERENT, first the {first}" in repr(found) and why in found.text


@pytest.mark.parametrize("kind", ["mean", "divided", pytest.param("sum", marks=SLOW)])
def test_custom_steps_that_are_means_or_sums_pass(kind):
    assert check(own(kind), X, Y, **SMALL)


def attention(normalized=True):
    """Gradients that are only rounding, of the biases of keys; noise; and tokens in several places, under Adam."""
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8)(ids)
    x = layers.Dropout(0.3)(x + layers.MultiHeadAttention(2, 4, dropout=0.3)(x, x))
    x = layers.GaussianNoise(0.3)(x)
    x = layers.BatchNormalization()(x) if normalized else x
    model = keras.Model(ids, layers.Dense(3)(layers.Flatten()(x)))
    model.compile("adam", LOSS, metrics=["accuracy"])
    return model


def single():
    """In float32, whatever Keras is told before."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    return attention(normalized=False)


def of_two():
    first, second = keras.Input((4,), name="a"), keras.Input((6,), name="b")
    joined = layers.Concatenate()([first, second])
    model = keras.Model({"a": first, "b": second}, {"y": layers.Dense(3)(joined), "z": layers.Dense(1)(joined)})
    model.compile("sgd", {"y": LOSS, "z": "mae"}, metrics={"z": ["mse"]})
    return model, {"a": X, "b": IDS}, {"y": Y, "z": X[:, :1]}, {"y": X[:, 1] ** 2, "z": X[:, 2] ** 2}


@pytest.mark.parametrize(
    ("build", "data"),
    [
        pytest.param(attention, (IDS, Y), id="attention"),
        pytest.param(single, (IDS, Y), id="float32", marks=SLOW),
        pytest.param(of_two, (), id="several", marks=SLOW),
        pytest.param(lambda: data_parallel(model_of(layers.BatchNormalization)()), (X, Y), id="of ours", marks=SLOW),
    ],
)
def test_what_is_right_is_the_same(build, data):
    before = keras.config.floatx(), keras.config.dtype_policy(), tf.random.stateless_normal
    found = check(build, *data, **SMALL)
    assert found and "THE SAME to" in str(found), found
    assert before == (keras.config.floatx(), keras.config.dtype_policy(), tf.random.stateless_normal)


class Unsteady(layers.Layer):
    def call(self, x):
        return x + tf.cast(tf.timestamp() % 1, x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (Unsteady, "NOT CHECKED\nwhy: plain Keras's own training loss after step 1 differs from run to run"),
        (undeclared, "add_weight(..., aggregation='sum')"),
    ],
)
def test_what_cannot_be_compared_is_no_success(layer, told):
    found = check(model_of(layer), X, Y, **SMALL)
    assert not found and told in found.text
    assert ("REFUSED\nwhy: sequential" in found.text) == (layer is undeclared)


@pytest.mark.parametrize(
    ("build", "data", "told"),
    [
        (
            model_of(),
            (),
            "give examples as fit takes them: check(build, x, y), or a function that returns (model, x, y)",
        ),
        (model_of(), (X[:0], Y[:0]), "give examples as fit takes them"),
        (lambda: keras.Sequential([layers.Dense(1)]), (X, Y), "must return a compiled model, or (model, x, y)"),
        (lambda: on_replicas(layers.Dense(3)), (X, Y), "must not use a strategy"),
        (model_of(lambda: layers.Dense(2, dtype="mixed_bfloat16")), (X, Y), "bfloat16 are too coarse to compare"),
    ],
    ids=["no data", "no examples", "not compiled", "strategy", "half precision"],
)
def test_what_cannot_be_checked_is_said_in_one_line(build, data, told):
    with pytest.raises(UserError) as raised:
        check(build, *data)
    assert told in str(raised.value) and "\n" not in str(raised.value)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["keras_replicas", "check", *words])
    return main()


@pytest.mark.slow
def test_the_command_line_is_the_same(tmp_path, monkeypatch, capsys):
    file = tmp_path / "train.py"
    file.write_text(
        "from tests.test_check import *\n"
        "def right(): return model_of()(), X, Y\n"
        "def wrong(): return model_of(Centre)(), X, Y\n"
    )
    monkeypatch.syspath_prepend(str(ROOT))
    options = ("--steps", "4", "--batch-size", "4", "--replicas", "2")
    assert run(monkeypatch, f"{file}:right", *options) == 0 and "THE SAME to" in capsys.readouterr().out
    assert (
        run(monkeypatch, f"{file}:wrong", *options) == 1
        and "DIFFERENT, first the training loss" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("nothing.py:f", "there is no file 'nothing.py'"),
        ("{file}:g", "has no function 'g'"),
        ("{file}", "there is no file"),
    ],
)
def test_a_wrong_command_line_is_said_in_one_line(words, told, tmp_path, monkeypatch):
    file = tmp_path / "train.py"
    file.write_text("f = 1\n")
    with pytest.raises(UserError, match=told):
        run(monkeypatch, words.format(file=file))
