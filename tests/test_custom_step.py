"""A custom `train_step` or `test_step` is equivalent to one device, as it is written.

Each test trains a small model in plain Keras on one device, and the same on replicas. Of 19 rows in
batches of 8, the last batch has 3; of 17 it has 1, which leaves a replica without any.
"""

import contextlib
import functools
import gc
import itertools
import pickle
import random
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas import Checkpoints, data_parallel, exchange, is_chief, make_strategy
from tests.conftest import interrupt_at, long, python, slow

ROWS, BATCH, FEATURES, OUTPUTS, WORDS = 19, 8, 4, 3, 6
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = np.eye(OUTPUTS, dtype=np.float32)[RANDOM.integers(0, OUTPUTS, ROWS)]
IDS = RANDOM.integers(0, WORDS, (ROWS, FEATURES))
GLOBAL_OPTIMIZER: Any = None
GLOBAL_METRIC: Any = None
STEP_CALLS: list[int] = []  # an element for each Python call of `Counting.train_step`


class Ran(NamedTuple):
    """A model after `fit`, its numbers by name, and what the library warned of."""

    model: keras.Model
    numbers: dict[str, Any]
    warned: list[warnings.WarningMessage]


def arrays(rows=ROWS, **more):
    """Arguments of `fit`."""
    given = {"x": X[:rows], "y": Y[:rows], "batch_size": BATCH, "epochs": 2, "shuffle": False}
    return given | more


def arrays_of_17(**more):
    return arrays(17, **more)


REPLICAS = [2, *long(4)]
DATA = [arrays_of_17, *slow(arrays)]


def names(table, *quick):
    """The names of a table's rows; all but the quick ones are in the slow tier."""
    return [*quick, *slow(*(name for name in table if name not in quick))]


def run(make, strategy=None, *, data=arrays, evaluated=False, **options):
    """Trains what `make` returns: in plain Keras, or on the replicas of a strategy.

    Args:
        make: makes a compiled model.
        strategy: None for plain Keras.
        data: returns the arguments of `fit`.
        evaluated: whether to evaluate after that, with the same arrays.
        **options: of `data_parallel`.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    given = data()
    logs_of_batches = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: logs_of_batches.append(dict(logs)),
    )
    callbacks = [keep, *given.pop("callbacks", [])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # each once, as a user sees it
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = make()
            if strategy:
                data_parallel(model, **options)
        numbers = model.fit(**given, callbacks=callbacks, verbose=0).history
        if evaluated:
            batches = {name: given[name] for name in ("x", "y", "batch_size")}
            numbers["evaluate"] = model.evaluate(**batches, verbose=0, return_dict=True)
    numbers["logs of batches"] = logs_of_batches
    numbers |= {f"weight {i}": weight for i, weight in enumerate(model.get_weights())}
    return Ran(model, numbers, [warning for warning in caught if is_of_library(warning)])


def is_of_library(warning):
    return "keras_replicas" in warning.filename or "replica" in str(warning.message)


def assert_close(ours, plain, tolerance=1e-5):
    """The same structure of numbers, to a part of the largest of each tensor."""
    keras.tree.assert_same_structure(ours, plain)
    named, expected = keras.tree.flatten_with_path(ours), keras.tree.flatten(plain)
    for (path, mine), theirs in zip(named, expected, strict=True):
        theirs = np.asarray(theirs, np.float64)
        largest = np.abs(theirs[np.isfinite(theirs)]).max(initial=1e-3)
        np.testing.assert_allclose(mine, theirs, 0, tolerance * largest, err_msg=str(path))


def values(variables):
    return [variable.numpy() for variable in variables]


def assert_copies_are_equal(strategy, weights):
    """Each weight is bitwise the same on all replicas."""
    for weight in weights:
        first, *rest = strategy.experimental_local_results(weight.value)
        for copy in rest:
            np.testing.assert_array_equal(copy.numpy(), first.numpy(), weight.path)


def assert_equivalent(make, replicas=2, tolerance=1e-5, **given):
    """Replicas compute what plain Keras does, without a warning; returns both."""
    plain = run(make, **given)
    ours = run(make, make_strategy(replicas), **given)
    assert_close(ours.numbers, plain.numbers, tolerance)
    assert_copies_are_equal(ours.model.distribute_strategy, ours.model.weights)
    assert [str(warning.message) for warning in ours.warned] == []
    return plain, ours


def sgd(rate=0.1, **options):
    """Makes it in the strategy's scope."""
    return lambda: keras.optimizers.SGD(rate, **options)


SGD = sgd()


def adam(rate=0.01):
    return lambda: keras.optimizers.Adam(rate)


def custom(train_step, *hidden, optimizer=SGD, prepare=None, test_step=None, **compiled):
    """A function that makes a model whose class, `Custom`, has this `train_step`.

    Args:
        train_step: a function of (model, data); so is `test_step`.
        *hidden: functions that make layers.
        optimizer: a function that makes it.
        prepare: a function of the model that adds attributes to it.
        **compiled: options of `compile`.
    """
    steps = {"train_step": train_step, "test_step": test_step}
    kind = type("Custom", (keras.Model,), {name: step for name, step in steps.items() if step})

    def make():
        inputs = outputs = keras.Input((FEATURES,))
        for layer in (*hidden, lambda: keras.layers.Dense(OUTPUTS)):
            outputs = layer()(outputs)
        model = kind(inputs, outputs)
        if prepare:
            prepare(model)
        model.compile(optimizer(), **compiled)
        return model

    return make


def tanh():
    return keras.layers.Dense(5, "tanh")


def losses_of(model, x, y, training=True):
    """A value for each example."""
    return tf.reduce_mean(tf.square(model(x, training=training) - y), axis=-1)


def mean_loss(model, x, y):
    return tf.reduce_mean(losses_of(model, x, y))


def apply(model, gradients, weights):
    model.optimizer.apply(gradients, weights)


def apply_pairs(model, gradients, weights):
    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))


