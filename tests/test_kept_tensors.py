"""What `call` keeps of one replica's examples, and a loss or metric reads: refused by name."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_replicas import UserError, data_parallel, make_strategy
from keras_replicas.private import ACTIVITIES_ADD_UP
from tests.conftest import assert_same, slow

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(11, 3)).astype("float32")
Y = RANDOM.normal(size=(11, 1)).astype("float32")
OUTSIDE = {}


class Inner(layers.Layer):
    def __init__(self):
        super().__init__(name="inner")
        self.dense = layers.Dense(4)

    def call(self, x):
        hidden = self.dense(x)
        self.energy = ops.mean(ops.square(hidden))
        OUTSIDE["energy"] = self.energy
        return hidden


class Keeping(keras.Model):
    """Keeps a value of its hidden layer in several places."""

    def __init__(self, read):
        super().__init__(name="keeping")
        self.inner, self.last, self.read = Inner(), layers.Dense(1), read
        self.by_name, self.listed = {"energy": None}, [None]

    def call(self, x):
        hidden = self.inner(x)
        self.energy = self.inner.energy
        self.by_name["energy"] = self.inner.energy
        self.listed[0] = self.inner.energy
        return self.last(hidden)


class InLoss(Keeping):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.5 * self.read(self)


class InMetrics(Keeping):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"energy": self.read(self)}


PLACES = {
    "an attribute": (lambda model: model.energy, "energy"),
    "a layer": (lambda model: model.inner.energy, "energy"),
    "a dict": (lambda model: model.by_name["energy"], "energy"),
    "a list": (lambda model: model.listed[0], "energy"),
    "a closure": (lambda model: OUTSIDE["energy"], "energy"),
    "computed from it": (lambda model: ops.sqrt(1.0 + 2.0 * model.inner.energy), "energy"),
}


def fit(make, **compiled):
    with make_strategy(2).scope():
        model = data_parallel(make())
        model.compile("sgd", **{"loss": "mse"} | compiled)
    return model.fit(X, Y, batch_size=4, verbose=0)


def refused(make, name, what, **compiled):
    with pytest.raises(UserError) as found:
        fit(make, **compiled)
    text = str(found.value)
    assert text.startswith("call keeps ") and name in text and f"but {what} is about those of all" in text
    assert "\n" not in text


@pytest.mark.parametrize("place", ["a layer", *slow(*(place for place in PLACES if place != "a layer"))])
def test_in_compute_loss(place):
    read, name = PLACES[place]
    refused(lambda: InLoss(read), name, "the loss")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_in_compute_metrics(place):
    read, name = PLACES[place]
    refused(lambda: InMetrics(read), name, "a metric")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_in_functions(place):
    read, name = PLACES[place]
    model = []

    def make():
        model[:] = [Keeping(read)]
        return model[0]

    refused(make, name, "the loss", loss=lambda y, p: ops.mean(ops.square(y - p), -1) + read(model[0]))
    refused(make, name, "a metric", metrics=[lambda y, p: read(model[0]) + 0.0 * ops.mean(p)])


class KeepsUnread(Keeping):
    """Its own loss reads nothing that was kept."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2.0 * super().compute_loss(x, y, y_pred, sample_weight)


class Tuned(keras.Model):
    """Its own loss reads weights, x, and what layers add."""

    def __init__(self, read=None):
        super().__init__()
        activity = None if ACTIVITIES_ADD_UP else "l2"  # Keras 3.13's is refused
        self.dense = layers.Dense(1, activity_regularizer=activity, kernel_regularizer="l2")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        loss += ops.mean(ops.square(x)) / ops.cast(ops.shape(x)[0], "float32")
        return loss + ops.sum(ops.square(self.dense.kernel)) + ops.mean(ops.square(y_pred)) * ops.mean(y)


@pytest.mark.parametrize("kind", [Tuned, *slow(KeepsUnread)])
def test_what_is_not_read_or_not_of_examples_is_right(kind):
    def train(wrap):
        keras.utils.set_random_seed(0)
        model = wrap(kind(lambda model: 0.0))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[lambda y, p: ops.mean(y * p)])
        history = model.fit(X, Y, 4, 2, shuffle=False, verbose=0).history
        return [*history.values(), *model.get_weights()]

    plain = train(lambda model: model)
    with make_strategy(2).scope():
        assert_same(train(data_parallel), plain, rtol=1e-5, atol=1e-6)
