"""Random draws in `evaluate`, `predict` and validation: new ones for each batch and each evaluation; repeatable."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_replicas import Checkpoints, checkpoints, data_parallel, make_strategy
from tests.conftest import assert_same, interrupt_at, slow

ZEROS = np.zeros((32, 1), "float32")


class Noise(layers.Layer):
    """Draws in evaluation, too, as a VAE's sampling layer does."""

    def __init__(self, seed=3):
        super().__init__()
        self.seed = keras.random.SeedGenerator(seed)

    def call(self, x):
        return x * 0.0 + keras.random.normal(ops.shape(x), seed=self.seed)


def make(*hidden, replicas=2):
    with make_strategy(replicas).scope():
        keras.utils.set_random_seed(1)
        model = data_parallel(keras.Sequential([keras.Input((1,)), *hidden, Noise()]))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def evaluate(model, count):
    return [model.evaluate(ZEROS, ZEROS, batch_size=2, verbose=0) for _ in range(count)]


def test_each_batch_and_each_evaluation_draws_anew():
    model = make()
    found = evaluate(model, 4)
    assert len(set(found)) == 4
    drawn = model.predict(ZEROS, batch_size=2, verbose=0)
    assert len(np.unique(drawn)) == len(ZEROS)
    assert not np.isin(drawn, model.predict(ZEROS, batch_size=2, verbose=0)).any()


def test_a_model_without_weights_draws_anew_in_each_step():
    losses = make().fit(ZEROS, ZEROS, batch_size=2, epochs=4, verbose=0).history["loss"]
    assert len(set(losses)) == 4 and all(0.3 < loss < 2.0 for loss in losses)


@pytest.mark.slow
def test_training_does_not_repeat_what_validation_drew():
    drawn = []

    class Noted(Noise):
        def call(self, x):
            noise = super().call(x)
            note = tf.numpy_function(lambda values: drawn.append(values.copy()) or values, [noise], tf.float32)
            return tf.ensure_shape(note, noise.shape) + x

    with make_strategy(2).scope():
        model = data_parallel(keras.Sequential([keras.Input((1,)), layers.Dense(1), Noted()]), probe_call=False)
        model.compile("sgd", "mse")
    model.fit(ZEROS, ZEROS, batch_size=4, epochs=3, validation_data=(ZEROS, ZEROS), validation_batch_size=4, verbose=0)
    values = np.concatenate([each.ravel() for each in drawn])
    assert len(values) == 6 * len(ZEROS) and len(np.unique(values)) == len(values)


@pytest.mark.slow
def test_the_same_program_draws_the_same():
    def run():
        model = make(layers.Dense(1), layers.Dropout(0.5))
        history = model.fit(ZEROS, ZEROS, batch_size=4, epochs=2, validation_data=(ZEROS, ZEROS), verbose=0).history
        return [*history.values(), *evaluate(model, 2), model.predict(ZEROS, verbose=0)]

    assert_same(run(), run())


@pytest.mark.parametrize("step", [5, *slow(8, 13)])
def test_a_resumed_run_validates_with_the_same_draws(step, tmp_path, monkeypatch):
    def run(folder, *callbacks):
        model = make(layers.Dense(1))
        given = {
            "validation_data": (ZEROS, ZEROS),
            "validation_batch_size": 4,
            "epochs": 2,
            "batch_size": 4,
            "verbose": 0,
        }
        callbacks = [Checkpoints(folder, every=2), *callbacks]
        history = model.fit(ZEROS + 1, ZEROS, **given, callbacks=callbacks).history
        return [*history.values(), *evaluate(model, 2)]

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", interrupt_at(step))
    assert_same(run(tmp_path / "parts"), whole)
    monkeypatch.setattr(checkpoints, "_completed", {})  # as in a new process, to which the fit is complete
    assert_same(run(tmp_path / "parts"), whole)


@pytest.mark.slow
def test_a_custom_test_step_and_predict_step_draw_anew():
    class Own(keras.Sequential):
        def test_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"own": ops.mean(ops.square(self(x) + keras.random.normal((), seed=7) * 0.0))}

        def predict_step(self, data):
            return self(data[0] if isinstance(data, tuple) else data)

    with make_strategy(2).scope():
        model = data_parallel(Own([keras.Input((1,)), Noise()]))
        model.compile("sgd", "mse")
    found = [model.evaluate(ZEROS, ZEROS, batch_size=2, verbose=0, return_dict=True)["own"] for _ in range(3)]
    assert len(set(found)) == 3
    assert len(np.unique(model.predict(ZEROS, batch_size=2, verbose=0))) == len(ZEROS)