def minimize(loss=mean_loss, update=apply):
    """A `train_step` that minimizes a function of (model, x, y), and returns its value."""

    def train_step(model, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            value = loss(model, x, y)
        weights = model.trainable_variables
        update(model, tape.gradient(value, weights), weights)
        return {"value": tf.reduce_sum(value)}  # which a vector needs, and a number does not mind

    return train_step


# Losses


def squared_error(reduction):
    return lambda model, x, y: keras.losses.MeanSquaredError(reduction)(y, model(x, training=True))


def average_loss(**options):
    return lambda model, x, y: tf.nn.compute_average_loss(losses_of(model, x, y), **options)


MEANS = {
    "reduce_mean": mean_loss,
    "compute_loss": lambda model, x, y: model.compute_loss(x, y, model(x, training=True)),
    "keras.losses": squared_error("sum_over_batch_size"),
    "a function of keras.losses": lambda model, x, y: tf.reduce_mean(
        keras.losses.mean_squared_error(y, model(x, training=True)),
    ),
    "compute_average_loss": average_loss(),
}
SUMS = {
    "reduce_sum": lambda model, x, y: tf.reduce_sum(losses_of(model, x, y)),
    "a sum of keras.losses": squared_error("sum"),
    "compute_average_loss of a global batch size": average_loss(global_batch_size=BATCH),
    "a vector": losses_of,
}


@pytest.mark.parametrize("replicas", [2, *long(1, 4)])
@pytest.mark.parametrize("update", [apply, *slow(apply_pairs)])
@pytest.mark.parametrize("loss", names(MEANS, "reduce_mean"))
def test_a_mean_loss_trains_as_on_one_device(loss, update, replicas):
    make = custom(minimize(MEANS[loss], update), tanh, loss="mse")
    assert_equivalent(make, replicas)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("loss", names(SUMS, "reduce_sum"))
def test_a_sum_loss_trains_as_on_one_device(loss, replicas):
    assert_equivalent(custom(minimize(SUMS[loss]), tanh, optimizer=sgd(0.02)), replicas)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [mean_loss, SUMS["reduce_sum"]], ids=["mean", "sum"])
def test_adams_moments_are_those_of_one_device(loss):
    """Its first moments show what its steps do not."""
    make = custom(minimize(loss), tanh, optimizer=adam())
    plain, ours = assert_equivalent(make, data=arrays_of_17)
    assert_close(*(values(ran.model.optimizer.variables) for ran in (ours, plain)))


NUMBERS_OF_REPLICAS = {
    "get_strategy": lambda model: tf.distribute.get_strategy().num_replicas_in_sync,
    "a strategy that was kept": lambda model: model.kept_strategy.num_replicas_in_sync,
    "distribute_strategy": lambda model: model.distribute_strategy.num_replicas_in_sync,
    "get_replica_context": lambda model: tf.distribute.get_replica_context().num_replicas_in_sync,
}


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("how", names(NUMBERS_OF_REPLICAS, "get_strategy"))
def test_a_loss_divided_by_replicas_trains_the_same(how, replicas):
    def train_step(model, data):
        x, y = data
        number = NUMBERS_OF_REPLICAS[how](model)
        with tf.GradientTape() as tape:
            loss = mean_loss(model, x, y)
            share = loss / number
        weights = model.trainable_variables
        apply(model, tape.gradient(share, weights), weights)
        model.tracker.update_state(share * number)
        return {"tracked": model.tracker.result(), "last": loss}

    def prepare(model):
        vars(model)["kept_strategy"] = tf.distribute.get_strategy()
        model.tracker = keras.metrics.Mean(name="tracked")

    assert_equivalent(custom(train_step, tanh, prepare=prepare), replicas)


def test_a_scalar_counts_as_a_mean_without_measuring():
    """Batches are uneven, so that a mean of the shards' means is another number."""

    def train_step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = mean_loss(model, x, y)
        weights = model.trainable_variables
        apply(model, tape.gradient(loss, weights), weights)
        model.tracker.update_state(loss)
        return {"tracked": model.tracker.result(), "last": loss}

    def prepare(model):
        model.tracker = keras.metrics.Mean(name="tracked")

    make = custom(train_step, tanh, prepare=prepare)
    plain, ours = run(make), run(make, make_strategy(2), custom_step="mean")
    assert_close(ours.numbers, plain.numbers)


def masked_mean(model, x, y):
    mask = tf.cast(x[:, :OUTPUTS] > 0, tf.float32)
    return tf.reduce_sum(mask * tf.square(model(x, training=True) - y)) / tf.reduce_sum(mask)


def contrastive(model, x, y):
    """Each example against all others of the batch."""
    outputs = model(x, training=True)
    scores = tf.matmul(outputs, outputs, transpose_b=True)
    labels = tf.range(tf.shape(x)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))


def apply_clipped(model, gradients, weights):
    apply(model, tf.clip_by_global_norm(gradients, 0.01)[0], weights)


NEITHER = {
    "a mean of unmasked tokens": minimize(masked_mean),
    "clipped in the step": minimize(update=apply_clipped),
    "a contrastive loss": minimize(contrastive),
}


@pytest.mark.parametrize("name", names(NEITHER, "a mean of unmasked tokens"))
def test_neither_mean_nor_sum_warns_once_and_trains(name):
    make = custom(NEITHER[name], tanh)
    run(make)  # in plain Keras it trains
    untrained = run(make, make_strategy(2), data=lambda: arrays(epochs=0))
    ours = run(make, make_strategy(2))
    (warning,) = ours.warned
    assert issubclass(warning.category, UserWarning)
    assert "Custom.train_step" in str(warning.message) and "sgd" in str(warning.message).lower()
    for before, after in zip(untrained.model.get_weights(), ours.model.get_weights(), strict=True):
        assert np.isfinite(after).all() and (before != after).any()
    assert_copies_are_equal(ours.model.distribute_strategy, ours.model.weights)


def weight_by_threshold(model, gradients, weights):
    """Steps are smaller where the loss, which the model keeps, is below a threshold: of few examples, it is not."""
    factor = tf.where(model.kept_loss > 1e-3, 1.0, 0.5)
    apply(model, [gradient * factor for gradient in gradients], weights)


def kept_mean_loss(model, x, y):
    vars(model)["kept_loss"] = mean_loss(model, x, y)
    return model.kept_loss


def test_a_threshold_on_the_batchs_loss_is_warned_of():
    make = custom(minimize(kept_mean_loss, weight_by_threshold), tanh)
    (warning,) = run(make, make_strategy(2), data=arrays_of_17).warned
    assert "over the batch" in str(warning.message)


def contrastive_later(model, x, y):
    """The examples are compared from the second step on."""
    weight = 1.0 - tf.cast(model.optimizer.iterations == 0, tf.float32)
    return mean_loss(model, x, y) + weight * contrastive(model, x, y)


def test_what_a_step_does_later_is_warned_of():
    (warning,) = run(custom(minimize(contrastive_later), tanh), make_strategy(2)).warned
    assert "neither the mean nor the sum" in str(warning.message)


def rare(reduce):
    """A step whose loss is 0 for the first seven examples."""

    def loss(model, x, y):
        is_rare = tf.cast(tf.reduce_all(tf.equal(x, X[7]), axis=-1), tf.float32)
        return reduce(is_rare * losses_of(model, x, y))

    return loss


@pytest.mark.parametrize("reduce", [tf.reduce_sum, *slow(tf.reduce_mean)])
def test_a_loss_of_rare_examples_is_measured_on_the_whole_batch(reduce):
    def train_step(model, data):
        return minimize(rare(reduce))(model, data) | {"rare": reduce(tf.cast(data[0] == X[7], tf.float32))}

    assert_equivalent(custom(train_step, tanh), data=arrays_of_17)


def test_gradients_that_are_0_on_the_first_batch_are_warned_of():
    later = functools.partial(arrays_of_17, x=X[16::-1], y=Y[16::-1])
    (warning,) = run(custom(minimize(rare(tf.reduce_sum)), tanh), make_strategy(2), data=later).warned
    assert "are 0 on the first batch" in str(warning.message)


