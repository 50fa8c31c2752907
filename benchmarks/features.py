# SPDX-License-Identifier: Apache-2.0
"""The features of Keras that 1, 2 and 4 replicas are compared with plain Keras on one device by: a row for each.

Each trains a small model for two epochs of batches that do not divide; where its model, data, loss or metrics are its
own, it is evaluated, and where its model is, used to predict. `benchmarks/conformance.py` runs them all, and
tests/test_conformance.py holds the bound.
"""

import itertools
import re
import tempfile

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from keras_replicas import data_parallel, make_strategy
from keras_replicas.private import ACTIVITIES_ADD_UP, minor

BOUND = 1e-6
EXAMPLES, BATCH, FEATURES, CLASSES = 27, 8, 5, 3  # of the last batch, one of two replicas has 1, one of four none
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
Y = RANDOM.integers(0, CLASSES, EXAMPLES)
Z = RANDOM.normal(size=(EXAMPLES, 2)).astype(np.float32)
WEIGHT = RANDOM.uniform(0.2, 2.0, EXAMPLES).astype(np.float32)
WEIGHT[:5] = 0  # all that the first of two replicas has of the first batch
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[Y]
IDS = RANDOM.integers(1, 20, (EXAMPLES, 6)).astype(np.int32)
TEXT = {"token_ids": IDS, "padding_mask": np.arange(6) < RANDOM.integers(2, 7, (EXAMPLES, 1))}


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


def like(model_class, kind):
    """That kind of model, plain or data-parallel as `model_class` is."""
    return kind if model_class is keras.Model else data_parallel(kind)


def sequential(model_class):
    return like(model_class, keras.Sequential)([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(CLASSES)])


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
    return lambda model_class: like(model_class, kind)()


def cross_entropy(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def batchwise(y, predicted):
    losses = keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)
    return keras.ops.sqrt(keras.ops.mean(losses))


def sgd(**options):
    return lambda: keras.optimizers.SGD(0.1, momentum=0.9, **options)


def frozen(model_class):
    model = functional()(model_class)
    model.layers[1].trainable = False
    return model


def lora(model_class):
    model = functional()(model_class)
    model.layers[1].enable_lora(2)
    return model


class DenseGradient(keras.layers.Embedding):
    """What Keras's computes, by a product: its gradient has a row for each token, not for each place of one."""

    def call(self, inputs):
        return keras.ops.one_hot(inputs, self.input_dim) @ self.embeddings


def embedding(model_class):
    layer = DenseGradient if model_class is keras.Model else keras.layers.Embedding
    return like(model_class, keras.Sequential)([layer(20, 4), keras.layers.Flatten(), keras.layers.Dense(CLASSES)])


def causal_lm(model_class):
    task = like(model_class, keras_hub.models.GPT2CausalLM)
    return task(keras_hub.models.GPT2Backbone(20, 1, 2, 8, 16, dropout=0.0, max_sequence_length=6), preprocessor=None)


class Autoencoder(keras.Model):
    """Has a `train_step` of its own and no `call`, as keras.io's generative examples."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(2), keras.layers.Dense(FEATURES)])
        self.tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data):
        x, replicas = data[0], tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x - self.inner(x))) / replicas
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss * replicas)
        return {"loss": self.tracker.result()}


class Compiled(Autoencoder):
    """TensorFlow's word on a `train_step`."""

    train_step = tf.function(Autoencoder.train_step)


class Lazy(keras.Model):
    """Makes its layer when it is called, says that it is built, and has no loss of `compile`, which would call it."""

    def __init__(self):
        super().__init__()
        self.dense, self.built = None, True

    def call(self, x):
        self.dense = self.dense or keras.layers.Dense(CLASSES, kernel_initializer=keras.initializers.GlorotUniform(1))
        y = self.dense(x)
        self.add_loss(keras.ops.mean(keras.ops.square(y)))
        return y


def saturated(model_class):
    """Keras's losses take a softmax's logits: of large ones, probabilities would be cut off."""
    inputs = keras.Input((FEATURES,))
    outputs = keras.layers.Dense(CLASSES, activation="softmax")(keras.layers.Rescaling(50.0)(inputs))
    return model_class(inputs, outputs)


