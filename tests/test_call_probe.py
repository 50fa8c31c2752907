"""Calls that compare examples, and losses that layers add: what `fit` tells when it begins, and leaves as it was."""

import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_replicas import UserError, data_parallel, make_strategy, private
from keras_replicas.call_probe import probe_call
from keras_replicas.trial_run import undone
from tests.conftest import assert_same, slow

EXAMPLES, BATCH, FEATURES, LENGTH = 22, 8, 4, 6
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, FEATURES)).astype("float32")
Y = RANDOM.normal(size=(EXAMPLES, 1)).astype("float32")
LENGTHS = RANDOM.integers(1, LENGTH + 1, EXAMPLES)
IDS = np.where(np.arange(LENGTH) < LENGTHS[:, None], RANDOM.integers(1, 9, (EXAMPLES, LENGTH)), 0)
IMAGES = RANDOM.normal(size=(EXAMPLES, 8, 8, 2)).astype("float32")


class OfCall(keras.Model):
    """A model whose `call` is a function of a dense layer's outputs."""

    def __init__(self, function):
        super().__init__()
        self.dense, self.last = layers.Dense(FEATURES), layers.Dense(1)
        self.function = function

    def call(self, x):
        return self.last(self.function(self.dense(x)))


class Layer(layers.Layer):
    """A layer that computes a function."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(x)


class Ids(keras.Model):
    """A model of tokens: an embedding, a function of its vectors and of which tokens are given, and a mean."""

    def __init__(self, function):
        super().__init__()
        self.table, self.last = layers.Embedding(9, FEATURES), layers.Dense(1)
        self.function = function

    def call(self, ids):
        return self.last(ops.mean(self.function(self.table(ids), ops.cast(ids != 0, "float32")), axis=1))


def softmax_over(axis):
    return lambda h: ops.softmax(h, axis=axis)


COMPARING = {
    "centred by the batch": lambda h: h - ops.mean(h, axis=0),
    "standardised by the batch": lambda h: (h - ops.mean(h, 0)) / (ops.std(h, 0) + 1.0),
    "divided by the batch's norm": lambda h: h / (1.0 + ops.norm(h)),
    "divided by the largest": lambda h: h / (1.0 + ops.max(ops.abs(h))),
    "softmax over the batch": softmax_over(0),
    "cumulative sum": lambda h: ops.cumsum(h, axis=0),
    "reversed": lambda h: h + 0.1 * ops.flip(h, axis=0),
    "rolled": lambda h: h + ops.roll(h, 1, axis=0),
    "tensordot over the batch": lambda h: ops.matmul(h, ops.tensordot(ops.transpose(h), h, axes=1)),
    "similarity to the others": lambda h: ops.matmul(ops.softmax(ops.matmul(h, ops.transpose(h))), h),
    "sorted": lambda h: ops.sort(h, axis=0),
    "the first example": lambda h: h - h[:1],
    "number of examples": lambda h: h / ops.cast(ops.shape(h)[0], "float32"),
    "attention over the batch": lambda h: ops.matmul(ops.softmax(ops.matmul(h, ops.transpose(h[:2]))), h[:2]),
    "batch as time": lambda h: layers.AveragePooling1D(2, 1, padding="same")(h[None])[0],
    "mixed with shuffled examples": lambda h: h + keras.random.shuffle(h),
    "mixed by TensorFlow's shuffle": lambda h: h + tf.random.shuffle(h),
    "top of the batch": lambda h: h * ops.cast(h >= ops.max(h, axis=0), "float32"),
}
OF_IDS = {
    "length of the longest": lambda e, given: e / ops.max(ops.sum(given, axis=1)),
    "mean over all tokens": lambda e, given: e - ops.sum(e * given[..., None], axis=(0, 1)) / ops.sum(given),
    "cut to the longest": lambda e, given: (
        e * ops.cast(ops.arange(LENGTH, dtype="float32") < ops.max(ops.sum(given, 1)), "float32")[:, None]
    ),
    "positions from the end of the longest": lambda e, given: (
        e * (ops.max(ops.sum(given, 1)) - ops.arange(LENGTH, dtype="float32"))[:, None]
    ),
}
HARMLESS = {
    "dense": lambda h: ops.tanh(h),
    "softmax": softmax_over(-1),
    "centred by the example": lambda h: h - ops.mean(h, axis=-1, keepdims=True),
    "layer normalization": lambda h: ops.layer_normalization(h, ops.ones(FEATURES), ops.zeros(FEATURES)),
    "sorted features": lambda h: ops.sort(h, axis=-1),
    "constant": lambda h: h + ops.arange(FEATURES, dtype="float32"),
    "one column": lambda h: h * h[:, :1],
    "outer product": lambda h: ops.reshape(h[:, :, None] * h[:, None, :], (-1, FEATURES * FEATURES)),
    "size taken and dropped": lambda h: ops.reshape(h, (ops.shape(h)[0], FEATURES)),
    "large values": lambda h: 1e4 + h,
    "small values": lambda h: 1e-6 * h,
    "map over examples": lambda h: tf.map_fn(lambda row: row * 2.0, h),
}
HARMLESS_LAYERS = {
    "dropout": (X, lambda: [layers.Dropout(0.5)]),
    "noise": (X, lambda: [layers.GaussianNoise(0.3, seed=1)]),
    "batch normalization": (X, lambda: [layers.Dense(FEATURES), layers.BatchNormalization()]),
    "convolutions": (IMAGES, lambda: [layers.Conv2D(3, 3), layers.BatchNormalization(), layers.Flatten()]),
    "augmentation": (IMAGES, lambda: [layers.RandomRotation(0.1, seed=1), layers.Flatten()]),
    "recurrent": (X[:, :, None], lambda: [layers.LSTM(3)]),
    "embedding": (IDS, lambda: [layers.Embedding(9, 3, mask_zero=True), layers.GRU(3)]),
    "attention": (X[:, :, None], lambda: [SelfAttention(), layers.Flatten()]),
}


class SelfAttention(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


def make(build, **options):
    with make_strategy(2).scope():
        keras.utils.set_random_seed(0)
        model = data_parallel(build(), **options)
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def told(model, x, **given):
    """The warnings of a `fit` of one epoch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, Y, **{"batch_size": BATCH, "verbose": 0} | given)
    return [str(each.message) for each in caught if "several replicas" in str(each.message)]