# Optimizers


def keep_in_list(model, optimizer):
    model.kept = [optimizer]


def keep_in_dict(model, optimizer):
    model.kept = {"first": optimizer}


def keep_as_attribute(model, optimizer):
    model.kept = optimizer


def keep_as_global(model, optimizer):
    global GLOBAL_OPTIMIZER
    GLOBAL_OPTIMIZER = optimizer


PLACES = {
    "compile": (lambda model, optimizer: None, lambda model: model.optimizer),
    "attribute": (keep_as_attribute, lambda model: model.kept),
    "list": (keep_in_list, lambda model: model.kept[0]),
    "dict": (keep_in_dict, lambda model: model.kept["first"]),
    "global": (keep_as_global, lambda model: GLOBAL_OPTIMIZER),
}


@pytest.mark.parametrize("place", names(PLACES, "list"))
def test_an_optimizer_works_wherever_it_is_kept(place):
    keep, find = PLACES[place]

    def update(model, gradients, weights):
        find(model).apply(gradients, weights)

    def prepare(model):
        keep(model, keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1))

    assert_equivalent(custom(minimize(update=update), tanh, prepare=prepare))


@pytest.mark.slow
def test_an_optimizer_works_in_a_closure():
    def make():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)

        def update(model, gradients, weights):
            optimizer.apply(gradients, weights)

        return custom(minimize(update=update), tanh)()

    assert_equivalent(make)


class Gan(keras.Model):
    """Two models and two optimizers, and no `call`; x are latent vectors, and y what is real."""

    def __init__(self):
        super().__init__()
        real = keras.Input((OUTPUTS,))
        self.generator = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(OUTPUTS)])
        self.discriminator = keras.Sequential([real, tanh(), keras.layers.Dense(1)])
        self.average = keras.Variable(0.0, trainable=False, aggregation="mean", name="average")
        self.d_metric = keras.metrics.Mean(name="d_loss")
        self.g_metric = keras.metrics.Mean(name="g_loss")

    @classmethod
    def make(cls):
        model = cls()
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
        return model

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def train_step(self, data):
        latent, real = data
        both = tf.concat([self.generator(latent), real], axis=0)
        labels = tf.concat([tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            fake = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(tf.zeros_like(fake), fake)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.average.assign(0.5 * self.average + 0.5 * tf.reduce_mean(fake))
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}

    def state(self):
        """All that training changes, but metrics."""
        optimizers = self.d_optimizer, self.g_optimizer
        variables = [*self.variables, *itertools.chain(*(each.variables for each in optimizers))]
        return values(variables)


@pytest.mark.parametrize("replicas", [2, *slow(4)])
@pytest.mark.parametrize("data", DATA)
def test_a_gan_trains_as_on_one_device(data, replicas):
    plain, ours = assert_equivalent(Gan.make, replicas, data=data)
    assert_close(ours.model.state(), plain.model.state())


def test_an_optimizer_may_be_applied_three_times():
    def train_step(model, data):
        for _ in range(3):
            logs = minimize()(model, data)
        return logs

    plain, ours = assert_equivalent(custom(train_step, tanh, optimizer=sgd(momentum=0.9)))
    for ran in (plain, ours):
        assert ran.model.optimizer.iterations.numpy() == 3 * 6


def scaled_mean(model, x, y):
    """As a loss must be where the optimizer scales it."""
    return model.optimizer.scale_loss(mean_loss(model, x, y))


def scaling(optimizer):
    """A row of a custom step with an optimizer that a function makes."""
    return custom(minimize(scaled_mean), tanh, optimizer=optimizer)


def loss_scaling():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))


def multi_optimizer():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("Keras before 3.15 has no MultiOptimizer")
    last = keras.optimizers.OptimizerMap(sgd(momentum=0.9)(), {"dense_1/.*": adam()()})
    return keras.optimizers.MultiOptimizer(last)


def constrained():
    return keras.layers.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.5))


OPTIMIZERS = {
    "clipnorm": scaling(sgd(clipnorm=0.1)),
    "global_clipnorm": scaling(sgd(global_clipnorm=0.1)),
    "clipvalue": scaling(sgd(clipvalue=0.02)),
    "gradient_accumulation_steps": scaling(sgd(gradient_accumulation_steps=2)),
    "use_ema": scaling(sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)),
    "loss_scale_factor": scaling(sgd(loss_scale_factor=1024.0)),
    "LossScaleOptimizer": scaling(loss_scaling),
    "MultiOptimizer": scaling(multi_optimizer),
    "weight_decay": scaling(sgd(weight_decay=0.1)),
    "AdamW": scaling(lambda: keras.optimizers.AdamW(0.01)),
    "constraint": custom(minimize(), constrained),
}


@pytest.mark.parametrize("name", names(OPTIMIZERS, "global_clipnorm", "LossScaleOptimizer"))
def test_an_optimizer_sees_the_global_batchs_gradient(name):
    plain, ours = assert_equivalent(OPTIMIZERS[name])
    assert_close(*(values(ran.model.optimizer.variables) for ran in (ours, plain)))


@pytest.mark.parametrize("row", [BATCH + 1, *slow(1)])
def test_an_infinite_gradient_is_skipped_on_all_replicas(row):
    """Of one example, in the second batch or in the first."""
    x = np.where(np.arange(ROWS)[:, None] == row, np.float32(1e30), X)
    make = custom(minimize(scaled_mean), optimizer=loss_scaling)
    plain, ours = assert_equivalent(make, data=lambda: arrays(x=x))
    assert_close(*(values(ran.model.optimizer.variables) for ran in (ours, plain)))
    optimizer = ours.model.optimizer
    assert optimizer.dynamic_scale.numpy() == 2.0**13  # halved twice, in two epochs
    assert optimizer.inner_optimizer.iterations.numpy() == 4
    assert all(np.isfinite(weight).all() for weight in ours.model.get_weights())


class DenseGradient(keras.layers.Embedding):
    """An embedding by a product, whose gradient has each repeated token once."""

    def call(self, inputs):
        return keras.ops.one_hot(inputs, self.input_dim) @ self.embeddings


def test_tokens_that_repeat_train_as_with_dense_gradients():
    def making(kind):
        return custom(minimize(), lambda: kind(WORDS, 2), keras.layers.Flatten, optimizer=adam())

    def data():
        return arrays(x=IDS)

    plain = run(making(DenseGradient), data=data)
    ours = run(making(keras.layers.Embedding), make_strategy(2), data=data)
    assert_close(ours.numbers, plain.numbers)
    assert ours.warned == []


# The option that decides


@keras.saving.register_keras_serializable("custom_step")
class Counting(keras.Model):
    """Counts the Python calls of its step, elsewhere than on the model."""

    def train_step(self, data):
        STEP_CALLS.append(1)
        return minimize(masked_mean)(self, data)


