"""One device by plain Keras against 1, 2 and 4 replicas of ours: a row for each feature, batches that do not divide."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.devices.strategy import make_strategy
from common.training.data_parallel import data_parallel

EXAMPLES, BATCH, FEATURES, CLASSES = 26, 8, 5, 3  # the last batch has 2
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
Y = RANDOM.integers(0, CLASSES, EXAMPLES)
Z = RANDOM.normal(size=(EXAMPLES, 2)).astype(np.float32)
WEIGHT = RANDOM.uniform(0.2, 2.0, EXAMPLES).astype(np.float32)
WEIGHT[:5] = 0  # all that the first of two replicas has of the first batch


def no_autotune():
    options = tf.data.Options()
    options.autotune.enabled = False  # else deleting an iterator can take a minute
    return options


def batches(*data):
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH).with_options(no_autotune())


def functional(hidden=(), **dense):
    def make(model_class):
        inputs = keras.Input((FEATURES,))
        outputs = keras.layers.Dense(6, activation="tanh", **dense)(inputs)
        for layer in hidden:
            outputs = layer()(outputs)
        return model_class(inputs, keras.layers.Dense(CLASSES, name="y")(outputs))

    return make


def sequential(model_class):
    base = data_parallel(keras.Sequential) if model_class is not keras.Model else keras.Sequential
    return base([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(CLASSES)])


def two_outputs(model_class):
    first, second = keras.Input((FEATURES,), name="a"), keras.Input((2,), name="b")
    joined = keras.layers.Concatenate()([first, second])
    return model_class(
        [first, second], [keras.layers.Dense(CLASSES, name="y")(joined), keras.layers.Dense(2, name="z")(joined)]
    )


class WithOwnLoss(keras.Model):
    """The batch's examples are compared, weights are in the loss, and a tracker is its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)
        self.tracker = keras.metrics.Mean(name="spread")

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        spread = keras.ops.mean(keras.ops.std(y_pred, axis=0))
        self.tracker.update_state(spread)
        decay = 0.1 * keras.ops.sum(keras.ops.square(self.dense.kernel))
        return super().compute_loss(x, y, y_pred, sample_weight, training) + spread * keras.ops.mean(x**2) + decay


class WithOwnMetrics(keras.Model):
    """`compute_metrics` of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)
        self.highest = keras.metrics.Mean(name="highest")

    def call(self, x):
        return self.dense(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.highest.update_state(keras.ops.max(y_pred))
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"highest": self.highest.result()}


class Largest(keras.metrics.Metric):
    """Whose state is no sum, and does not begin at 0."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), lambda shape, dtype: tf.fill(shape, tf.constant(-9.0, dtype)), name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def reset_state(self):
        self.value.assign(-9.0)

    def result(self):
        return keras.ops.convert_to_tensor(self.value)


def own(kind):
    def make(model_class):
        return (kind if model_class is keras.Model else data_parallel(kind))()

    return make


def cross_entropy(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def batchwise(y, predicted):
    losses = keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)
    return keras.ops.sqrt(keras.ops.mean(losses))


def adam(**options):
    return lambda: keras.optimizers.Adam(0.01, **options)


def frozen(model_class):
    model = functional()(model_class)
    model.layers[1].trainable = False
    return model