class Adding(keras.layers.Layer):
    """Adds a value for each example."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(x), axis=-1, keepdims=True))
        return x


class State(keras.layers.Layer):
    """What a layer may keep and a function (state, x, training) updates; it begins at more than float32 can count."""

    def __init__(self, update, aggregation="sum", dtype="int64", begin=2**24 + 1):
        super().__init__()
        self.update, self.given = update, {"dtype": dtype, "aggregation": aggregation, "trainable": False}
        self.begin = keras.initializers.Constant(begin)

    def build(self, shape):
        self.state = self.add_weight((), initializer=self.begin, **self.given)

    def call(self, x, training=False):
        self.update(self.state, x, training)
        return x


def keeps(update, *given):
    return functional([lambda: State(update, *given)])


def count(state, x, training):
    """Of examples; `evaluate` changes it too."""
    state.assign_add(tf.shape(x, out_type=tf.int64)[0])


def count_in_cond(state, x, training):
    """The same, in a `tf.cond` and in a loop."""
    if training:
        tf.cond(tf.size(x) > 0, lambda: state.assign_add(1), lambda: tf.identity(state.value))
    tf.while_loop(lambda i: i < tf.shape(x)[0] - 1, lambda i: i + tf.cast(state.assign_add(1) > 0, i.dtype), [0])


def average(state, x, training):
    """A moving average of the examples, from 1e30."""
    if training:
        state.assign(tf.where(state > 1e20, 0.0, 0.9 * state) + 0.1 * tf.reduce_mean(x))


def largest(state, x, training):
    """Of which no aggregation is known."""
    state.assign(tf.maximum(state, tf.reduce_max(x)))


def looked_up(model_class):
    """The lookup refuses what is not in its vocabulary."""
    words = keras.Input((1,), dtype="string")
    ids = keras.layers.StringLookup(vocabulary=list("abc"), num_oov_indices=0)(words)
    outputs = keras.layers.Flatten()(keras.layers.Embedding(3, 4)(ids))
    return model_class(words, keras.layers.Dense(CLASSES)(outputs))


class Flat(keras.Model):
    """Outputs [batch x time, vocabulary]."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(20)

    def call(self, ids):
        return keras.ops.reshape(self.dense(keras.ops.one_hot(ids, 20)), (-1, 20))


class FlatCrossEntropy(keras.losses.Loss):
    """Its own, and adds up."""

    adds_up = True

    def call(self, y, predicted):
        return keras.losses.sparse_categorical_crossentropy(keras.ops.reshape(y, (-1,)), predicted, from_logits=True)


def of_ragged(y, predicted):
    return tf.reduce_mean((tf.reduce_mean(y, axis=-1, keepdims=True) - predicted) ** 2)


