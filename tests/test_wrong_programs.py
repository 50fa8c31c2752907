"""Programs that are wrong: one sentence if only several replicas make them so, and Keras's own error otherwise."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_replicas import UserError, data_parallel, make_strategy

X = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")
Y = X[:, :1]


def dense():
    return keras.Sequential([keras.Input((3,)), layers.Dense(1)])


class OfTwo(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, first, second):
        return self.dense(first) + second


class OfNames(OfTwo):
    def call(self, x):
        return self.dense(x["features"])


def fit(make, wrap=data_parallel, strategy=None, data=(X, Y)):
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = wrap(make())
        model.compile("sgd", "mse")
    model.fit(*data, batch_size=4, verbose=0)


def wrong_keys():
    inputs = keras.Input((3,))
    return keras.Model(inputs, {"a": layers.Dense(1)(inputs)})


@pytest.mark.parametrize(("make", "data"), [(OfTwo, ((X, Y), Y)), (OfNames, (X, Y)), (wrong_keys, (X, {"b": Y}))])
def test_a_wrong_model_shows_keras_s_own_error(make, data):
    with pytest.raises(Exception) as plain:
        fit(make, lambda model: model, data=data)
    with pytest.raises(type(plain.value)) as ours:
        fit(make, strategy=make_strategy(2), data=data)
    first = str(plain.value).splitlines()[0]
    assert str(ours.value).splitlines()[0] == first and "automatically build" not in str(ours.value)


def test_an_optimizer_made_outside_the_scope_is_refused():
    with make_strategy(2).scope():
        model = data_parallel(dense())
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    with pytest.raises(UserError, match="the optimizer own was made outside the strategy's scope") as refused:
        model.compile(keras.optimizers.Adam(name="own"), "mse")
    assert "\n" not in str(refused.value)


def test_a_second_compile_by_names_may_be_outside_the_scope():
    def train(wrap, strategy=None):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = wrap(dense())
            model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        model.compile("adam", "mae", metrics=["mse"])
        history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        return [*history.values(), *model.get_weights()]

    ours = train(data_parallel, make_strategy(2))
    for mine, plain in zip(ours, train(lambda model: model), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


class Own(keras.Model):
    """A `train_step` with an optimizer of its own."""

    def __init__(self, optimizer):
        super().__init__()
        self.dense, self.own_optimizer = layers.Dense(1), optimizer

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - y))
        weights = self.trainable_weights
        self.own_optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_an_optimizer_of_a_custom_step_made_outside_the_scope_is_refused():
    optimizer = keras.optimizers.Adam(name="outside")
    with pytest.raises(UserError, match="the optimizer outside was made outside the strategy's scope"):
        fit(lambda: Own(optimizer), strategy=make_strategy(2))
