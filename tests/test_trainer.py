"""`fit` that begins and ends in the middle of an epoch."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas import Batches, Checkpoints, StepLog, checkpoints, distribute, make_strategy
from keras_replicas.losses import loss_adds_up, metric_adds_up
from tests.conftest import assert_same, on_replicas

X = np.random.default_rng(0).normal(size=(56, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


class Told(keras.callbacks.Callback):
    """Notes what `fit` tells."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def on_epoch_begin(self, epoch, logs=None):
        self.heard.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append((batch, self.model.steps_done, self.model.at_epoch_end))

    def on_test_end(self, logs=None):
        self.heard.append("evaluated")


def make_model(**compile_arguments):
    keras.utils.set_random_seed(0)
    optimizer = functools.partial(keras.optimizers.Adam, 0.1)
    return on_replicas(keras.Input((3,)), keras.layers.Dense(1), optimizer=optimizer, **compile_arguments)


def fit(model, folder, max_steps=None, **arguments):
    """Four examples a step, four steps an epoch; validation of one step."""
    told, data = Told(), Batches((X[:16], Y[:16]), 4)
    callbacks = [told, Checkpoints(folder, max_steps=max_steps)]
    validation = {"validation_data": Batches((X[:4], Y[:4]), 4, shuffle=False)}
    history = model.fit(data, **validation, callbacks=callbacks, verbose=0, **arguments).history
    return told.heard, history


def test_it_ends_where_it_is_told_to(tmp_path):
    heard, history = fit(make_model(), tmp_path, epochs=9, max_steps=10)
    steps = [(0, 1, False), (1, 2, False), (2, 3, False), (3, 4, True)]
    assert heard[:6] == ["epoch 0", *steps, "evaluated"]
    assert heard[-4:] == ["epoch 2", (0, 9, False), (1, 10, True), "evaluated"]
    assert len(history["loss"]) == 3


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_steps_own_values_are_numbers(replicas, tmp_path):
    """An F1 score is a vector, which a line of the log has no place for."""
    options = {"loss": "categorical_crossentropy", "metrics": [keras.metrics.F1Score()]}
    model = on_replicas(keras.layers.Dense(2, "softmax"), strategy=make_strategy(replicas), **options)
    model.fit(X[:8], np.eye(2)[[0, 1] * 4], 4, callbacks=[StepLog(tmp_path)], verbose=0)
    assert model.step_values.keys() == {"loss", "learning_rate"}


def test_nothing_is_said_of_the_order_of_a_data_set():
    """Keras warns that it does not shuffle one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make_model().fit(tf.data.Dataset.from_tensors((X[:4], Y[:4])), verbose=0)


def test_it_begins_within_an_epoch_where_it_was(tmp_path, monkeypatch):
    whole, _ = fit(model := make_model(), tmp_path / "whole", epochs=3)
    fit(make_model(), tmp_path / "parts", epochs=3, max_steps=6)
    monkeypatch.setattr(checkpoints, "_completed", type(checkpoints._completed)())  # as in a new process
    went_on, _ = fit(again := make_model(), tmp_path / "parts", epochs=3)
    assert went_on == ["epoch 1", (2, 7, False), (3, 8, True), *whole[11:]]
    assert_same(again.get_weights(), model.get_weights())


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_epoch_after_one_whose_data_ran_out_has_all_its_steps_again():
    """Fourteen steps of data, and six asked for beyond them, as Keras on one device counts them."""

    def steps(model):
        told = Told()
        model.fit(X, Y, batch_size=4, steps_per_epoch=20, epochs=3, shuffle=False, verbose=0, callbacks=[told])
        return [heard if isinstance(heard, str) else heard[0] for heard in told.heard]

    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    plain.steps_done = plain.at_epoch_end = None
    assert steps(make_model()) == steps(plain)


def test_several_steps_a_call_end_where_the_epoch_does_and_an_initial_epoch_is_keras_own(tmp_path):
    heard, _ = fit(make_model(steps_per_execution=3), tmp_path / "a", epochs=3, max_steps=6)
    assert [end for end in heard if isinstance(end, tuple)] == [(2, 3, False), (5, 4, True), (2, 6, True)]
    heard, _ = fit(make_model(), tmp_path / "b", epochs=3, initial_epoch=2)
    assert [told for told in heard if isinstance(told, str)] == ["epoch 2", "evaluated"]


class Shifted(keras.losses.MeanSquaredError):
    """As Keras's, under another name."""

    def __init__(self):
        super().__init__(name="shifted")