def quick(table, *names):
    return [*names, *slow(*(name for name in table if name not in names))]


@pytest.mark.parametrize("name", quick(COMPARING, "centred by the batch", "number of examples"))
def test_a_call_that_compares_examples_is_told(name):
    (text,) = told(make(lambda: OfCall(COMPARING[name])), X)
    assert "the outputs of OfCall.call for an example depend on the other" in text and "keras_replicas.check" in text


@pytest.mark.parametrize("name", quick(OF_IDS, "length of the longest"))
def test_a_length_taken_from_the_longest_is_told(name):
    (text,) = told(make(lambda: Ids(OF_IDS[name])), IDS)
    assert "the outputs of Ids.call for an example depend" in text


@pytest.mark.parametrize("name", quick(HARMLESS, "dense"))
def test_a_call_that_compares_nothing_is_not_told(name):
    assert told(make(lambda: OfCall(HARMLESS[name])), X) == []


@pytest.mark.parametrize("name", quick(HARMLESS_LAYERS, "dropout"))
def test_layers_that_compare_nothing_are_not_told(name):
    x, hidden = HARMLESS_LAYERS[name]
    model = make(lambda: keras.Sequential([keras.Input(x.shape[1:]), *hidden(), layers.Dense(1)]))
    assert told(model, x) == []


def test_the_first_layer_is_named():
    def build():
        inner = keras.Sequential([layers.Dense(3), Layer(COMPARING["centred by the batch"], name="centred")])
        return keras.Sequential(
            [keras.Input((FEATURES,)), inner, Layer(COMPARING["sorted"], name="later"), layers.Dense(1)]
        )

    (text,) = told(make(build), X)
    assert "the outputs of the layer centred for an example depend" in text and "later" not in text


def test_one_warning_for_all_epochs_validation_and_evaluate():
    model = make(lambda: OfCall(COMPARING["centred by the batch"]))
    assert len(told(model, X, epochs=3, validation_data=(X, Y))) == 1
    assert told(model, X) == []


