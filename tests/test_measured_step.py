"""What is measured of a custom step, and of Keras's own in one: kinds of programs that once were silently different."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas import UserError, data_parallel, make_strategy
from tests.conftest import assert_same, slow
from tests.test_custom_step import (
    BATCH,
    X,
    Y,
    add_variable,
    arrays,
    arrays_of_17,
    assert_close,
    assert_equivalent,
    custom,
    losses_of,
    minimize,
    run,
    sgd,
    tanh,
    updating,
)


def warned(make, **given):
    """The text of the only warning of a training on two replicas."""
    (warning,) = run(make, make_strategy(2), **given).warned
    return str(warning.message)


# Optimizers


class Phases(keras.Model):
    """Its step calls another optimizer from the second epoch on."""

    phase = 0

    def __init__(self, first_reduction):
        super().__init__()
        self.first_reduction = first_reduction
        self.dense = keras.layers.Dense(3)
        self.later = keras.optimizers.SGD(0.1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(self(x) - y), axis=-1)
            loss = tf.reduce_mean(losses) if self.phase else self.first_reduction(losses)
        optimizer = self.later if self.phase else self.optimizer
        optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": tf.reduce_mean(losses)}


@pytest.mark.parametrize("first_reduction", [tf.reduce_mean, tf.reduce_sum])
def test_an_optimizer_that_is_called_later_gets_the_global_batchs_gradient(first_reduction):
    def phases():
        model = Phases(first_reduction)
        model(X[:1])
        model.later.build(model.trainable_variables)
        model.compile(keras.optimizers.SGD(0.01), run_eagerly=True)
        return model

    def begin_phase(epoch, logs=None):
        callback.model.phase = epoch

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=begin_phase)
    given = {"data": lambda: arrays_of_17(callbacks=[callback])}
    plain, ours = run(phases, **given), run(phases, make_strategy(2), **given)
    assert_close(ours.numbers, plain.numbers)
    (warning,) = ours.warned
    assert "did not when it was measured" in str(warning.message)


def test_a_loss_that_becomes_a_sum_is_warned_of():
    def loss(model, x, y):
        is_first = tf.cast(model.optimizer.iterations == 0, tf.float32)
        values = losses_of(model, x, y)
        return is_first * tf.reduce_mean(values) + (1.0 - is_first) * tf.reduce_sum(values)

    make = custom(minimize(loss), tanh, optimizer=sgd(0.01))
    assert "are a sum over examples now, but combined as a mean" in warned(make)


def test_an_accumulation_that_applies_nothing_at_first_needs_no_word():
    def train_step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses_of(model, x, y))
        gradients = tape.gradient(loss, model.trainable_variables)
        is_odd = tf.cast(model.optimizer.iterations % 2 == 1, tf.float32)
        model.optimizer.apply([is_odd * each for each in gradients], model.trainable_variables)
        return {"loss": loss}

    assert_equivalent(custom(train_step, tanh))


# Keras's own step, in a custom one


class AddsSum(keras.layers.Layer):
    weight = 1.0

    def call(self, x):
        self.add_loss(self.weight * 1e-2 * tf.reduce_sum(tf.square(x)))
        return x


class PassesOn(keras.Model):
    """Its steps give Keras's own what a function makes of the batch."""

    change = staticmethod(lambda x: x)

    def train_step(self, data):
        return super().train_step((self.change(data[0]), data[1]))

    def test_step(self, data):
        return super().test_step((self.change(data[0]), data[1]))


def passing_on(change, *hidden):
    def make():
        x = inputs = keras.Input((X.shape[1],))
        for layer in hidden:
            x = layer()(x)
        model = PassesOn(inputs, keras.layers.Dense(3)(x))
        model.change = change
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return make


def test_a_sum_of_add_loss_counts_as_on_one_device():
    assert_equivalent(passing_on(lambda x: x, AddsSum), data=arrays_of_17, evaluated=True)


COMPARING = {
    "mixed with others": lambda x: 0.7 * x + 0.3 * tf.reverse(x, [0]),
    "normalized": lambda x: x / tf.math.reduce_std(x, axis=0),
}


@pytest.mark.parametrize("name", ["mixed with others", *slow("normalized")])
def test_examples_that_are_compared_before_keras_s_step_are_warned_of(name):
    assert "what it gives to Keras's own step" in warned(passing_on(COMPARING[name]))


def test_examples_that_are_changed_before_keras_s_step_need_no_word():
    assert_equivalent(passing_on(lambda x: 2.0 * x - tf.reduce_mean(x, axis=1, keepdims=True)), data=arrays_of_17)


def test_a_loss_of_a_layer_whose_weight_begins_at_0_is_warned_of():
    class Annealed(AddsSum):
        def build(self, shape):
            self.weight = self.add_weight(initializer="zeros", trainable=False, name="weight")

    def anneal(epoch, logs=None):
        callback.model.layers[1].weight.assign(float(epoch > 0))

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=anneal)
    with make_strategy(2).scope():
        inputs = keras.Input((X.shape[1],))
        model = data_parallel(keras.Model(inputs, keras.layers.Dense(3)(Annealed()(inputs))))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    with pytest.warns(UserWarning, match="gives add_loss a sum over examples"):
        model.fit(X[:16], Y[:16], BATCH, epochs=3, callbacks=[callback], verbose=0)