def counting(kind):
    inputs = keras.Input((FEATURES,))
    return kind(inputs, keras.layers.Dense(OUTPUTS)(inputs))


def loaded(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def of_class(word, folder):
    return counting(data_parallel(Counting, custom_step=word))


def of_instance(word, folder):
    return data_parallel(counting(Counting), custom_step=word)


def of_file(word, folder):
    return data_parallel(loaded(of_instance(word, folder), folder), custom_step=word)


def of_pickle(word, folder):
    again = pickle.loads(pickle.dumps(of_instance(word, folder)))
    return data_parallel(again, custom_step=word)


def of_clone(word, folder):
    return keras.models.clone_model(of_class(word, folder))


@pytest.mark.parametrize("word", ["mean", *slow("sum")])
@pytest.mark.parametrize("way", [of_class, of_file, *slow(of_instance, of_pickle, of_clone)])
def test_the_option_decides_without_measuring(way, word, tmp_path):
    """Each replica calls the step for each of three batches, and no more; nothing is warned of."""
    gc.collect()  # an optimizer of another test that is not built would be taken for one of this model's
    with make_strategy(2).scope():
        model = way(word, tmp_path)
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    STEP_CALLS.clear()
    with warnings.catch_warnings(action="error", category=UserWarning):
        model.fit(**arrays(epochs=1), verbose=0)
    assert len(STEP_CALLS) == 3 * 2


def test_with_the_option_a_step_is_traced_once():
    gc.collect()  # see above
    with make_strategy(2).scope():
        model = of_class("mean", None)
        model.compile("sgd")
    STEP_CALLS.clear()
    model.fit(**arrays(), verbose=0)
    assert len(STEP_CALLS) == 2  # once on each replica


@pytest.mark.slow
@pytest.mark.parametrize(("word", "loss"), [("mean", mean_loss), ("sum", SUMS["reduce_sum"])])
def test_a_correct_option_trains_as_on_one_device(word, loss):
    make = custom(minimize(loss), tanh, optimizer=sgd(0.02))
    plain = run(make)
    ours = run(make, make_strategy(2), custom_step=word)
    assert_close(ours.numbers, plain.numbers)
    assert ours.warned == []


@pytest.mark.parametrize("word", ["average", True, 1])
def test_any_other_option_is_refused(word):
    for target in (Counting, keras.Sequential()):
        with pytest.raises(ValueError, match=f"custom_step must be .*{word!r}"):
            data_parallel(target, custom_step=word)


# What measuring leaves


def remember(model):
    """Adds what a step changes, beside weights."""
    model.calls = 0
    model.notes = {"calls": 0}
    model.seen = []
    model.seeds = keras.random.SeedGenerator(1)
    model.average = keras.Variable(0.0, trainable=False, aggregation="mean", name="average")
    model.tracker = keras.metrics.Mean(name="tracked")


def leave_traces(model, data):
    x, y = data
    model.calls += 1
    model.notes["calls"] += 1
    model.seen.append(float(random.random() + np.random.normal()))
    noisy = x + 0.01 * keras.random.normal(tf.shape(x), seed=model.seeds)
    minimize()(model, (noisy, y))
    model.average.assign(0.5 * model.average + 0.5 * tf.reduce_mean(x))
    model.tracker.update_state(losses_of(model, x, y))
    return {"tracked": model.tracker.result()}


def bitwise_state(ran):
    """All that a step may change."""
    model = ran.model
    variables = [*model.variables, *model.optimizer.variables, *model.tracker.variables]
    return {
        "variables": [value.tolist() for value in values(variables)],
        "attributes": (model.calls, dict(model.notes), list(model.seen)),
        "random": random.getstate(),
        "numpy": [np.asarray(part).tolist() for part in np.random.get_state()],
        "numbers": tf.nest.map_structure(lambda value: np.asarray(value).tolist(), ran.numbers),
    }


@pytest.mark.parametrize("eagerly", [False, *slow(True)])
def test_measuring_leaves_no_trace(eagerly):
    """All is as with `custom_step="mean"`, which measures nothing."""
    hidden = tanh, keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.5)
    options = {"optimizer": adam(), "prepare": remember, "run_eagerly": eagerly}
    make = custom(leave_traces, *hidden, **options)
    measured = bitwise_state(run(make, make_strategy(2)))
    not_measured = bitwise_state(run(make, make_strategy(2), custom_step="mean"))
    for name, value in not_measured.items():
        assert measured[name] == value, name


class Beginning(keras.callbacks.Callback):
    """Keeps the weights as the first step finds them."""

    weights = None

    def on_train_batch_begin(self, batch, logs=None):
        if self.weights is None:
            self.weights = self.model.get_weights()


def test_the_first_step_begins_with_the_initial_weights():
    make = custom(leave_traces, keras.layers.BatchNormalization, prepare=remember)
    initial = run(make, data=lambda: arrays(epochs=0)).model.get_weights()
    begin = Beginning()
    run(make, make_strategy(2), data=lambda: arrays(callbacks=[begin]))
    for ours, plain in zip(begin.weights, initial, strict=True):
        np.testing.assert_array_equal(ours, plain)


# Losses of layers, normalization, and gradients of gradients


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def read_losses_again(model, data):
    """Once before the update, and once after it."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        penalty = sum(model.losses)
        total = loss + penalty
    weights = model.trainable_variables
    apply(model, tape.gradient(total, weights), weights)
    return {"total": total, "penalty": penalty, "again": sum(model.losses)}


def read_losses_of_two_calls(model, data):
    x, y = data
    with tf.GradientTape() as tape:
        first = tf.reduce_mean(tf.square(model(x, training=True) - y))
        of_first = sum(model.losses)
        second = tf.reduce_mean(tf.square(model(0.5 * x, training=True) - y))
        of_second = sum(model.losses)
        total = first + second + of_first + 2.0 * of_second
    weights = model.trainable_variables
    apply(model, tape.gradient(total, weights), weights)
    return {"total": total, "of_first": of_first, "of_second": of_second}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("hidden", [(), *slow((keras.layers.BatchNormalization,))], ids=len)
@pytest.mark.parametrize("step", [read_losses_again, *slow(read_losses_of_two_calls)])
def test_each_replica_reads_its_own_losses_of_layers(step, hidden, data):
    assert_equivalent(custom(step, tanh, Penalty, *hidden, optimizer=sgd(0.05)), data=data)


def two_views(model, x, y):
    first = model(x, training=True)
    second = model(0.5 * x + 0.1, training=True)
    return tf.reduce_mean(tf.square(first - y)) + tf.reduce_mean(tf.square(first - second))


def with_gradient_penalty(model, x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x, training=True)
    squares = tf.reduce_sum(tf.square(tape.gradient(outputs, x)), axis=1)
    slopes = tf.sqrt(squares + 1e-4)  # a single example, normalized, has none
    return tf.reduce_mean(tf.square(outputs - y)) + tf.reduce_mean(tf.square(slopes - 1.0))


NORMALIZED = tanh, keras.layers.BatchNormalization
SECOND = {
    "two calls, normalized": (two_views, NORMALIZED),
    "a gradient penalty": (with_gradient_penalty, (tanh,)),
    "a gradient penalty, normalized": (with_gradient_penalty, NORMALIZED),
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", names(SECOND, "a gradient penalty, normalized"))
def test_normalization_and_gradient_penalties_train_the_same(name, data):
    loss, hidden = SECOND[name]
    assert_equivalent(custom(minimize(loss), *hidden), data=data, tolerance=3e-5)


# Random draws

DRAWS = {
    "keras.random": lambda model, shape: keras.random.normal(shape),
    "a SeedGenerator": lambda model, shape: keras.random.normal(shape, seed=model.seeds),
    "tf.random": lambda model, shape: tf.random.normal(shape),
}


def add_seeds(model):
    model.seeds = keras.random.SeedGenerator(1)


class Kernels(keras.callbacks.Callback):
    """Keeps the first weight after each step."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def on_train_batch_end(self, batch, logs=None):
        self.kept.append(self.model.get_weights()[0][:, 0])