def ragged_batches(x):
    lengths = [FEATURES, *[FEATURES + 1, FEATURES - 1] * (EXAMPLES // 2)]
    return batches(x, tf.RaggedTensor.from_row_lengths(X.ravel(), lengths))


def from_ragged(model, x, *rest):
    return model.fit(ragged_batches(x), epochs=2, verbose=0).history


def float8(model_class):
    model = functional()(model_class)
    model.layers[1].quantize("float8")
    return model


def spectral():
    return keras.layers.SpectralNormalization(keras.layers.Dense(6))


def one_step(model, *data):
    return model.fit(batches(*data).take(1), verbose=0).history


def multi_optimizer():
    optimizers = keras.optimizers
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(sgd()(), {"y/.*": optimizers.Adam(0.01)}))


def from_arrays(model, x, *rest):
    return model.fit(x, *rest[:1], BATCH, 2, verbose=0, shuffle=False, sample_weight=(*rest, None)[1]).history


def from_generator(model, *data):
    steps = -(-EXAMPLES // BATCH)
    endless = itertools.chain.from_iterable(itertools.repeat(list(batches(*data))))
    return model.fit((b for b in endless), epochs=2, steps_per_epoch=steps, shuffle=False, verbose=0).history


class Batches(keras.utils.PyDataset):
    def __init__(self, *data):
        super().__init__(workers=2)
        self.batches = list(batches(*data).as_numpy_iterator())

    num_batches = property(lambda self: len(self.batches))

    def __getitem__(self, index):
        return self.batches[index]


def from_py_dataset(model, *data):
    return model.fit(Batches(*data), epochs=2, shuffle=False, verbose=0).history


def with_validation(model, *data):
    return model.fit(*data[:2], BATCH, 2, validation_split=0.3, shuffle=False, verbose=0).history


def on_batches(model, x, y, weight):
    steps = [slice(0, 7), slice(7, 8), slice(8, 16)]
    train = [model.train_on_batch(x[s], y[s], sample_weight=weight[s]) for s in steps]
    others = model.test_on_batch(x[:3], y[:3]), model.predict_on_batch(x[:5])
    return {"train_on_batch": train, "test_on_batch": others[0], "predict_on_batch": others[1]}


def interrupted(save_and_load):
    """Ours is saved and loaded after an epoch, and what was loaded is trained on; plain Keras's goes on as it is."""

    def train(model, *data):
        first, again = model.fit(batches(*data), verbose=0).history, model
        if hasattr(model, "plain_class"):  # ours
            with model.distribute_strategy.scope(), tempfile.TemporaryDirectory() as folder:
                again = data_parallel(save_and_load(model, folder))
        second = again.fit(batches(*data), verbose=0).history
        model.set_weights(again.get_weights())  # what is compared
        return {name: (first[name], second[name]) for name in first}

    return train


@interrupted
def in_a_file(model, folder):
    model.save(f"{folder}/model.keras")
    again = keras.saving.load_model(f"{folder}/model.keras")
    assert type(again).__module__.startswith("keras.") and not hasattr(again, "told_to_stop")
    return again


@interrupted
def in_a_preset(model, folder):
    """It has no optimizer."""
    model.save_to_preset(folder)
    again = keras_hub.models.CausalLM.from_preset(folder, preprocessor=None)
    again.compile(keras.optimizers.SGD(0.1), cross_entropy())
    return again


def row(make=None, data=None, loss=None, evaluated=None, predicts=None, **given):
    """One feature.

    Args:
        make: a function of `keras.Model`, or of what `data_parallel` makes of it, that gives the model.
        data: (x, y, weight) or fewer, arrays.
        loss: a function that makes it; so does `optimizer`.
        evaluated, predicts: whether it is evaluated, and used to predict.
        **given: `optimizer`; `fit`, its arguments, or a function of (model, *data) that trains it and returns numbers
            by name; `refused`, the numbers of replicas on which it is refused in words; `accumulate`; `bound`, of the
            difference; the rest are options of `compile`, or functions that make them.
    """
    found = {"optimizer": sgd(), "fit": {}, "refused": (), "accumulate": 1, "bound": BOUND}
    found |= {name: given.pop(name) for name in found if name in given}
    found |= {"make": make or functional(), "data": data or (X, Y, WEIGHT), "loss": loss or cross_entropy}
    found["evaluated"] = bool(make or data or loss or given) if evaluated is None else evaluated
    return found | {"options": given, "predicts": make is not None if predicts is None else predicts}


def two(**options):
    """Two inputs and two outputs.

    In plain Keras 3.16, an output's loss of an epoch is a mean weighted by the size of a batch, but by 1 for a last
    smaller one, whose size TensorFlow does not tell: there, batches are whole.
    """
    options = {"loss": lambda: [cross_entropy(), "mae"]} | options
    count = len(X) // BATCH * BATCH if minor(keras.__version__) >= [3, 16] else len(X)
    data = ((X, Z), (Y, Z), (WEIGHT, np.ones_like(WEIGHT)))
    return row(two_outputs, keras.tree.map_structure(lambda values: values[:count], data), **options)


accuracy = {"metrics": lambda: ["accuracy"]}
normalised = functional([keras.layers.BatchNormalization])
ROWS = {
    "functional model, `sample_weight`": row(functional(), (X, Y, WEIGHT)),
    "`Sequential`": row(sequential),
    "subclassed, with a `compute_loss` of its own and `add_loss`": row(own(WithOwnLoss), (X, Y)),
    "subclassed, with a `compute_metrics` of its own": row(own(WithOwnMetrics), (X, Y)),
    "KerasHub's `GPT2CausalLM`": row(
        causal_lm,
        (TEXT, (IDS + 1) % 20, TEXT["padding_mask"].astype(np.float32)),
        weighted_metrics=lambda: [keras.metrics.SparseCategoricalAccuracy()],
        bound=3e-6,
    ),
    "KerasHub's `GPT2CausalLM`, (x, y) without weights": row(causal_lm, (TEXT, (IDS + 1) % 20), bound=5e-6, **accuracy),
    "(x, y) without weights": row(data=(X, Y)),
    "a loss by name": row(sequential, (X, ONE_HOT), loss=lambda: "mse"),
    "a loss divided by the sum of the weights": row(loss=lambda: cross_entropy("mean_with_sample_weight")),
    "a loss that is a sum": row(loss=lambda: cross_entropy("sum"), optimizer=lambda: keras.optimizers.SGD(0.01)),
    "a loss function that compares a batch's examples": row(loss=lambda: batchwise, data=(X, Y)),
    "two inputs and outputs, a list of losses": two(metrics=lambda: [["accuracy"], ["mse"]]),
    "a dict of losses": two(loss=lambda: {"y": cross_entropy(), "z": "mae"}),
    "`loss_weights`": two(loss_weights=[0.3, 2.0]),
    "`metrics` and `weighted_metrics`": row(**accuracy, weighted_metrics=lambda: ["accuracy"]),
    "a metric of one's own": row(metrics=lambda: [Largest(), keras.metrics.SparseTopKCategoricalAccuracy(2)]),
    "AUC, F1 and precision": row(
        data=(X, ONE_HOT),
        loss=lambda: keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=lambda: [
            keras.metrics.AUC(from_logits=True, name="auc"),
            keras.metrics.F1Score(),
            keras.metrics.Precision(name="precision"),
        ],
    ),
    "`class_weight`": row(data=(X, Y), fit={"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
    "regularisers of weights and activities": row(
        functional(kernel_regularizer="l2", activity_regularizer="l1"), refused=(2, 4) if ACTIVITIES_ADD_UP else ()
    ),
    "`add_loss` of a value for each example": row(functional([Adding])),
    "constraints": row(functional(kernel_constraint=keras.constraints.MaxNorm(0.5))),
    "`BatchNormalization`": row(normalised),
    "`LayerNormalization`, `UnitNormalization`": row(
        functional([keras.layers.LayerNormalization, keras.layers.UnitNormalization])
    ),
    "`softmax` outputs of large logits": row(
        saturated, (X, ONE_HOT), loss=lambda: "categorical_crossentropy", optimizer=sgd(), bound=3e-6
    ),
    "frozen layers": row(frozen),
    "LoRA": row(lora),
    "`Embedding`, Adam; against Keras with the dense gradient": row(
        embedding, (IDS, Y), optimizer=lambda: keras.optimizers.Adam(0.01)
    ),
    "arrays": row(fit=from_arrays),
    "arrays, `validation_split`": row(fit=with_validation),
    "a generator": row(fit=from_generator),
    "a `PyDataset` with threads": row(fit=from_py_dataset),
    "`train_on_batch`, `test_on_batch`, `predict_on_batch`": row(fit=on_batches),
    "saved as `.keras` and loaded, then trained on": row(
        fit=in_a_file,
        optimizer=lambda: keras.optimizers.Adam(0.01),
        loss=lambda: cross_entropy("mean_with_sample_weight"),  # no mean of means is that of the whole
    ),
    "KerasHub's `GPT2CausalLM`, saved as a preset and loaded, then trained on": row(
        causal_lm, (TEXT, (IDS + 1) % 20), optimizer=lambda: keras.optimizers.SGD(0.1), fit=in_a_preset, bound=3e-6
    ),
    "`steps_per_execution`": row(steps_per_execution=3),
    "`run_eagerly`": row(run_eagerly=True),
    "`jit_compile`": row(jit_compile=True),
    "`jit_compile`, `BatchNormalization`": row(normalised, jit_compile=True),
    "`jit_compile`, regularisers": row(functional(kernel_regularizer="l2"), jit_compile=True),
    "`jit_compile`, a loss of one's own": row(loss=lambda: batchwise, data=(X, Y), jit_compile=True),
    "`jit_compile`, a metric of one's own": row(metrics=lambda: [Largest()], jit_compile=True),
    "a `train_step` of one's own, no `call`": row(own(Autoencoder), (X[:24],), evaluated=False, predicts=False),
    "`@tf.function` on a `train_step`": row(own(Compiled), (X[:24],), evaluated=False, predicts=False),
    "layers made in the first call": row(own(Lazy), (X,), loss=lambda: None),
    'a layer\'s count, `aggregation="sum"`': row(keeps(count)),
    "a layer's count in a `tf.cond` and a loop": row(keeps(count_in_cond), bound=3e-6),
    'a layer\'s moving average, `aggregation="mean"`': row(keeps(average, "mean", "float32", 1e30), bound=3e-6),
    "a layer's maximum": row(keeps(largest, "none", "float32", -np.inf), refused=(2, 4)),
    "words, of which a lookup refuses others": row(looked_up, (np.array(list("abc" * 8 + "a"))[:, None], Y[:25])),
    "outputs [batch x time, vocabulary], a loss that adds up": row(
        own(Flat), (IDS, IDS), loss=FlatCrossEntropy, predicts=False
    ),
    "outputs [batch x time, vocabulary], a loss that compares": row(
        own(Flat),
        (IDS, IDS),
        loss=lambda: lambda y, p: batchwise(keras.ops.reshape(y, (-1,)), p),
        refused=(2, 4),
        evaluated=False,
        predicts=False,
    ),
    "ragged labels, a loss of one's own": row(loss=lambda: of_ragged, data=(X,), fit=from_ragged, evaluated=False),
    "`SpectralNormalization`": row(functional([spectral])),
    "float8, one step: its values are few, and some are rounded to the next one": row(
        float8, fit=one_step, evaluated=False, predicts=False, bound=5e-3
    ),
    "`accumulate`, an argument of ours": row(data=(X[:24], Y[:24], WEIGHT[:24]), accumulate=2),
    "`accumulate`, KerasHub's `Perplexity`": row(
        causal_lm,
        ({name: values[:24] for name, values in TEXT.items()}, (IDS[:24] + 1) % 20),
        metrics=lambda: [keras_hub.metrics.Perplexity(from_logits=True)],
        accumulate=2,
        bound=3e-6,
    ),
    "`accumulate`, `BatchNormalization`": row(normalised, data=(X[:24], Y[:24]), accumulate=2, refused=(1, 2, 4)),
    "Adam": row(optimizer=lambda: keras.optimizers.Adam(0.01)),
    "`MultiOptimizer`": row(optimizer=multi_optimizer),
    "Muon": row(optimizer=lambda: keras.optimizers.Muon(0.01), bound=3e-6),
    "`weight_decay`": row(optimizer=sgd(weight_decay=0.1)),
    "`clipnorm`": row(optimizer=sgd(clipnorm=0.01)),
    "`global_clipnorm`": row(optimizer=sgd(global_clipnorm=0.01)),
    "`clipvalue`": row(optimizer=sgd(clipvalue=0.01)),
    "`gradient_accumulation_steps`": row(optimizer=sgd(gradient_accumulation_steps=2)),
    "`use_ema`": row(optimizer=sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)),
    "`loss_scale_factor`": row(optimizer=sgd(loss_scale_factor=1024.0)),
}


def run(model_class, row):
    """Numbers by name, of a model that is trained as the row says."""
    keras.utils.set_random_seed(0)
    model = row["make"](model_class)
    options = {name: value() if callable(value) else value for name, value in row["options"].items()}
    if model_class is not keras.Model:
        data_parallel(model, accumulate=row["accumulate"])
    model.compile(optimizer=row["optimizer"](), loss=row["loss"](), **options)
    data, train = row["data"], row["fit"]
    if callable(train):
        numbers = train(model, *data)
    else:
        numbers = model.fit(batches(*data), epochs=2, verbose=0, **train).history
    if row["evaluated"]:
        scores = model.evaluate(batches(*data), verbose=0, return_dict=True)
        numbers |= {f"evaluate {name}": value for name, value in scores.items()}
    if row["predicts"]:
        numbers["predict"] = model.predict(batches(data[0]), verbose=0)
    weights = [weight for weight in model.weights if not weight.path.endswith("key/bias")]  # of attention: mere noise
    return numbers | {f"weights {i}": weight.numpy() for i, weight in enumerate(weights)}


PLAIN: dict[str, dict] = {}
REFUSAL = ": set accumulate = 1|or use one replica"  # what to do instead


def outcome(feature: str, strategy: tf.distribute.Strategy) -> dict | str:
    """Numbers by name, or what refuses the feature."""
    try:
        with strategy.scope():
            return run(data_parallel(keras.Model), ROWS[feature])
    except ValueError as refusal:
        if strategy.num_replicas_in_sync not in ROWS[feature]["refused"]:
            raise
        return next(line for line in re.sub(r"\x1b\[\d*m", "", str(refusal)).splitlines() if re.search(REFUSAL, line))


def difference(feature: str, replicas: int) -> float | str:
    """The largest, of any loss, metric, weight or prediction, in parts of its tensor's largest; or what refuses it."""
    return away_from_plain(feature, outcome(feature, make_strategy(replicas)))


def away_from_plain(feature: str, ours: dict | str) -> float | str:
    if isinstance(ours, str):
        return ours
    if feature not in PLAIN:
        PLAIN[feature] = run(keras.Model, ROWS[feature])
    return largest_difference(ours, PLAIN[feature])


def largest_difference(ours: dict, plain: dict) -> float:
    assert ours.keys() == plain.keys()
    largest = 0.0
    for name, value in plain.items():
        for mine, theirs in zip(tf.nest.flatten(ours[name]), tf.nest.flatten(value), strict=True):
            mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
            assert mine.shape == theirs.shape, name
            largest = max(largest, np.abs(mine - theirs).max() / (np.abs(theirs).max() or 1.0))
    return float(largest)