class AddsMean(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.square(x)))
        return x


def test_a_mean_of_add_loss_is_exact_in_float64():
    def fit(wrap):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((X.shape[1],))
        model = wrap(keras.Model(inputs, AddsMean()(keras.layers.Dense(3)(inputs))))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model.fit(X[:17], Y[:17], 5, shuffle=False, verbose=0).history["loss"]

    keras.config.set_floatx("float64")
    keras.utils.clear_session()  # with the dtype that layers have had
    try:
        plain = fit(lambda model: model)
        with make_strategy(2).scope():
            ours = fit(data_parallel)
    finally:
        keras.config.set_floatx("float32")
        keras.utils.clear_session()
    assert_same(ours, plain, rtol=1e-12)


# Numbers of rows


def batches_of_known_rows():
    batches = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(BATCH, drop_remainder=True)
    return {"x": batches, "epochs": 2}


def test_a_known_number_of_rows_is_counted_once_for_each_example():
    def count(model, x):
        model.kept.assign_add(tf.cast(tf.shape(x)[0], tf.float32))

    def train_step(model, data):
        return updating(count)(model, data) | {"rows": tf.shape(data[0])[0]}

    make = custom(train_step, tanh, prepare=add_variable())
    _, ours = assert_equivalent(make, data=batches_of_known_rows)
    assert ours.model.kept.numpy() == 32
    assert ours.numbers["rows"] == [BATCH, BATCH]


def test_a_layer_that_counts_a_known_number_of_rows_is_refused():
    class Count(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(initializer="zeros", trainable=False, name="seen")

        def call(self, x):
            self.seen.assign_add(float(x.shape[0]) if x.shape[0] else tf.cast(tf.shape(x)[0], tf.float32))
            return x

    with make_strategy(2).scope():
        inputs = keras.Input((X.shape[1],))
        model = data_parallel(keras.Model(inputs, keras.layers.Dense(3)(Count()(inputs))))
        model.compile("sgd", "mse")
    with pytest.raises(UserError, match="seen is updated in each step"):
        model.fit(**batches_of_known_rows(), verbose=0)


def test_unlike_shares_of_two_inputs_are_warned_of():
    def train_step(model, data):
        (few, many), y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses_of(model, few, y)) + tf.reduce_mean(tf.square(model(many)))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    def data():
        few = tf.data.Dataset.from_tensor_slices((X[:12], Y[:12])).batch(6)
        many = tf.data.Dataset.from_tensor_slices(np.concatenate([X, X])[:30]).batch(15)
        return {"x": tf.data.Dataset.zip(few, many).map(lambda pair, other: ((pair[0], other), pair[1]))}

    assert "6 and 15 rows" in warned(custom(train_step, tanh), data=data)


def test_a_scalar_beside_the_batch_is_refused():
    data = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(BATCH).map(lambda x, y: ((x, 0.5), y))
    with pytest.raises(UserError, match="the shapes are"):
        run(custom(minimize(), tanh), make_strategy(2), data=lambda: {"x": data})


def test_padding_of_later_examples_is_seen():
    padded = X[:16].copy()
    padded[np.arange(16) % BATCH >= 5, 2:] = 0.0  # each batch begins with five full examples

    def loss(model, x, y):
        is_given = tf.cast(x != 0, tf.float32)
        return tf.reduce_sum(is_given * tf.square(model(x)[:, :1] - x)) / tf.reduce_sum(is_given)

    make = custom(minimize(loss), tanh)
    assert "neither the mean nor the sum" in warned(make, data=lambda: arrays(16, x=padded))


# TensorFlow's variables


class Holder:
    """An object of the user's own."""


def keep_in(place):
    def prepare(model):
        variable = tf.Variable(0.0, trainable=False)
        holder = Holder()
        holder.average = variable
        kept = {"private": variable, "a dict of dicts": {"a": {"b": variable}}, "an object": holder}
        model._kept, model.find = kept[place], lambda: variable

    return prepare


@pytest.mark.parametrize("place", ["private", *slow("a dict of dicts", "an object")])
def test_a_tf_variable_is_combined_wherever_it_is_kept(place):
    def train_step(model, data):
        logs = minimize()(model, data)
        average = model.find()
        average.assign(0.5 * average + 0.5 * tf.reduce_mean(data[0]))
        return logs | {"average": average.read_value()}

    plain, ours = assert_equivalent(custom(train_step, tanh, prepare=keep_in(place)), data=arrays_of_17)
    assert_close(ours.model.find().numpy(), plain.model.find().numpy())


def test_a_check_of_a_batch_s_largest_number_needs_no_word():
    def train_step(model, data):
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(data[0]), 1e3)]):
            return minimize()(model, data)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equivalent(custom(train_step, tanh))