def numbers_drawn(draw):
    """What a step draws for each of 8 rows, as three steps of two replicas add it to 8 weights."""

    def loss(model, x, y):
        return tf.reduce_mean(DRAWS[draw](model, tf.shape(x)[:1]) * model(x)[:, 0])

    def make():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        kind = type("Custom", (keras.Sequential,), {"train_step": minimize(loss)})
        model = kind([keras.Input((BATCH,)), dense])
        add_seeds(model)
        model.compile(sgd(float(BATCH))())
        return model

    rows = np.tile(np.eye(BATCH, dtype=np.float32), (3, 1))
    kernels = Kernels()
    given = {"x": rows, "y": rows[:, :1], "epochs": 1, "callbacks": [kernels]}
    run(make, make_strategy(2), data=lambda: arrays(**given), custom_step="mean")
    return -np.diff(np.array([np.zeros(BATCH), *kernels.kept]), axis=0)


def test_noise_for_a_weight_is_as_large_as_on_one_device():
    """All replicas draw the same: the mean of other draws would be smaller."""

    def add_noise(model, data):
        weights = model.trainable_variables
        model.optimizer.apply([tf.random.normal(weight.shape) for weight in weights], weights)
        return {}

    def make():
        dense = keras.layers.Dense(500, use_bias=False, kernel_initializer="zeros")
        model = type("Custom", (keras.Sequential,), {"train_step": add_noise})([keras.Input((FEATURES,)), dense])
        model.compile(sgd(1.0)())
        return model

    model = run(make, make_strategy(2)).model
    steps = model.optimizer.iterations.numpy()
    assert np.std(model.get_weights()[0]) == pytest.approx(np.sqrt(steps), rel=0.1)


def test_a_scalar_that_is_no_mean_is_averaged_in_a_metric():
    """The largest of the batch: each replica has its shard's, and their mean is no larger."""

    def step(model, data):
        logs = minimize(mean_loss)(model, data)
        model.largest.update_state(tf.reduce_max(data[0]))
        return logs | {"largest": model.largest.result()}

    def prepare(model):
        model.largest = keras.metrics.Mean(name="largest")

    make = custom(step, prepare=prepare)
    plain, ours = run(make), run(make, make_strategy(2))
    for mine, theirs in zip(ours.numbers["largest"], plain.numbers["largest"], strict=True):
        assert 0.5 * theirs < mine < theirs
    assert "is averaged over replicas" in str(ours.warned[0].message)


def test_a_learning_rate_set_by_examples_is_told():
    def adapt(model, data):
        logs = keras.Sequential.train_step(model, data)
        model.optimizer.learning_rate.assign(0.01 * tf.exp(-tf.reduce_mean(tf.abs(data[0]))))
        return logs

    def make():
        model = type("Custom", (keras.Sequential,), {"train_step": adapt})([keras.layers.Dense(OUTPUTS)])
        model.compile(sgd()(), "mse")
        return model

    (warning,) = run(make, make_strategy(2)).warned
    assert "learning_rate from a shard's examples" in str(warning.message)


def test_a_learning_rate_set_by_the_steps_done_is_not_told():
    def decay(model, data):
        steps = tf.cast(model.optimizer.iterations, tf.float32)
        model.optimizer.learning_rate.assign(0.1 / (1.0 + steps))
        return minimize(mean_loss)(model, data)

    def make():
        model = type("Custom", (keras.Sequential,), {"train_step": decay})([keras.layers.Dense(OUTPUTS)])
        model.compile(sgd()())
        return model

    assert_equivalent(make)


@pytest.mark.parametrize("draw", names(DRAWS, "keras.random"))
def test_replicas_and_steps_draw_different_numbers(draw):
    first = numbers_drawn(draw)
    again = numbers_drawn(draw)
    assert first.shape == (3, BATCH) and len(np.unique(first)) == 3 * BATCH
    assert 0.5 < first.std() < 1.6
    np.testing.assert_array_equal(again, first)  # of the same seed


@pytest.mark.parametrize("loss", [mean_loss, SUMS["reduce_sum"]], ids=["mean", "sum"])
@pytest.mark.parametrize("draw", names(DRAWS, "keras.random"))
def test_a_step_that_draws_is_measured_too(draw, loss):
    """What its noise changes is little; half or twice the gradient would change far more."""

    def noisy(model, x, y):
        return loss(model, x + 0.01 * DRAWS[draw](model, tf.shape(x)), y)

    def trained(strategy=None):
        ran = run(make, strategy)
        pairs = zip(ran.model.get_weights(), initial, strict=True)
        return ran, [after - before for after, before in pairs]

    make = custom(minimize(noisy), optimizer=sgd(0.02), prepare=add_seeds)
    initial = run(make, data=lambda: arrays(epochs=0)).model.get_weights()
    _, plain = trained()
    first, changes = trained(make_strategy(2))
    assert_close(changes, plain, tolerance=0.1)
    assert first.warned == []
    _, again = trained(make_strategy(2))
    for mine, theirs in zip(again, changes, strict=True):
        np.testing.assert_array_equal(mine, theirs)


# Metrics


class Batch(NamedTuple):
    """What a metric may be given."""

    x: tf.Tensor
    y: tf.Tensor
    outputs: tf.Tensor
    losses: tf.Tensor


class Custom(keras.metrics.Metric):
    """A mean of what it is given, as users write it."""

    def __init__(self, name="custom"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, value, sample_weight=None):
        self.total.assign_add(value)
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


class Correct(Custom):
    """The share of rows whose largest output is right."""

    def update_state(self, y, outputs, sample_weight=None):
        hits = tf.equal(tf.argmax(y, axis=-1), tf.argmax(outputs, axis=-1))
        self.total.assign_add(tf.reduce_sum(tf.cast(hits, tf.float32)))
        self.count.assign_add(tf.cast(tf.shape(y)[0], tf.float32))


