"""Without a strategy and on one replica, Keras's own step runs: to the bit what Keras computes."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.features import Autoencoder, X, Y
from benchmarks.published import PROGRAMS
from keras_replicas import Checkpoints, StepLog, data_parallel
from tests.conftest import assert_same, interrupt_at, long

X, Y = X[:22], Y[:22]
OTHERS = [name for name in PROGRAMS if name not in ("generative/ddim", "generative/vae")]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class InCond(keras.layers.Layer):
    """Updates a maximum, from minus infinity, in a `tf.cond`, and draws noise there."""

    def build(self, shape):
        self.top = self.add_weight((), initializer=keras.initializers.Constant(-np.inf), trainable=False)
        self.noise = keras.layers.GaussianNoise(0.1, seed=1)

    def call(self, x, training=False):
        def update():
            self.top.assign(tf.maximum(self.top.value, tf.reduce_max(x)))
            return self.noise(x, training=training)

        return tf.cond(tf.size(x) > 0, update, lambda: x)


class Attention(keras.layers.Layer):
    """Attends to itself."""

    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 3, dropout=0.2)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x, training=None):
        return self.attention(x, x, training=training)


class ActNorm(keras.layers.Layer):
    """Gives a weight its first value in its first step."""

    def build(self, shape):
        self.shift = self.add_weight((5,), initializer="zeros")
        self.begun = self.add_weight((), dtype="bool", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        def begin():
            self.begun.assign(True)
            return self.shift.assign(-tf.reduce_mean(x, axis=0))

        return x + tf.cond(self.begun.value | (not training), lambda: tf.identity(self.shift.value), begin)


def layered(*layers, rate=1e-3, **options):
    def build():
        made = [layer() for layer in layers]
        model = keras.Sequential([keras.Input((5,)), *made, keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adam(rate), LOSS, metrics=["accuracy"], **options)
        return model

    return build


def own_step():
    model = Autoencoder()
    model.compile("adam")
    return model


class Cell(keras.layers.Layer):
    """A recurrent cell whose weights are made in the first step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, activation="tanh")
        self.state_size = self.output_size = 3

    def call(self, x, states):
        state = self.dense(keras.ops.concatenate([x, states[0]], -1))
        return state, [state]


def recurrent():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Reshape((5, 1)), keras.layers.RNN(Cell())])
    model.add(keras.layers.Dense(3))
    model.compile("adam", LOSS)
    return model


def averaged():
    model = keras.Sequential([keras.Input((5,)), dropout(), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=3), LOSS, metrics=["accuracy"])
    return model


def convolutional():
    hidden = [keras.layers.Conv1D(4, 2), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((5,)), keras.layers.Reshape((5, 1)), *hidden, keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS, metrics=["accuracy"])
    return model


def of_two_outputs():
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, activation="gelu", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(3)(hidden), keras.layers.Dense(3)(hidden)])
    model.compile(keras.optimizers.AdamW(1e-2), [LOSS, LOSS], loss_weights=[1.0, 0.5])
    return model


def dropout():
    return keras.layers.Dropout(0.3)


MODELS = {
    "dropout, BatchNormalization": layered(dropout, keras.layers.BatchNormalization),
    "several steps a call": layered(dropout, steps_per_execution=4),
    "jit_compile": layered(dropout, jit_compile=True),
    "run_eagerly": layered(dropout, run_eagerly=True),
    "state and noise in a tf.cond": layered(InCond),
    "a weight in a tf.cond": layered(ActNorm),
    "a train_step, no call": own_step,
    "a cell that is built in the first step": recurrent,
    "convolutions": convolutional,
    "two outputs": of_two_outputs,
    "attention": layered(lambda: keras.layers.Reshape((5, 1)), Attention, keras.layers.Flatten),
    "moving averages of weights": averaged,
}


BEFORE_A_RELEASE = ["several steps a call", "run_eagerly", "convolutions", "two outputs", "attention"]
BEFORE_A_RELEASE += ["moving averages of weights", "state and noise in a tf.cond"]


def labels_of(model):
    """The labels, once for each output."""
    return [Y, Y] if len(model.outputs if hasattr(model, "outputs") else [0]) == 2 else Y


def trained(build, wrap, strategy=None, callbacks=(), epochs=2):
    """Losses and metrics, weights and all other state."""
    keras.backend.clear_session()  # so that layers, and with them losses, have the same names
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = wrap(build())
    history = model.fit(X, labels_of(model), 4, epochs, 0, list(callbacks), shuffle=False).history
    return [*history.values(), *model.variables, *model.optimizer.variables]


@pytest.mark.parametrize("name", [*(name for name in MODELS if name not in BEFORE_A_RELEASE), *long(*BEFORE_A_RELEASE)])
def test_one_replica_computes_what_keras_does_also_where_it_was_interrupted(name, tmp_path):
    build = MODELS[name]
    plain = trained(build, lambda model: model)
    assert_same(trained(build, data_parallel), plain)
    assert_same(trained(build, data_parallel, tf.distribute.MirroredStrategy(["CPU:0"])), plain)
    with pytest.raises(KeyboardInterrupt):
        trained(build, data_parallel, callbacks=[Checkpoints(tmp_path, every=1), interrupt_at(8)])
    assert_same(trained(build, data_parallel, callbacks=[Checkpoints(tmp_path, every=1)]), plain)