class Called(keras.losses.MeanSquaredError):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.max(y_pred)


class OfLarge(keras.losses.MeanSquaredError):
    """Over the large outputs: a mean of its own, though of Keras's class."""

    def call(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred)[y_pred > 0.3] ** 2)


class ByExample(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


class Declared(ByExample):
    adds_up = True


class Doubled(keras.metrics.MeanSquaredError):
    def result(self):
        return 2 * super().result()


class Halved(keras.metrics.MeanSquaredError):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true / 2, y_pred / 2, sample_weight)


def squares(y_true, y_pred):
    return (y_true - y_pred) ** 2


OWN = Shifted, Called, OfLarge, ByExample, Declared, Doubled, Halved, squares


@pytest.mark.parametrize("module", ["keras.src.losses.losses", __name__])
def test_a_loss_counts_as_kerass_by_what_its_class_overrides(module, monkeypatch):
    for each in OWN:
        monkeypatch.setattr(each, "__module__", module)
    losses, of_function = keras.losses, keras.losses.MeanSquaredError.__base__
    ours = losses.Dice(), losses.CosineSimilarity(axis=0), Called(), OfLarge(), ByExample()
    assert all(map(loss_adds_up, (losses.MeanSquaredError(), of_function(losses.mean_squared_error))))
    assert all(map(loss_adds_up, (Shifted(), Declared())))
    assert not any(map(loss_adds_up, (*ours, of_function(squares), of_function(losses.dice))))


@pytest.mark.parametrize("module", ["keras.src.metrics.metric", __name__])
def test_a_metric_counts_as_kerass_by_what_its_class_overrides(module, monkeypatch):
    for each in OWN:
        monkeypatch.setattr(each, "__module__", module)
    metrics, of_function = keras.metrics, keras.metrics.MeanMetricWrapper
    kerass = metrics.AUC(), metrics.Accuracy(), Doubled(), of_function(metrics.mean_squared_error)
    ours = Halved(), of_function(squares), of_function(keras.losses.MeanSquaredError())
    assert all(map(metric_adds_up, kerass))
    assert not any(map(metric_adds_up, (*ours, metrics.CosineSimilarity(axis=0))))


def test_each_fit_shuffles_arrays_anew_and_takes_each_example_once():
    model, fits = make_model(), []
    model.optimizer.learning_rate = 0.0  # so that a step's loss tells which examples it has
    for _ in range(2):
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_, **__: fits[-1].extend(model.step_values["loss"])
        )
        fits.append([])
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[note])
    assert fits[0] != fits[1] and len(fits[0]) == 14
    assert np.mean(fits, axis=1) == pytest.approx([model.evaluate(X, Y, verbose=0)] * 2, rel=1e-5)


def test_arrays_under_a_strategy_are_divided_by_the_library(monkeypatch):
    """Which takes up to half as long a step, unless Keras is to count the steps."""
    model, divided = make_model(), []

    def note(*given):
        divided.append(given)
        return distribute(*given)

    monkeypatch.setattr("keras_replicas.arguments.distribute", note)
    model.fit(X, Y, batch_size=4, verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert len(divided) == 3
    model.fit(X, Y, batch_size=4, steps_per_epoch=2, verbose=0)
    assert len(divided) == 3
