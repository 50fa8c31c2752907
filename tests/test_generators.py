"""Generators and `PyDataset`s under a strategy: nothing of them is lost, and none of it twice."""

import time

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

from keras_replicas import Batches, Checkpoints, data_parallel, make_strategy
from tests.conftest import assert_same, on_replicas


def sparse_batches(count=3):
    """SciPy's entries may stand in any order: here the last row's come first."""
    random = np.random.default_rng(0)
    for _ in range(count):
        columns = random.permutation(6)[:4]
        x = scipy.sparse.coo_matrix((random.normal(size=4), ([3, 2, 1, 0], columns)), (4, 6), np.float32)
        yield x, random.normal(size=(4, 2)).astype(np.float32)


def test_sparse_matrices_of_scipy_are_divided_among_replicas():
    def ways_of(model_class, data):
        keras.utils.set_random_seed(0)
        model = model_class([keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        history = model.fit(data(), validation_data=data(), shuffle=False, verbose=0).history
        return [*history.values(), model.evaluate(data(), verbose=0), model.predict(data(), verbose=0)]

    plain = ways_of(keras.Sequential, lambda: ((x.toarray(), y) for x, y in sparse_batches()))
    with make_strategy(2).scope():
        ours = ways_of(data_parallel(keras.Sequential), sparse_batches)
    assert_same(ours, plain, rtol=1e-6, atol=1e-7)


def make_model(**options):
    return on_replicas(keras.layers.Dense(1, kernel_initializer="zeros"), **options)


class Numbered(keras.utils.PyDataset):
    """Batches whose labels are their number."""

    def __init__(self, num_batches):
        super().__init__(workers=2)
        self._count = num_batches

    num_batches = property(lambda self: self._count)

    def __getitem__(self, index):
        time.sleep(0.05)  # so that the next batch is waited for when an epoch ends
        return np.ones((4, 1), np.float32), np.full((4, 1), index, np.float32)


class Turned(Numbered):
    """After each epoch, labels are 100 more; when the first begins, 1000."""

    epochs = 0

    def on_epoch_begin(self):
        self.epochs = self.epochs or 10

    def on_epoch_end(self):
        self.epochs += 1

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y + 100 * self.epochs


def labels_seen(dataset, strategy=None, callbacks=(), **options):
    """The mean label of each batch: the model says 0, and the loss is the distance."""
    model = make_model(optimizer=lambda: keras.optimizers.SGD(0.0), loss="mae", strategy=strategy)
    losses = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.extend(model.step_values["loss"])
    )
    pause = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.3))  # as a validation would
    options = {"epochs": 3, "verbose": 0} | options
    model.fit(dataset, shuffle=False, callbacks=[keep, pause, *callbacks], **options)
    return losses


@pytest.mark.parametrize(("length", "replicas"), [(None, 1), (None, 2), (12, 2)])
def test_threads_of_a_py_dataset_go_on_over_epochs(length, replicas):
    np.testing.assert_allclose(labels_seen(Numbered(length), make_strategy(replicas), steps_per_epoch=4), range(12))


def test_what_a_py_dataset_does_between_epochs_is_done():
    np.testing.assert_allclose(labels_seen(Turned(3)), [1000, 1001, 1002, 1100, 1101, 1102, 1200, 1201, 1202])


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("endless", [False, True])
def test_an_epoch_has_the_steps_asked_for_where_calls_do_not_divide_it(endless, eagerly):
    """Keras does 6 and 4 steps of 10 batches, and more of endless data."""
    model = make_model(steps_per_execution=2, run_eagerly=eagerly)
    x = np.ones((40, 1), np.float32)
    data = (((x[:4], x[:4]) for _ in iter(int, 1)),) if endless else (x, x, 4)
    steps = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: steps.append(model.steps_done))
    model.fit(*data, epochs=2, steps_per_epoch=5, callbacks=[keep], validation_data=(x, x), verbose=0)
    assert steps == [5, 10]


def test_a_generator_after_batches_of_ours_is_still_read_once():
    """The option with which `Batches` are distributed must not reach the data sets that come after."""
    strategy, x = make_strategy(2), np.ones((4, 1), np.float32)
    labels_seen(Batches((x, x), 4), strategy)
    assert labels_seen(((x, x * number) for number in range(6)), strategy, epochs=1) == list(range(6))


@pytest.mark.parametrize(("steps_per_execution", "asked", "epochs"), [(1, None, 3), (3, None, 3), (3, 8, 1)])
def test_the_optimizer_counts_no_step_beyond_the_data(steps_per_execution, asked, epochs):
    """Keras's does, so that schedules and Adam's corrections of bias are ahead."""
    model = make_model(optimizer="adam", steps_per_execution=steps_per_execution)
    x, calls = np.ones((20, 1), np.float32), []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: calls.append(model.steps_in_call))
    model.fit(x, x, 4, epochs=epochs, verbose=0, callbacks=[keep], steps_per_epoch=asked)
    assert calls == ([1] * 5 if steps_per_execution == 1 else [3, 2]) * epochs
    assert model.steps_done == model.optimizer.iterations.numpy() == 5 * epochs


@pytest.mark.parametrize("replicas", [1, 2])
def test_arrays_and_data_sets_take_turns(replicas):
    model, x = make_model(strategy=make_strategy(replicas)), np.ones((10, 1), np.float32)
    for given in ((x, x, 4), (tf.data.Dataset.from_tensor_slices((x, x)).batch(4),)) * 2:
        model.fit(*given, verbose=0)
        model.evaluate(*given, verbose=0)


def test_predictions_of_batches_are_in_the_order_of_the_rows():
    model = on_replicas(keras.layers.Dense(1, kernel_initializer="ones"))
    x = np.arange(20, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(model.predict(Batches(x, 4), verbose=0), x)


def test_steps_without_a_batch_size_divide_the_rows_as_in_keras(tmp_path):
    rows, saved = np.arange(10, dtype=np.float32)[:, None], Checkpoints(tmp_path, every=10)
    seen = labels_seen(rows, make_strategy(2), [saved], y=rows, steps_per_epoch=5, epochs=1)
    np.testing.assert_allclose(seen, [0.5, 2.5, 4.5, 6.5, 8.5])


@pytest.mark.parametrize("given", ["y", "sample_weight", "class_weight"])
def test_labels_and_weights_beside_data_that_holds_them_are_refused(given):
    model, x = make_model(), np.ones((4, 1), np.float32)
    with pytest.raises(ValueError, match="a Batches holds y and weights itself: leave out y, sample_weight, class_wei"):
        model.fit(Batches((x, x), 4), verbose=0, **{given: {0: 2.0} if given == "class_weight" else x})
