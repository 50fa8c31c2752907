"""`check` on right models, each with one fault planted: it finds all of them, and names their causes.

What each row plants is one line of its model. On one device, nothing is wrong with it.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_replicas import check

FEATURES, CLASSES, EXAMPLES = 4, 3, 16
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, FEATURES)).astype("float32")
Y = RANDOM.integers(0, CLASSES, EXAMPLES)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Plant(layers.Layer):
    """Applies a function of (itself, inputs, training)."""

    def __init__(self, function):
        super().__init__(name="planted")
        self.function = function

    def call(self, x, training=None):
        return self.function(self, x, training)


class Remembering(layers.Layer):
    """Keeps a number that a function of (its value, inputs) updates in training."""

    def __init__(self, update, aggregation):
        super().__init__(name="planted")
        self.update, self.aggregation = update, aggregation

    def build(self, shape):
        self.kept = self.add_weight((), initializer="ones", trainable=False, aggregation=self.aggregation, name="kept")

    def call(self, x, training=None):
        if training:
            self.kept.assign(self.update(self.kept.value, x))
        return x


class OwnStep(keras.Model):
    """A custom `train_step`, in which functions make the loss of the losses [examples], and the gradients of those."""

    def __init__(self, loss=ops.mean, gradients=lambda gradients: gradients, inputs=lambda x: x):
        super().__init__(name="own")
        self.dense = layers.Dense(CLASSES)
        self.of_losses, self.of_gradients, self.of_inputs = loss, gradients, inputs

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(self.of_inputs(x), training=True)
            loss = self.of_losses(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))
        gradients = self.of_gradients(tape.gradient(loss, self.trainable_weights))
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def with_layer(make):
    model = keras.Sequential([keras.Input([FEATURES]), layers.Dense(6, activation="tanh"), make(), layers.Dense(3)])
    model.compile("sgd", LOSS)
    return model


def planted(function):
    return lambda: with_layer(lambda: Plant(function))


def remembering(update, aggregation):
    return lambda: with_layer(lambda: Remembering(update, aggregation))


def own_step(**functions):
    def build():
        model = OwnStep(**functions)
        model.compile("sgd", LOSS)
        return model

    return build


def replica_id():
    context = tf.distribute.get_replica_context()
    number = context.replica_id_in_sync_group if context is not None else 0  # while the model is built
    return tf.cast(number, keras.config.floatx())


def adding(loss):
    """A layer that adds a loss of its inputs."""

    def function(layer, x, training):
        layer.add_loss(loss(x))
        return x

    return function


def standardized(layer, x, training):
    return (x - ops.mean(x, axis=0)) / ops.sqrt(ops.var(x, axis=0) + 1e-3)


def rows(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


def stateless_normal(x):
    return tf.random.stateless_normal(tf.shape(x), (1, 2), dtype=x.dtype)


NUMBER, SEED = "reads the number of its replica", "draws random numbers from a constant seed"
OTHERS = "the outputs of the layer planted"
STATE, STEP = "planted/kept does not combine over replicas by its aggregation", "neither the mean nor the sum"
ADDED = "add by add_loss is neither the mean nor the sum over the examples"


class Fault(NamedTuple):
    """A model with a fault, and the cause that `check` is to name."""

    build: Any
    cause: str


FAULTS = {
    # Which replica computes it.
    "outputs that are halved on the second replica": Fault(
        planted(lambda layer, x, _: x * (1 - replica_id() / 2)), NUMBER
    ),
    "a loss that is halved on the second replica": Fault(
        own_step(loss=lambda losses: ops.mean(losses) * (1 - replica_id() / 2)), NUMBER
    ),
    "a gradient that is not summed": Fault(
        planted(lambda layer, x, _: x + replica_id() * (tf.stop_gradient(x) - x)), NUMBER
    ),
    "a row dropped on the second replica": Fault(
        planted(lambda layer, x, _: x * (1 - replica_id() * ops.one_hot(0, ops.shape(x)[0], dtype=x.dtype)[:, None])),
        NUMBER,
    ),
    "an added loss times the number of the replica": Fault(
        planted(adding(lambda x: ops.mean(x**2) * replica_id())), NUMBER
    ),
    "a custom loss divided by the number of the replica": Fault(
        own_step(loss=lambda losses: ops.mean(losses) / (1 + replica_id())), NUMBER
    ),
    # Random draws.
    "noise from a constant seed": Fault(planted(lambda layer, x, _: x + stateless_normal(x)), SEED),
    "noise of Keras's from a constant seed": Fault(
        planted(lambda layer, x, _: x + keras.random.normal(ops.shape(x), dtype=x.dtype, seed=7)), SEED
    ),
    "a mask from a constant seed": Fault(
        planted(lambda layer, x, _: x * tf.round(tf.random.stateless_uniform(tf.shape(x), (3, 4), dtype=x.dtype))), SEED
    ),
    "dropout from a constant seed": Fault(planted(lambda layer, x, _: keras.random.dropout(x, 0.5, seed=3)), SEED),
    "noise of a custom step from a constant seed": Fault(own_step(inputs=lambda x: x + stateless_normal(x)), SEED),
    # The batch.
    "centred by the batch": Fault(planted(lambda layer, x, _: x - ops.mean(x, axis=0)), OTHERS),
    "standardized by the batch": Fault(planted(standardized), OTHERS),
    "softmax over the examples": Fault(planted(lambda layer, x, _: ops.softmax(x, axis=0)), OTHERS),
    "scaled by the batch's largest": Fault(planted(lambda layer, x, _: x / ops.max(ops.abs(x))), OTHERS),
    "summed up over the examples": Fault(planted(lambda layer, x, _: ops.cumsum(x, axis=0)), OTHERS),
    "the row before": Fault(planted(lambda layer, x, _: ops.roll(x, 1, axis=0)), OTHERS),
    "without the last row": Fault(
        planted(lambda layer, x, _: ops.concatenate([x[:-1], ops.zeros_like(x[:1])], axis=0)), OTHERS
    ),
    "attention over the examples": Fault(
        planted(lambda layer, x, _: x + ops.softmax(x @ ops.transpose(x), axis=-1) @ x), OTHERS
    ),
    "divided by the size of the batch": Fault(planted(lambda layer, x, _: x / rows(x)), OTHERS),
    "sorted by a feature": Fault(planted(lambda layer, x, _: ops.sort(x, axis=0)), OTHERS),
    "in training alone": Fault(planted(lambda layer, x, training: x - ops.mean(x, axis=0) if training else x), OTHERS),
    # The state of a layer.
    "a maximum that is averaged": Fault(remembering(lambda kept, x: ops.maximum(kept, 9 * ops.max(x)), "mean"), STATE),
    "a counter that is averaged": Fault(remembering(lambda kept, x: kept + rows(x), "mean"), STATE),
    "an average of the first replica": Fault(
        remembering(lambda kept, x: 0.9 * kept + 0.1 * ops.mean(x), "only_first_replica"), STATE
    ),
    "an average that is summed": Fault(remembering(lambda kept, x: 0.9 * kept + 0.1 * ops.mean(x), "sum"), STATE),
    "a squared mean": Fault(remembering(lambda kept, x: ops.mean(x) ** 2, "mean"), STATE),
    # Custom steps.
    "gradients clipped by the step": Fault(
        own_step(gradients=lambda gradients: tf.clip_by_global_norm(gradients, 0.01)[0]), STEP
    ),
    "the root of a mean": Fault(own_step(loss=lambda losses: ops.sqrt(ops.mean(losses))), STEP),
    "the largest loss alone": Fault(own_step(loss=ops.max), STEP),
    "losses above their mean": Fault(own_step(loss=lambda losses: ops.mean(ops.relu(losses - ops.mean(losses)))), STEP),
    "a wrong divisor": Fault(own_step(loss=lambda losses: ops.sum(losses) / (rows(losses) + 1)), STEP),
    "the sum of gradients' signs": Fault(
        own_step(gradients=lambda gradients: [tf.sign(each) for each in gradients]), STEP
    ),
    # What layers add to the loss.
    "the root of a mean is added": Fault(planted(adding(lambda x: ops.sqrt(ops.mean(x**2)))), ADDED),
    "a variance over the batch is added": Fault(planted(adding(lambda x: ops.mean(ops.var(x, axis=0)))), ADDED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    build, cause = FAULTS[name]
    found = check(build, X, Y, steps=4, batch_size=4)
    assert not found and "\nDIFFERENT, first the " in found.text
    assert cause in found.text