def test_the_option_leaves_it_out():
    assert told(make(lambda: OfCall(COMPARING["centred by the batch"]), probe_call=False), X) == []
    with pytest.raises(ValueError, match="probe_call must be True or False, not 1"):
        data_parallel(keras.Sequential, probe_call=1)


def test_one_replica_and_no_strategy_are_not_told():
    for scope in (make_strategy(1).scope, lambda: warnings.catch_warnings()):
        with scope():
            model = data_parallel(OfCall(COMPARING["centred by the batch"]))
            model.compile("sgd", "mse")
        assert told(model, X) == []


def batched(x, shuffled=False):
    data = tf.data.Dataset.from_tensor_slices((x, Y))
    data = data.shuffle(EXAMPLES, seed=5) if shuffled else data
    return data.batch(BATCH)


def yielded():
    for start in range(0, EXAMPLES, BATCH):
        yield X[start : start + BATCH], Y[start : start + BATCH]


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index * BATCH :][:BATCH], Y[index * BATCH :][:BATCH]


class Remembering(keras.Model):
    """A model whose `call` changes Python attributes, draws, adds losses and updates metrics and variables."""

    def __init__(self):
        super().__init__()
        self.dense, self.drop = layers.Dense(FEATURES), layers.Dropout(0.5, seed=3)
        self.normalized = layers.BatchNormalization()
        self.mean = keras.metrics.Mean(name="seen")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum", name="count")
        self.calls, self.kept, self.by_name = 0, [], {}

    def call(self, x, training=None):
        self.calls += 1
        self.kept.append("call")
        self.by_name["last"] = self.calls
        random.random()
        np.random.random()
        self.mean.update_state(ops.abs(x))
        self.count.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        self.add_loss(ops.mean(ops.square(x)))
        return self.normalized(self.drop(self.dense(x)), training=training)


def test_the_probe_leaves_no_trace():
    model = make(Remembering)
    model.fit(X[:BATCH], X[:BATCH], batch_size=BATCH, verbose=0)
    before = [np.array(variable) for variable in model.variables]
    attributes, states = dict(vars(model)), (random.getstate(), np.random.get_state()[1].copy())
    kept, named, losses = list(model.kept), dict(model.by_name), list(model._losses)
    generator = keras.random.SeedGenerator(5)
    private.set_global_attribute(private.GLOBAL_SEED_GENERATOR, generator)
    probe_call(model, tf.constant(X), training=True)
    assert private.get_global_attribute(private.GLOBAL_SEED_GENERATOR) is generator
    assert_same(before, [np.array(variable) for variable in model.variables])
    assert vars(model).keys() == attributes.keys()
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert (model.kept, model.by_name, model._losses) == (kept, named, losses)
    assert random.getstate() == states[0] and (np.random.get_state()[1] == states[1]).all()


def test_a_trial_run_puts_back_generators_of_tensorflow():
    model = make(Remembering)
    model.noise = tf.random.Generator.from_seed(1)
    before = model.noise.state.numpy()
    with undone(model):
        model.noise.normal([3])
        assert (model.noise.state.numpy() != before).any()
    assert (model.noise.state.numpy() == before).all()


@pytest.mark.parametrize("kind", ["arrays", *slow("data set", "shuffled data set", "generator", "PyDataset", "steps")])
def test_a_fit_is_bitwise_the_same_without_the_probe(kind):
    def fit(probed):
        model = make(Remembering, probe_call=probed)
        data = {
            "arrays": lambda: {"x": X, "y": X, "batch_size": BATCH},
            "data set": lambda: {"x": batched(X).map(lambda x, y: (x, x))},
            "shuffled data set": lambda: {"x": batched(X, shuffled=True).map(lambda x, y: (x, x))},
            "generator": lambda: {"x": ((x, x) for x, _ in [*yielded()] * 2), "steps_per_epoch": 3},
            "PyDataset": lambda: {"x": Numbered(), "shuffle": False},
            "steps": lambda: {"x": X, "y": X, "batch_size": BATCH, "steps_per_epoch": 2},
        }[kind]()
        history = model.fit(**data, epochs=2, verbose=0).history
        return [*history.values(), *model.get_weights()]

    assert_same(fit(True), fit(False))


class AddsLoss(layers.Layer):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