def give_scalar(metric, batch):
    metric.update_state(tf.reduce_mean(batch.losses))


def give_vector(metric, batch):
    metric.update_state(batch.losses)


def give_weighted_scalar(metric, batch):
    metric.update_state(tf.reduce_mean(batch.losses), sample_weight=tf.shape(batch.x)[0])


def give_outputs(metric, batch):
    metric.update_state(batch.y, batch.outputs)


def give_probabilities(metric, batch):
    metric.update_state(batch.y, tf.sigmoid(batch.outputs))


def count_rows_by_ones(metric, batch):
    metric.update_state(tf.ones_like(batch.losses))


def count_rows_by_shape(metric, batch):
    metric.update_state(tf.shape(batch.x)[0])


def restart(metric, batch):
    metric.reset_state()
    metric.update_state(tf.reduce_mean(batch.losses))


def restart_count(metric, batch):
    metric.reset_state()
    metric.update_state(tf.ones_like(batch.losses))


def result_of(model):
    return {"scored": model.scored.result()}


def results_elsewhere(model):
    """Under other names, and changed."""
    result = model.scored.result()
    return {"other": result, "changed": 2.0 * result + 1.0, "root": tf.sqrt(result)}


METRICS = {
    "Mean, a scalar": (keras.metrics.Mean, give_scalar),
    "Mean, a vector": (keras.metrics.Mean, give_vector),
    "Mean, a scalar and its batch size": (keras.metrics.Mean, give_weighted_scalar),
    "Sum, a vector": (keras.metrics.Sum, give_vector),
    "Sum, rows": (keras.metrics.Sum, count_rows_by_ones),
    "Sum, rows by the shape": (keras.metrics.Sum, count_rows_by_shape),
    "accuracy": (keras.metrics.CategoricalAccuracy, give_outputs),
    "AUC": (keras.metrics.AUC, give_probabilities),
    "custom, a scalar": (Custom, give_scalar),
    "custom, outputs": (Correct, give_outputs),
    "reset in the step": (keras.metrics.Mean, restart),
    "reset in the step, rows": (keras.metrics.Sum, restart_count),
}


def scoring(make_metric, give, logs=result_of):
    """A function that makes a model whose steps give a batch to a metric."""

    def score(model, x, y, outputs):
        losses = tf.reduce_mean(tf.square(outputs - y), axis=-1)
        give(model.scored, Batch(x, y, outputs, losses))
        return logs(model)

    def train_step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = tf.reduce_mean(tf.square(outputs - y))
        weights = model.trainable_variables
        apply(model, tape.gradient(loss, weights), weights)
        return score(model, x, y, outputs)

    def test_step(model, data):
        return score(model, *data, model(data[0], training=False))

    def prepare(model):
        model.scored = make_metric(name="scored")

    return custom(train_step, tanh, prepare=prepare, test_step=test_step)


def metric_row(name, replicas):
    """Of the metrics on four replicas, three are in the slow tier, and the others run before a release."""
    if replicas == 2:
        return pytest.param(name, 2, marks=() if name in QUICK_METRICS else pytest.mark.slow)
    is_slow = name in ("Mean, a scalar", "Sum, rows", "custom, outputs")
    return pytest.param(name, 4, marks=pytest.mark.slow if is_slow else pytest.mark.long)


QUICK_METRICS = ("Mean, a scalar", "accuracy", "Sum, rows")


@pytest.mark.parametrize(("name", "replicas"), [metric_row(name, number) for name in METRICS for number in (2, 4)])
def test_a_metric_counts_as_on_one_device(name, replicas):
    data = arrays_of_17 if replicas == 2 else arrays  # in the last batch, a replica has no rows
    _, ours = assert_equivalent(scoring(*METRICS[name]), replicas, data=data, evaluated=True)
    if name.startswith("Sum, rows"):  # and no row that a replica borrowed
        assert ours.numbers["scored"] == [len(data()["x"])] * 2
        assert ours.numbers["evaluate"] == {"scored": len(data()["x"])}


def test_a_metric_that_is_reset_in_an_eager_step_counts_as_on_one_device():
    def make():
        model = scoring(keras.metrics.Sum, restart_count)()
        model.run_eagerly = True
        return model

    assert_equivalent(make, data=arrays_of_17)


@pytest.mark.parametrize("give", [give_scalar, *slow(give_vector)])
def test_results_under_other_names_are_global(give):
    make = scoring(keras.metrics.Mean, give, results_elsewhere)
    assert_equivalent(make, data=arrays_of_17, evaluated=True)


@pytest.mark.slow
def test_a_ratio_of_two_metrics_is_global():
    def update(metric, batch):
        metric.update_state(batch.losses)
        metric.rows.update_state(tf.ones_like(batch.losses))

    def make_metric(name):
        metric = keras.metrics.Sum(name=name)
        metric.rows = keras.metrics.Sum(name="rows")
        return metric

    def ratio(model):
        return {"ratio": model.scored.result() / model.scored.rows.result()}

    assert_equivalent(scoring(make_metric, update, ratio), data=arrays_of_17)


def test_a_metric_made_outside_the_scope_counts_everything():
    def give(metric, batch):
        GLOBAL_METRIC.update_state(tf.reduce_mean(batch.losses))

    def outcome(strategy=None):
        global GLOBAL_METRIC
        GLOBAL_METRIC = keras.metrics.Mean(name="outside")
        logs = {"outside": GLOBAL_METRIC.result}
        make = scoring(keras.metrics.Mean, give, lambda model: {"outside": logs["outside"]()})
        return run(make, strategy, evaluated=True)

    plain = outcome()
    ours = outcome(make_strategy(2))
    assert_close(ours.numbers, plain.numbers)
    assert ours.warned == []


# Returned values

RETURNED = {
    "a mean": lambda model, x: tf.reduce_mean(x),
    "a mean and a constant": lambda model, x: 2.0 * tf.reduce_mean(x) + 1.0,
    "a sum": lambda model, x: tf.reduce_sum(x),
    "rows": lambda model, x: tf.shape(x)[0],
    "a number": lambda model, x: 1.5,
    "a constant": lambda model, x: tf.constant(2),
    "the learning rate": lambda model, x: model.optimizer.learning_rate,
}


def returning(value):
    def train_step(model, data):
        return minimize()(model, data) | {"found": value(model, data[0])}

    return train_step


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", names(RETURNED, "a mean and a constant"))
def test_a_returned_value_is_the_global_batchs(name, data):
    assert_equivalent(custom(returning(RETURNED[name])), data=data)


@pytest.mark.parametrize("value", [None, *slow("words")])
def test_returned_values_that_are_no_numbers_are_refused(value):
    with pytest.raises(ValueError, match="found") as refused:
        run(custom(returning(lambda model, x: value)), make_strategy(2))
    assert "\n" not in str(refused.value)


# State


