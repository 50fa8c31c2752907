"""What looks at a whole batch, or at all replicas, in a place of its own: labels, metrics of layers, nested graphs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_replicas import UserError, data_parallel, make_strategy
from tests.conftest import assert_same, slow

ROWS, BATCH, FEATURES = 13, 4, 3  # the last batch has one row, so that replicas have none
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, FEATURES)).astype("float32")
Y = RANDOM.normal(size=(ROWS, 1)).astype("float32")
SIGNS = np.array([1, 0, 1, 0, -1, 1, 0, 1, 1, 0, -1, 1, 0], "float32")[:, None]


def fit(wrap, hidden=(), loss="mse", metrics=(), y=Y, units=1):
    keras.utils.set_random_seed(0)
    model = wrap(keras.Sequential([keras.Input((FEATURES,)), *(make() for make in hidden), layers.Dense(units)]))
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=[make() for make in metrics])
    history = model.fit(X, y, BATCH, 2, shuffle=False, verbose=0, validation_data=(X, y)).history
    return [*history.values(), *model.evaluate(X, y, BATCH, verbose=0, return_dict=True).values(), *model.get_weights()]


def assert_right(replicas=2, **given):
    plain = fit(lambda model: model, **given)
    with make_strategy(replicas).scope():
        assert_same(fit(data_parallel, **given), plain, rtol=1e-5, atol=1e-6)


LOSSES = {
    "hinge": "hinge",
    "squared_hinge": keras.losses.SquaredHinge,
    "function": lambda: keras.losses.hinge,
    "CategoricalHinge": keras.losses.CategoricalHinge,
}


@pytest.mark.parametrize("name", ["hinge", *slow(*(name for name in LOSSES if name != "hinge"))])
def test_hinge_losses_look_at_all_labels(name):
    loss = LOSSES[name]
    assert_right(loss=loss if isinstance(loss, str) else loss(), y=SIGNS)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [keras.metrics.Hinge, keras.metrics.SquaredHinge, lambda: "hinge"])
def test_hinge_metrics_look_at_all_labels(metric):
    assert_right(metrics=[metric], y=SIGNS)


class Flat(layers.Layer):
    def call(self, x):
        return ops.squeeze(x, -1)


OF_ONE_AXIS = ("mse", "mae", "binary_crossentropy", "huber", "log_cosh", "poisson", "cosine_similarity", "hinge")


@pytest.mark.slow
@pytest.mark.parametrize("loss", OF_ONE_AXIS)
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.long)])
def test_outputs_without_a_second_axis(loss, replicas):
    def run(wrap):
        keras.utils.set_random_seed(0)
        parts = [keras.Input((FEATURES,)), layers.Dense(1, activation="sigmoid"), Flat()]
        model = wrap(keras.Sequential(parts))
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["mae", "mse"])
        y = np.abs(SIGNS[:, 0])
        history = model.fit(X, y, BATCH, 2, shuffle=False, verbose=0).history
        return [*history.values(), *model.get_weights()]

    plain = run(lambda model: model)
    with make_strategy(replicas).scope():
        assert_same(run(data_parallel), plain, rtol=1e-5, atol=1e-6)


class Watching(layers.Layer):
    """Updates a metric of Keras's in `call`."""

    def __init__(self, kind):
        super().__init__()
        self.metric = kind(name="watched")

    def call(self, x):
        is_sum = isinstance(self.metric, keras.metrics.Sum)
        self.metric.update_state(ops.ones_like(x[:, :1]) if is_sum else ops.log(ops.abs(x)))
        return x


@pytest.mark.parametrize("kind", [keras.metrics.Sum, *slow(keras.metrics.Mean)])
@pytest.mark.parametrize("replicas", [2, *slow(4)])
def test_a_metric_of_a_layer_counts_each_example_once(kind, replicas):
    assert_right(replicas, hidden=[lambda: Watching(kind)])


class Nested(layers.Layer):
    """Normalizes in a graph of its own."""

    def __init__(self, run):
        super().__init__()
        self.norm, self.run = layers.BatchNormalization(), run

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x, training=None):
        return self.run(lambda x: self.norm(x, training=training), x)


class Cell(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = layers.Dense(3), layers.BatchNormalization()
        self.state_size = self.output_size = 3

    def build(self, shape):
        self.dense.build((None, shape[-1] + 3))
        self.norm.build((None, 3))

    def call(self, x, states, training=None):
        state = self.norm(self.dense(ops.concatenate([x, states[0]], -1)), training=training)
        return state, [state]


NESTED = {
    "tf.cond": lambda normalize, x: tf.cond(tf.reduce_sum(x) < 1e9, lambda: normalize(x), lambda: x),
    "tf.map_fn": lambda normalize, x: tf.map_fn(lambda row: normalize(row[None])[0], x),
    "tf.vectorized_map": lambda normalize, x: tf.vectorized_map(lambda row: normalize(row[None])[0], x),
    "tf.function": lambda normalize, x: tf.function(normalize)(x),
    "tf.while_loop": lambda normalize, x: tf.while_loop(
        lambda number, _: number < 2, lambda number, x: (number + 1, normalize(x)), (0, x)
    )[1],
}


@pytest.mark.parametrize(
    "name", ["tf.vectorized_map", *slow(*(name for name in NESTED if name != "tf.vectorized_map"))]
)
def test_batch_normalization_in_a_nested_graph_is_refused(name):
    with make_strategy(2).scope():
        model = data_parallel(keras.Sequential([keras.Input((FEATURES,)), Nested(NESTED[name]), layers.Dense(1)]))
        model.compile("sgd", "mse")
    with pytest.raises(UserError, match="normalizes inside a loop") as refused:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_batch_normalization_in_a_cell_is_refused():
    with make_strategy(2).scope():
        model = data_parallel(keras.Sequential([keras.Input((4, 2)), layers.RNN(Cell()), layers.Dense(1)]))
        model.compile("sgd", "mse")
    with pytest.raises(UserError, match="as of keras.layers.RNN"):
        model.fit(np.zeros((8, 4, 2), "float32"), Y[:8], batch_size=BATCH, verbose=0)


class Masked(layers.Layer):
    """A convolution of which `call` masks the kernel, as PixelCNN's does."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(FEATURES)

    def build(self, shape):
        self.dense.build(shape)
        self.mask = np.tri(FEATURES, dtype="float32")

    def call(self, x):
        self.dense.kernel.assign(self.dense.kernel * self.mask)
        return self.dense(x)


class Counted(layers.Layer):
    """A counter of calls, which says nothing of how replicas combine it, and needs to say nothing."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x + 0.1 * self.calls


@pytest.mark.parametrize("kind", [Masked, *slow(Counted)])
@pytest.mark.parametrize("replicas", [2, *slow(4)])
def test_a_weight_that_call_sets_from_weights_needs_no_word(kind, replicas):
    assert_right(replicas, hidden=[kind])


class Averaging(layers.Layer):
    """State that depends on the examples, in two steps."""

    def build(self, shape):
        self.first = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="mean")
        self.second = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.first.assign(ops.mean(x))
        self.second.assign(2.0 * self.first)
        return x


@pytest.mark.slow
def test_state_that_depends_on_examples_by_other_state_is_refused():
    with make_strategy(2).scope():
        model = data_parallel(keras.Sequential([keras.Input((FEATURES,)), Averaging(), layers.Dense(1)]))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="is updated in each step, from one replica's examples"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