def row(make=None, data=None, optimizer=None, loss=cross_entropy, fit=None, slow=False, **options):
    data = data or (X, Y, WEIGHT)
    return {
        "make": make or functional(),
        "data": data,
        "optimizer": optimizer or (lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
        "loss": loss,
        "options": options,
        "fit": fit or {},
        "slow": slow,
    }


TWO = ((X, Z), (Y, Z), (WEIGHT, np.ones_like(WEIGHT)))
ROWS = {
    "mean over the batch": row(metrics=lambda: ["accuracy"], weighted_metrics=lambda: ["accuracy"]),
    "mean by weight": row(loss=lambda: cross_entropy("mean_with_sample_weight"), slow=True),
    "sum": row(loss=lambda: cross_entropy("sum"), optimizer=lambda: keras.optimizers.SGD(0.01)),
    "no weights": row(data=(X, Y), slow=True),
    "a loss by name, sequential": row(sequential, (X, np.eye(CLASSES)[Y]), loss=lambda: "mse", slow=True),
    "two inputs and outputs": row(
        two_outputs,
        TWO,
        loss=lambda: [cross_entropy(), "mae"],
        loss_weights=[0.3, 2.0],
        metrics=lambda: [["accuracy"], ["mse"]],
    ),
    "regularisers": row(functional(kernel_regularizer="l2", activity_regularizer="l1")),
    "a loss over the batch": row(loss=lambda: batchwise, data=(X, Y)),
    "a compute_loss of its own": row(own(WithOwnLoss), (X, Y)),
    "a compute_metrics of its own": row(own(WithOwnMetrics), (X, Y), slow=True),
    "a metric of its own": row(metrics=lambda: [Largest(), keras.metrics.SparseTopKCategoricalAccuracy(2)]),
    "metrics of curves": row(
        data=(X, np.eye(CLASSES)[Y]),
        loss=lambda: "categorical_crossentropy",
        metrics=lambda: [
            keras.metrics.AUC(from_logits=True, name="auc"),
            keras.metrics.F1Score(),
            keras.metrics.Precision(name="precision"),
        ],
        slow=True,
    ),
    "BatchNormalization": row(functional([keras.layers.BatchNormalization])),
    "other normalisations": row(
        functional([keras.layers.LayerNormalization, keras.layers.UnitNormalization]), slow=True
    ),
    "frozen layers": row(frozen, slow=True),
    "class weights": row(data=(X, Y), fit={"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}, slow=True),
    "clipnorm": row(optimizer=adam(clipnorm=0.01), slow=True),
    "global_clipnorm": row(optimizer=adam(global_clipnorm=0.01), slow=True),
    "clipvalue": row(optimizer=adam(clipvalue=0.01), slow=True),
    "weight decay and constraints": row(
        functional(kernel_constraint=keras.constraints.MaxNorm(0.5)), optimizer=adam(weight_decay=0.1), slow=True
    ),
    "accumulation, averages": row(
        optimizer=lambda: keras.optimizers.SGD(
            0.1, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
        )
    ),
    "loss_scale_factor": row(optimizer=lambda: keras.optimizers.SGD(0.1, loss_scale_factor=1024.0), slow=True),
    "several steps a call": row(steps_per_execution=3),
    "eagerly": row(run_eagerly=True, slow=True),
    "compiled by XLA": row(jit_compile=True),
}


def run(model_class, row):
    keras.utils.set_random_seed(0)
    model = row["make"](model_class)
    options = {name: value() if callable(value) else value for name, value in row["options"].items()}
    model.compile(optimizer=row["optimizer"](), loss=row["loss"](), **options)
    x, y, *weight = row["data"]
    data = batches(*row["data"])
    if "steps_per_epoch" in row["fit"]:
        data = data.repeat()
    history = model.fit(data, epochs=2, verbose=0, **row["fit"]).history
    scores = model.evaluate(batches(*row["data"]), verbose=0, return_dict=True)
    numbers = {**history, **{f"evaluate {name}": value for name, value in scores.items()}}
    numbers |= {f"weights {i}": weight for i, weight in enumerate(model.get_weights())}
    return numbers | {"predict": model.predict(batches(x), verbose=0)}


PLAIN = {}


@pytest.mark.parametrize(
    "replicas", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=pytest.mark.slow if row["slow"] else ()) for name, row in ROWS.items()]
)
def test_replicas_compute_what_one_device_does(feature, replicas):
    strategy = make_strategy(replicas)
    if feature not in PLAIN:
        PLAIN[feature] = run(keras.Model, ROWS[feature])
    with strategy.scope():
        ours = run(data_parallel(keras.Model), ROWS[feature])
    assert ours.keys() == PLAIN[feature].keys()
    for name, value in PLAIN[feature].items():
        for mine, theirs in zip(tf.nest.flatten(ours[name]), tf.nest.flatten(value), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "make", [functional([keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.1)]), sequential]
)
def test_what_is_saved_is_the_plain_class(make, tmp_path):
    with make_strategy(2).scope():
        model = make(data_parallel(keras.Model))
        model.compile("adam", cross_entropy(), metrics=["accuracy"])
        model.fit(batches(X, Y), verbose=0)
        model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert not hasattr(again, "told_to_stop")
    assert type(again).__module__.startswith("keras.")
    np.testing.assert_allclose(again.predict(X, verbose=0), model.predict(batches(X), verbose=0), atol=1e-6)
    again.fit(X, Y, verbose=0)


def test_arrays_splits_callbacks_and_single_batches(tmp_path):
    """What Keras's own `fit` does beside, on two replicas as on none."""

    def run(model_class):
        keras.utils.set_random_seed(0)
        model = functional()(model_class)
        model.compile(keras.optimizers.SGD(0.1), cross_entropy(), metrics=["accuracy"])
        callbacks = [
            keras.callbacks.EarlyStopping(patience=3),
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras"),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=10.0),
            keras.callbacks.TensorBoard(tmp_path / "board"),
        ]
        first = model.fit(X, Y, BATCH, 3, validation_split=0.3, callbacks=callbacks, shuffle=False, verbose=0).history
        own = [model.train_on_batch(X[:7], Y[:7]), model.test_on_batch(X[:1], Y[:1]), model.predict_on_batch(X[:6])]
        return *first.values(), *own, model.optimizer.learning_rate.numpy(), *model.get_weights()

    plain = run(keras.Model)
    with make_strategy(2).scope():
        ours = run(data_parallel(keras.Model))
    for mine, theirs in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"make": functional([keras.layers.BatchNormalization]), "jit_compile": True},
            "BatchNormalization needs the whole batch",
        ),
        ({"make": functional(kernel_regularizer="l2"), "jit_compile": True}, "leave out jit_compile"),
        ({"loss": lambda: batchwise, "data": (X, Y), "jit_compile": True}, "a loss, metric"),
    ],
)
def test_what_cannot_be_exact_is_refused(options, message):
    with make_strategy(2).scope(), pytest.raises(ValueError, match=message):
        run(data_parallel(keras.Model), row(**options))