def add_variable(name="kept", shape=(), dtype="float32", **options):
    """A function that gives a model a variable, of zeros."""

    def prepare(model):
        zeros = np.zeros(shape, dtype)
        variable = keras.Variable(zeros, trainable=False, dtype=dtype, name=name, **options)
        setattr(model, name, variable)

    return prepare


def updating(update):
    """A `train_step` that then updates something by a function of (model, x)."""

    def train_step(model, data):
        logs = minimize()(model, data)
        update(model, data[0])
        return logs

    return train_step


def average(model, x):
    model.kept.assign(0.5 * model.kept + 0.5 * tf.reduce_mean(x))


def raise_to_largest(model, x):
    model.kept.assign(tf.maximum(model.kept, tf.reduce_max(x)))


@pytest.mark.parametrize("data", DATA)
def test_an_average_with_aggregation_mean_is_global(data):
    make = custom(updating(average), prepare=add_variable(aggregation="mean"))
    assert_equivalent(make, data=data)


def test_an_average_without_aggregation_is_global_or_refused():
    make = custom(updating(average), prepare=add_variable())
    plain = run(make)
    try:
        ours = run(make, make_strategy(2))
    except ValueError as refusal:
        assert "kept" in str(refusal) and "aggregation" in str(refusal)
    else:
        assert_close(ours.numbers, plain.numbers)
        assert_copies_are_equal(ours.model.distribute_strategy, ours.model.weights)


def test_a_maximum_without_aggregation_is_refused():
    make = custom(updating(raise_to_largest), prepare=add_variable())
    run(make)  # in plain Keras it trains
    with pytest.raises(ValueError, match=r"kept(?s:.*)aggregation"):
        run(make, make_strategy(2))


def follow(model, x):
    for slow_weight, weight in zip(model.teacher.weights, model.layers[1].weights, strict=True):
        slow_weight.assign(0.9 * slow_weight + 0.1 * weight)


def add_teacher(model):
    model.teacher = keras.layers.Dense(5, trainable=False)
    model.teacher.build((None, FEATURES))


def test_averaged_weights_need_no_aggregation():
    plain, ours = assert_equivalent(custom(updating(follow), tanh, prepare=add_teacher))
    assert_close(*(values(ran.model.teacher.weights) for ran in (ours, plain)))
    assert_copies_are_equal(ours.model.distribute_strategy, ours.model.teacher.weights)


def apply_by_hand(model, gradients, weights):
    for gradient, weight in zip(gradients, weights, strict=True):
        weight.assign_sub(0.1 * gradient)


@pytest.mark.parametrize("data", DATA)
def test_weights_updated_by_hand_train_the_same(data):
    assert_equivalent(custom(minimize(update=apply_by_hand), tanh), data=data)


def test_a_counter_counts_steps():
    def count(model, x):
        model.kept.assign_add(1)

    make = custom(updating(count), prepare=add_variable(dtype="int32"))
    _, ours = assert_equivalent(make, data=arrays_of_17)
    assert ours.model.kept.numpy() == 6


def apply_every_second(model, gradients, weights):
    """Adds up gradients, which count in every second step, and else are 0."""
    model.kept.assign_add(1)
    is_due = tf.cast(tf.equal(model.kept % 2, 0), tf.float32)
    for total, gradient in zip(model.totals, gradients, strict=True):
        total.assign_add(gradient)
    apply(model, [is_due * total for total in model.totals], weights)
    for total in model.totals:
        total.assign((1.0 - is_due) * total)


def add_totals(model):
    add_variable(dtype="int32")(model)
    model.totals = [
        keras.Variable(tf.zeros(weight.shape), trainable=False, name=f"total_{i}")
        for i, weight in enumerate(model.trainable_variables)
    ]


def test_gradients_applied_every_second_step_train_the_same():
    assert_equivalent(custom(minimize(update=apply_every_second), tanh, prepare=add_totals))


def apply_in_cond(model, gradients, weights):
    def update():
        model.optimizer.apply(gradients, weights)
        return True

    tf.cond(model.optimizer.iterations >= 0, update, lambda: False)


def apply_in_function(model, gradients, weights):
    tf.function(lambda gradients: model.optimizer.apply(gradients, weights))(gradients)


@pytest.mark.parametrize("update", [apply_in_cond, apply_in_function])
def test_an_update_in_a_nested_graph_is_refused(update):
    def make():
        model = custom(minimize(update=update))()
        model.optimizer.build(model.trainable_variables)
        return model

    run(make)  # in plain Keras it trains
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        run(make, make_strategy(2))


# Ways to run


class Whole(keras.Sequential):
    """All that a class may override, with a metric of its own."""

    @classmethod
    def make(cls, **compiled):
        model = cls([keras.Input((FEATURES,)), tanh(), keras.layers.Dense(OUTPUTS)])
        model.tracker = keras.metrics.Mean(name="tracked")
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), **compiled)
        return model

    def train_step(self, data):
        self.tracker.update_state(minimize()(self, data)["value"])
        return {"tracked": self.tracker.result()}

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = tf.reduce_mean(losses_of(self, x, y, training=False))
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result(), "last": loss}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return 2.0 * self(x, training=False)


class InGraph(Whole):
    train_step = tf.function(Whole.train_step)


class Halving(keras.Sequential):
    """Changes what it is given, and leaves the rest to Keras."""

    make = Whole.__dict__["make"]

    def train_step(self, data):
        x, y = data
        return super().train_step((0.5 * x, y))

    def test_step(self, data):
        x, y = data
        return super().test_step((0.5 * x, y))


@pytest.mark.parametrize("options", [{"steps_per_execution": 3}, *slow({"run_eagerly": True})])
@pytest.mark.parametrize("data", DATA)
def test_options_of_compile_change_no_numbers(options, data):
    assert_equivalent(lambda: Whole.make(**options), data=data, evaluated=True)


@pytest.mark.slow
def test_jit_compile_is_equivalent_or_refused():
    def make():
        return Whole.make(jit_compile=True)

    plain = run(make)
    try:
        ours = run(make, make_strategy(2))
    except (ValueError, NotImplementedError) as refusal:
        assert "\n" not in str(refusal)
    else:
        assert_close(ours.numbers, plain.numbers)
        assert len(ours.warned) <= 1


@pytest.mark.parametrize("data", DATA)
def test_a_step_in_tf_function_trains_the_same(data):
    assert_equivalent(InGraph.make, data=data)


@pytest.mark.parametrize("data", DATA)
def test_a_step_may_call_kerass_with_other_inputs(data):
    def make():
        return Halving.make(loss="mse", metrics=["mae"])

    assert_equivalent(make, data=data, evaluated=True)


def test_validation_by_a_custom_step_is_equivalent():
    validation = {"validation_data": (X[:17], Y[:17]), "validation_batch_size": BATCH}
    _, ours = assert_equivalent(Whole.make, data=lambda: arrays(**validation))
    assert {"val_tracked", "val_last"} < ours.numbers.keys()


