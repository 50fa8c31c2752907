"""`BatchNormalization` on several replicas: exact moments, gradients of every order, and graphs that stay small."""

import collections
import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas import data_parallel, make_strategy
from keras_replicas.batchnorm import moments_of_global_batch
from tests.conftest import assert_same, slow


def trained(build, x, y, replicas, batch_size=8, **options):
    """The losses and weights of a model that was trained on one device, or on replicas."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    strategy = make_strategy(replicas) if replicas else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        if strategy:
            data_parallel(model)
    history = model.fit(x, y, batch_size, epochs=2, shuffle=False, verbose=0, **options).history
    return [np.array(history["loss"]), *model.get_weights()]


@pytest.mark.parametrize("rows", [(6, 5), (11, 0)], ids=["uneven", "a replica without examples"])
def test_moments_far_from_zero_are_exact(rows):
    values = np.random.default_rng(0).normal(1e3, 1.0, (sum(rows), 4)).astype("float32")
    strategy = make_strategy(2)
    shards = iter(np.split(values, [rows[0]]))
    shards = strategy.experimental_distribute_values_from_function(lambda _: tf.constant(next(shards)))

    @tf.function(autograph=False)
    def moments():
        found = strategy.run(lambda shard: moments_of_global_batch(shard, (0,)), args=(shards,))
        return [strategy.experimental_local_results(each)[1] for each in found]

    mean, variance = moments()
    assert_same([mean], [values.astype("float64").mean(axis=0)], rtol=1e-6)
    assert_same([variance], [values.astype("float64").var(axis=0)], rtol=1e-4)


class WithSlope(keras.Model):
    """Returns y and dy/dx, as a physics-informed network: its loss is a gradient, and is differentiated again."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.norm = keras.layers.BatchNormalization()
        self.last = keras.layers.Dense(1)

    def call(self, x, training=False):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.last(self.norm(self.hidden(x), training=training))
        return keras.ops.concatenate([y, tape.gradient(y, x)], axis=-1)


@pytest.mark.parametrize("replicas", [2, *slow(4)])
def test_a_gradient_in_the_loss_equals_one_device(replicas):
    random = np.random.default_rng(0)
    x = random.normal(size=(19, 2)).astype("float32")
    y = random.normal(size=(19, 3)).astype("float32")
    assert_same(trained(WithSlope, x, y, replicas), trained(WithSlope, x, y, 0), rtol=1e-4, atol=1e-6)


class WithLosses(keras.layers.Layer):
    """Adds a loss, before a layer in which replicas wait for each other."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def test_layers_losses_before_normalization_are_each_replicas():
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 3)).astype("float32") * np.arange(1, 17)[:, None].astype("float32")

    def build():
        layers = [keras.Input((3,)), keras.layers.Dense(4), WithLosses(), keras.layers.BatchNormalization()]
        return keras.Sequential([*layers, WithLosses(), keras.layers.Dense(1)])

    assert_same(trained(build, x, x[:, :1], 2), trained(build, x, x[:, :1], 0), rtol=1e-4, atol=1e-6)


def deep(count):
    layers = [layer for _ in range(count) for layer in (keras.layers.Dense(3), keras.layers.BatchNormalization())]
    return keras.Sequential([keras.Input((3,)), *layers])


def with_state(count):
    return keras.Sequential([keras.Input((3,)), *[keras.layers.Dropout(0.1) for _ in range(count)], *deep(1).layers])


def with_outputs(count):
    x = keras.Input((3,))
    return keras.Model(x, [keras.layers.Dense(1)(x) for _ in range(count)])


SIZES = (8, 16, 32)


def work_of_first_step(build, count, monkeypatch):
    """How many operations the first step's graphs hold, and how many TensorFlow visits walking them backwards."""
    from tensorflow.python.framework import func_graph
    from tensorflow.python.ops import op_selector

    graphs, visited = [], collections.Counter()
    make_graph, walk = func_graph.FuncGraph.__init__, op_selector.get_backward_walk_ops

    def keep(graph, *positional, **options):
        make_graph(graph, *positional, **options)
        graphs.append(graph)

    def count_visits(*positional, **options):
        found = walk(*positional, **options)
        visited["operations"] += len(found)
        return found

    with make_strategy(2).scope():
        model = data_parallel(build(count))
        model.compile("sgd", "mse")
    outputs = len(model.outputs)
    y = [np.zeros((8, 1))] * outputs if outputs > 1 else np.zeros((8, 3))
    with monkeypatch.context() as patch:
        patch.setattr(func_graph.FuncGraph, "__init__", keep)
        patch.setattr(op_selector, "get_backward_walk_ops", count_visits)
        model.fit(np.zeros((8, 3)), y, batch_size=8, verbose=0)
    return sum(len(graph.get_operations()) for graph in graphs), visited["operations"]


@pytest.mark.parametrize("build", [deep, *slow(with_state, with_outputs)], ids=lambda build: build.__name__)
def test_the_first_steps_work_grows_linearly(build, monkeypatch):
    found = [work_of_first_step(build, count, monkeypatch) for count in SIZES]
    for small, medium, large in zip(*found, strict=True):
        assert large - medium <= 2.2 * (medium - small) + 100


NETWORKS = ("MobileNetV2", "ResNet50", "EfficientNetB0", "DenseNet121")


def without_draws(name):
    """A network of `keras.applications` with 64 x 64 images and 4 classes, whose dropout drops nothing."""
    network = getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=4)
    for layer in network._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return network


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_convolutional_networks_equal_one_device(name):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(14, 64, 64, 3)), np.eye(4)[random.integers(0, 4, 14)]
    keras.config.set_floatx("float64")
    try:
        ours, plain = (trained(lambda: without_draws(name), x, y, replicas) for replicas in (2, 0))
    finally:
        keras.config.set_floatx("float32")
    for mine, other in zip(ours, plain, strict=True):
        assert np.abs(mine - other).max() <= 1e-10 * max(np.abs(other).max(), 1e-3)