SUMS_AND_MEANS = {
    "a sum, as in Keras's guide": lambda x: 1e-2 * ops.sum(x),
    "a sum of squares": lambda x: 1e-2 * ops.sum(ops.square(x)),
    "a mean": lambda x: ops.mean(ops.square(x)),
    "a value for each example": lambda x: ops.mean(ops.square(x), axis=-1),
    "of nothing": lambda x: ops.convert_to_tensor(0.5),
}


@pytest.mark.parametrize("name", quick(SUMS_AND_MEANS, "a sum, as in Keras's guide", "a mean"))
@pytest.mark.parametrize("replicas", [2, *slow(4)])
def test_a_loss_that_a_layer_adds_counts_as_on_one_device(name, replicas):
    def fit(wrap):
        keras.utils.set_random_seed(0)
        hidden = layers.Dense(FEATURES, kernel_regularizer="l2"), AddsLoss(SUMS_AND_MEANS[name])
        model = wrap(keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(1)]))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        history = model.fit(X, Y, BATCH, 2, shuffle=False, verbose=0, validation_data=(X, Y)).history
        return [*history.values(), model.evaluate(X, Y, BATCH, verbose=0), *model.get_weights()]

    plain = fit(lambda model: model)
    with make_strategy(replicas).scope(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = fit(data_parallel)
    assert_same(ours, plain, rtol=1e-5, atol=1e-6)


def test_a_sum_that_few_examples_have_is_measured_on_the_whole_batch():
    x = X.copy()
    x[4::BATCH] = 6.0  # neither of the first three nor of the last two of a batch

    def fit(wrap):
        keras.utils.set_random_seed(0)
        adds = AddsLoss(lambda x: 1e-2 * ops.sum(ops.relu(x - 5.0)))
        model = wrap(keras.Sequential([keras.Input((FEATURES,)), adds, layers.Dense(1)]))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model.fit(x, Y, BATCH, 2, shuffle=False, verbose=0).history["loss"]

    plain = fit(lambda model: model)
    with make_strategy(2).scope():
        ours = fit(data_parallel)
    assert_same(ours, plain, rtol=1e-5)


def test_a_loss_that_is_neither_a_mean_nor_a_sum_is_told():
    hidden = AddsLoss(lambda x: ops.sqrt(ops.sum(ops.square(x))))
    model = make(lambda: keras.Sequential([keras.Input((FEATURES,)), hidden, layers.Dense(1)]))
    (text,) = told(model, X)
    assert "is neither the mean nor the sum over the examples" in text and "Give add_loss a value for each" in text


def test_a_batch_size_that_is_a_constant_is_refused():
    def build():
        return OfCall(lambda h: ops.reshape(ops.reshape(h, (BATCH, 2, 2)), (BATCH, FEATURES)))

    with pytest.raises(UserError, match="OfCall.call works on the batch of 8 examples, but not on a part") as refused:
        make(build).fit(X[:16], Y[:16], batch_size=BATCH, verbose=0)
    assert "\n" not in str(refused.value)


def test_a_constant_that_is_a_replicas_part_is_right():
    part = BATCH // 2
    model = make(lambda: OfCall(lambda h: ops.reshape(ops.reshape(h, (part, 2, 2)), (part, FEATURES))))
    model.fit(X[:16], Y[:16], batch_size=BATCH, verbose=0)


CALLS = []


class CountsCalls(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        CALLS.append(x.shape)
        return self.dense(x)


@pytest.mark.parametrize("kind", ["arrays", *slow("data set", "uneven data set", "steps")])
def test_the_probe_adds_three_calls_and_no_trace(kind):
    def count(probed):
        whole = BATCH * 2
        data = {
            "arrays": lambda: {"x": X[:whole], "y": Y[:whole], "batch_size": BATCH},
            "data set": lambda: {"x": batched(X)},
            "uneven data set": lambda: {"x": tf.data.Dataset.from_tensor_slices((X[:9], Y[:9])).batch(9)},
            "steps": lambda: {"x": X, "y": Y, "batch_size": BATCH, "steps_per_epoch": 2},
        }[kind]()
        model = make(CountsCalls, probe_call=probed)
        CALLS.clear()
        model.fit(**data, verbose=0)
        return len(CALLS)

    assert count(True) == count(False) + 3