def test_a_custom_test_step_alone_is_equivalent():
    def make():
        return custom(None, test_step=Whole.test_step, prepare=add_tracker, loss="mse")()

    def add_tracker(model):
        model.tracker = keras.metrics.Mean(name="tracked")

    assert_equivalent(make, data=arrays_of_17, evaluated=True)


def test_a_custom_predict_step_returns_each_row_once():
    found = []
    for strategy in (None, make_strategy(2)):
        model = run(Whole.make, strategy, data=arrays_of_17).model
        found.append(model.predict(X[:17], batch_size=BATCH, verbose=0))
    assert found[0].shape == (17, OUTPUTS)
    assert_close(*reversed(found))


def test_steps_on_single_batches_are_equivalent():
    found = []
    for strategy in (None, make_strategy(2)):
        model = run(Whole.make, strategy, data=lambda: arrays(epochs=0)).model
        batches = [(X[part], Y[part]) for part in (slice(0, 7), slice(7, 8), slice(8, 16))]
        trained = [model.train_on_batch(*batch, return_dict=True) for batch in batches]
        tested = [model.test_on_batch(*batch, return_dict=True) for batch in batches]
        found.append([trained, tested, model.get_weights()])
    assert_close(*reversed(found))


# Data


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return X[part], Y[part]


def shuffled():
    """By the seed that is set for all of TensorFlow."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100).batch(BATCH)
    return {"x": data, "epochs": 2}


def generated():
    """Just as many batches as there are steps."""
    batches = [Batches()[index] for index in (0, 1, 2, 0, 1, 2)]
    return {"x": (batch for batch in batches), "epochs": 2, "steps_per_epoch": 3}


def sequence():
    return {"x": Batches(), "epochs": 2, "shuffle": False}


@pytest.mark.parametrize("data", [shuffled, *slow(arrays, generated, sequence)])
def test_measuring_takes_nothing_from_the_data(data):
    assert_equivalent(Whole.make, data=data)


class Pairs(keras.Model):
    """Built by its first step alone, which gives it something else than the data."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(2)
        self.second = keras.layers.Dense(2)

    @classmethod
    def make(cls):
        model = cls()
        model.compile(keras.optimizers.Adam(0.01))
        return model

    def call(self, inputs):
        return self.first(inputs[0]) - self.second(inputs[1])

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self([data["a"], data["b"][:, :-1]]) - 1.0))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def named_arrays():
    return arrays(x={"a": X, "b": Y}, y=None)


def named_batches():
    data = tf.data.Dataset.from_tensor_slices({"a": X, "b": Y}).batch(BATCH)
    return {"x": data, "epochs": 2}


@pytest.mark.parametrize("data", [named_batches, *slow(named_arrays)])
def test_the_first_step_may_build_the_model(data):
    assert_equivalent(Pairs.make, data=data)


# Variables of TensorFlow


class WithVariables(keras.Model):
    """Keeps each `tf.Variable` as an attribute, which Keras does not track."""

    def __init__(self, update):
        super().__init__()
        self.dense = keras.layers.Dense(OUTPUTS)
        self.update = update
        self.kept = tf.Variable(0.0, trainable=False)

    @classmethod
    def make(cls, update):
        model = cls(update)
        model.dense.build((None, FEATURES))
        model.compile("sgd")
        return model

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, _ = data
        self.kept.assign(self.update(self, x))
        return {"value": tf.reduce_mean(x)}


def average_of_examples(model, x):
    return 0.5 * model.kept + 0.5 * tf.reduce_mean(x)


def sum_of_weights(model, x):
    return 0.5 * model.kept + tf.reduce_sum(model.dense.kernel)


@pytest.mark.parametrize("update", [average_of_examples, sum_of_weights])
def test_a_tf_variable_is_the_same_on_all_replicas(update):
    plain = run(functools.partial(WithVariables.make, update), data=arrays_of_17)
    ours = run(functools.partial(WithVariables.make, update), make_strategy(2), data=arrays_of_17)
    copies = ours.model.distribute_strategy.experimental_local_results(ours.model.kept)
    for copy in copies:
        np.testing.assert_allclose(copy.numpy(), plain.model.kept.numpy(), rtol=1e-5)
    assert ours.warned == []


def test_a_tf_variable_that_is_no_mean_is_refused():
    def largest(model, x):
        return tf.maximum(model.kept, tf.reduce_max(x))

    with pytest.raises(ValueError, match="kept.*aggregation"):
        run(functools.partial(WithVariables.make, largest), make_strategy(2))


# Interruptions and workers


def test_an_interrupted_fit_ends_with_bitwise_identical_results(tmp_path):
    def fit(folder, *callbacks):
        saved = Checkpoints(tmp_path / folder, every=2)
        data = {"epochs": 3, "callbacks": [saved, *callbacks]}
        return run(Gan.make, make_strategy(2), data=lambda: arrays(**data))

    undisturbed = fit("undisturbed")
    with pytest.raises(KeyboardInterrupt):
        fit("killed", interrupt_at(5))
    again = fit("killed")
    for resumed, whole in zip(again.model.state(), undisturbed.model.state(), strict=True):
        np.testing.assert_array_equal(resumed, whole)
    assert len(again.numbers["logs of batches"]) == 9 - 4
    for name in ("d_loss", "g_loss"):
        assert again.numbers[name] == undisturbed.numbers[name]


def test_an_interrupted_fit_repeats_its_random_draws(tmp_path):
    def train_step(model, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        noise = tf.random.normal(tf.shape(x)) + keras.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            loss = mean_loss(model, x + noise, y)
        weights = model.trainable_variables
        apply(model, tape.gradient(loss, weights), weights)
        return {"value": loss}

    def fit(folder, *callbacks):
        saved = Checkpoints(tmp_path / folder, every=2)
        data = {"epochs": 3, "callbacks": [saved, *callbacks]}
        return run(custom(train_step, tanh), make_strategy(2), data=lambda: arrays(**data)).model

    undisturbed = fit("undisturbed")
    with pytest.raises(KeyboardInterrupt):
        fit("killed", interrupt_at(5))
    for resumed, whole in zip(fit("killed").get_weights(), undisturbed.get_weights(), strict=True):
        np.testing.assert_array_equal(resumed, whole)


@pytest.mark.slow
def test_two_workers_train_a_gan_as_one_device(tmp_path):
    """They run this file as a program."""
    words = ["launch", "--workers", "2", "--log-dir", tmp_path, "-m", "tests.test_custom_step"]
    done = python("-m", "keras_replicas", *words, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, warned = pickle.loads((tmp_path / "outcome").read_bytes())
    assert_close(ours, run(Gan.make, data=arrays_of_17).numbers)
    assert warned == []


if __name__ == "__main__":
    ran = run(Gan.make, make_strategy(), data=arrays_of_17)
    outcome = ran.numbers, [str(warning.message) for warning in ran.warned]
    if is_chief():
        Path(sys.argv[1], "outcome").write_bytes(pickle.dumps(outcome))
    exchange({})  # before one leaves