class CallRecorder(keras.callbacks.Callback):
    """Records each call of a callback: its name and arguments, and the weights at that time."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return functools.partial(self._record, name)

    def _record(self, name, *arguments, logs=None):
        *position, logs = arguments if logs is None else (*arguments, logs)
        weights = [np.array(each) for each in self.model.get_weights()]
        self.calls.append((name, position, {key: np.array(value) for key, value in (logs or {}).items()}, weights))


def calls_of_callbacks(build, wrap, folder):
    """What callbacks are told in `fit` with validation, `evaluate` and `predict`, and what those of Keras write."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    recorder = CallRecorder()
    model = wrap(build())
    has_call = not isinstance(model, Autoencoder)
    y = labels_of(model)
    few = (X[:6], keras.tree.map_structure(lambda labels: labels[:6], y))
    given = [
        recorder,
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping("loss", patience=2, min_delta=10.0, restore_best_weights=True),
        *([keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True)] if has_call else []),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.TerminateOnNaN(),
    ]
    model.fit(X, y, 4, 4, 0, given, shuffle=False, validation_data=few if has_call else None)
    if has_call:
        model.evaluate(X, y, 4, 0, callbacks=[recorder])
        model.predict(X, 4, 0, callbacks=[recorder])
    files = {path.name for path in folder.iterdir()}
    return recorder.calls, (folder / "log.csv").read_text(), files, float(model.optimizer.learning_rate)


@pytest.mark.parametrize("name", [*(name for name in MODELS if name not in BEFORE_A_RELEASE), *long(*BEFORE_A_RELEASE)])
def test_callbacks_are_told_what_keras_tells_them(name, tmp_path):
    folders = [tmp_path / "plain", tmp_path / "ours"]
    for folder in folders:
        folder.mkdir()
    plain, *written = calls_of_callbacks(MODELS[name], lambda model: model, folders[0])
    ours, *also_written = calls_of_callbacks(MODELS[name], data_parallel, folders[1])
    assert also_written == written
    assert [call[:2] for call in ours] == [call[:2] for call in plain]
    for (*_, logs, weights), (*_, plain_logs, plain_weights) in zip(ours, plain, strict=True):
        assert logs.keys() == plain_logs.keys()
        assert_same([*logs.values(), *weights], [*plain_logs.values(), *plain_weights])


@pytest.mark.parametrize("name", ["generative/ddim", "generative/vae", *long(*OTHERS)])
def test_published_programs_without_a_strategy_are_bitwise_the_same(name):
    keras.backend.clear_session()
    plain = PROGRAMS[name].train(lambda model: model)
    keras.backend.clear_session()
    ours = PROGRAMS[name].train(data_parallel)
    assert ours.keys() == plain.keys()
    for number, value in ours.items():  # plain Keras's own History of the VAE differs from run to run, by its rounding
        np.testing.assert_allclose(value, plain[number], rtol=1e-6 if number.startswith("history/") else 0.0)


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_each_step_has_its_own_values(steps_per_execution, tmp_path):
    log = StepLog(tmp_path)
    rate = keras.optimizers.schedules.PolynomialDecay(1e-2, 20)
    trained(layered(rate=rate, steps_per_execution=steps_per_execution), data_parallel, callbacks=[log])
    lines = log.begin(12)
    keras.utils.set_random_seed(0)
    model = layered(rate=rate)()
    for line in lines:
        rows = slice((line["step"] - 1) % 6 * 4, (line["step"] - 1) % 6 * 4 + 4)
        loss, accuracy = map(float, model.train_on_batch(X[rows], Y[rows]))
        model.reset_metrics()
        used = float(rate(line["step"] - 1))
        assert line == pytest.approx({"step": line["step"], "loss": loss, "accuracy": accuracy, "learning_rate": used})


def test_data_that_ends_counts_no_further_step():
    """Keras's loss of an epoch of unknown length is too low, by a step's examples."""
    data = tf.data.Dataset.from_tensors((X[0], Y[0])).repeat(8).filter(lambda x, y: True).batch(2, drop_remainder=True)
    model = data_parallel(layered()())
    model.optimizer.learning_rate = 0.0
    expected = model.evaluate(X[:1], Y[:1], verbose=0)[0]
    assert model.fit(data, verbose=0).history["loss"][0] == pytest.approx(expected, rel=1e-5)
    assert model.evaluate(data, verbose=0)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_rows_of_a_table_that_repeat_are_squared_once(jit_compile):
    model = keras.Sequential([keras.Input([2], dtype="int32"), keras.layers.Embedding(1, 1), keras.layers.Flatten()])
    model.add(keras.layers.Dense(1, kernel_initializer="ones"))
    optimizer = keras.optimizers.Adagrad(initial_accumulator_value=0.0)
    model.compile(optimizer, "mae", jit_compile=jit_compile)
    data_parallel(model).fit(np.zeros([1, 2], np.int32), np.full([1, 1], -9.0), verbose=0)
    assert optimizer.variables[2].numpy().item() == 4
