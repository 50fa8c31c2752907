"""Models that users write, on two replicas of which the second has no example in the last batch; refusals, too."""

import contextlib
from random import getstate

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from benchmarks.features import IDS, ONE_HOT, State, largest_difference, like, row, run
from benchmarks.features import X as ALL
from keras_replicas import Checkpoints, UserError, data_parallel, make_strategy
from keras_replicas.private import minor
from tests.conftest import assert_same, on_replicas

pytestmark = pytest.mark.slow  # test_data_parallel.py and test_conformance.py have shorter ones

EXAMPLES, BATCH, FEATURES = 25, 8, 5
X, Y = ALL[:EXAMPLES], ONE_HOT[:EXAMPLES]
IMAGES = np.random.default_rng(0).normal(size=(EXAMPLES, 8, 8, 2)).astype(np.float32)


def of(*hidden, shape=(FEATURES,), last=True):
    """A function that makes a sequential model of what these make."""

    def make(kind):
        made = [layer() for layer in hidden]
        return like(kind, keras.Sequential)([keras.Input(shape), *made, *([layers.Dense(3)] if last else [])])

    return make


class Endpoint(layers.Layer):
    """As in Keras's guide: a loss of Keras's that a layer computes."""

    loss = keras.losses.MeanSquaredError()

    def call(self, outputs, target):
        self.add_loss(self.loss(target, outputs))
        return outputs


def a_loss_in_a_layer(kind):
    inputs = keras.Input((FEATURES,))
    return kind(inputs, Endpoint()(layers.Dense(FEATURES)(inputs), inputs))


class Counts(keras.metrics.Metric):
    """Of whole numbers, with two results."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(ops.shape(y_true)[0])

    def result(self):
        return {"seen": self.seen, "twice": 2 * self.seen}


class Own(keras.Model):
    """A `compute_loss` that updates a variable, and has weights in it."""

    def __init__(self):
        super().__init__()
        self.dense, self.scale = layers.Dense(3), self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean((y - y_pred) ** 2)
        if training:
            self.scale.assign(0.9 * self.scale + 0.1 * loss)
        return loss * self.scale + 0.1 * ops.sum(self.dense.kernel**2)


class LooksUpAgain(keras.Model):
    """Its own loss reads a table, whose gradient is one of rows."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(20, 4)

    def call(self, x):
        return self.table(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y_pred - 1) ** 2) + ops.mean(self.table(x) ** 2)


class Rematerialized(layers.Layer):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return keras.remat(self.dense)(x)


class Slow(keras.optimizers.SGD):
    """Has its own `apply_gradients`."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.1 * gradient, variable) for gradient, variable in grads_and_vars])


def of_own(y, predicted):
    return keras.losses.categorical_crossentropy(y, predicted)


def mean(make, data=None, loss="mse", **options):
    """A row of the table, with a loss that is a mean of squares."""
    return row(make, data or (X, Y), loss=lambda: loss, **options)


def saturated(activation, loss):
    """Of softmax and sigmoid, Keras's losses take the logits: probabilities would be cut off."""
    rest = (lambda: layers.Dense(3), lambda: layers.Activation(activation))
    made = of(lambda: layers.Rescaling(50.0), *rest, last=False)
    return mean(made, loss=loss, optimizer=lambda: keras.optimizers.SGD(0.01), bound=1e-5)


CONVOLUTIONS = [lambda: layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization, lambda: layers.MaxPooling2D(2)]
CONVOLUTIONS += [lambda: layers.DepthwiseConv2D(2), layers.GlobalAveragePooling2D]


def masked():
    return layers.Embedding(20, 3, mask_zero=True)


GAPS = IDS[:EXAMPLES] * (np.arange(6) < 4)
ROWS = {
    "images": mean(of(*CONVOLUTIONS, shape=IMAGES.shape[1:]), (IMAGES, Y), bound=1e-5),
    "images in a sequence": mean(
        of(lambda: layers.ConvLSTM2D(2, 3), layers.Flatten, shape=(None, *IMAGES.shape[1:])), (IMAGES[:, None], Y)
    ),
    "a loss in a layer": mean(a_loss_in_a_layer, (X,), loss=None),
    "a loss as metric": mean(of(), metrics=lambda: [keras.losses.MeanSquaredError(name="q")]),
    "a masked mean, NaN of an example that is all padding": mean(
        of(masked, layers.GlobalAveragePooling1D, shape=(6,)), (IDS[:EXAMPLES], Y)
    ),
    "a mask on the outputs": mean(
        of(masked, lambda: layers.Dense(1), shape=(6,), last=False), (GAPS, GAPS[..., None] / 20)
    ),
    "a metric of whole numbers with two results": mean(of(), metrics=lambda: [Counts()]),
    "a saturated softmax": saturated(tf.nn.softmax, "categorical_crossentropy"),
    "a saturated softmax, a loss of one's own": saturated(tf.nn.softmax, of_own),
    "a saturated softmax of Keras's, a loss of one's own": saturated(ops.softmax, of_own),
    "a saturated sigmoid": saturated(tf.nn.sigmoid, "binary_crossentropy"),
    "a saturated sigmoid of Keras's": saturated(ops.sigmoid, "binary_crossentropy"),
    "what is computed again in the backward pass": mean(of(Rematerialized)),
    "a loss with state": mean(lambda kind: like(kind, Own)(), loss=None),
    "a loss that looks up an embedding": mean(lambda kind: like(kind, LooksUpAgain)(), (IDS, IDS), loss=None),
    "an optimizer with its own apply_gradients": mean(of(), optimizer=lambda: Slow(0.1)),
}
if minor(keras.__version__) >= [3, 15]:
    ROWS["a renormalised batch"] = mean(of(lambda: layers.BatchNormalization(renorm=True)))


@pytest.mark.parametrize("name", ROWS)
def test_it_computes_what_plain_keras_does(name):
    plain = run(keras.Model, ROWS[name])
    with make_strategy(2).scope():
        ours = run(data_parallel(keras.Model), ROWS[name])
    assert largest_difference(ours, plain) < max(ROWS[name]["bound"], 3e-6)


def dense(kind, *hidden):
    return kind([keras.Input((FEATURES,)), *hidden, layers.Dense(3)])


def ours(*hidden, **options):
    return on_replicas(keras.Input((FEATURES,)), *hidden, layers.Dense(3), **options)


def count_steps(state, x, training):
    if training:
        state.assign_add(1)


def test_a_layer_that_counts_steps_counts_exactly():
    """From a number that float32 cannot tell from the next."""
    model = ours(counting := State(count_steps, "only_first_replica", begin=2**30 + 1))
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    assert int(counting.state.numpy()) == 2**30 + 1 + 8


def test_a_metric_made_outside_of_the_scope_is_of_the_whole_data():
    scores = []
    for strategy in (make_strategy(1), make_strategy(2)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = dense(data_parallel(keras.Sequential))
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
        history = model.fit(X, Y, BATCH, epochs=2, shuffle=False, verbose=0).history
        scores.append([*history.values(), model.evaluate(X, Y, BATCH, verbose=0)])
    assert_same(*scores, rtol=1e-5)


def test_compiled_again_it_learns_by_the_new_loss():
    histories = []
    for options in ({}, {"jit_compile": True}):
        keras.utils.set_random_seed(0)
        with make_strategy(1).scope():
            model = dense(data_parallel(keras.Sequential))
            for loss in ("mse", "mae"):
                model.compile(keras.optimizers.SGD(0.1), loss, **options)
                history = model.fit(X[:8], Y[:8], BATCH, shuffle=False, verbose=0).history
        histories.append(history["loss"])
    assert histories[0] == pytest.approx(histories[1], rel=1e-5)


class Noise(layers.Layer):
    """Without a seed: from Keras's own generator."""

    def __init__(self, seed=None):
        super().__init__()
        self.generator = seed and keras.random.SeedGenerator(seed)

    def call(self, x):
        return x + keras.random.normal(ops.shape(x), seed=self.generator)


@pytest.mark.parametrize("steps", [None, 3])
def test_noise_without_a_seed_is_another_in_each_step(steps):
    model = ours(Noise(), optimizer=lambda: keras.optimizers.SGD(0.0, gradient_accumulation_steps=steps))
    x, seen = np.zeros((4, FEATURES), np.float32), []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: seen.append(model.step_values["loss"][0]))
    model.fit(x, np.zeros((4, 3)), 4, epochs=3, verbose=0, callbacks=[keep])
    assert len(set(seen)) == 3
    assert len(model.weights) == 2  # Keras's generator is no part of the model


@pytest.mark.parametrize(("seed", "made_before"), [(1, False), (None, False), (None, True)])
def test_predictions_draw_other_noise_for_each_row_and_each_time(seed, made_before):
    keras.utils.clear_session()
    if made_before:
        keras.random.normal([1])  # makes Keras's generator, without a strategy
    with make_strategy(2).scope():
        model = data_parallel(keras.Sequential([keras.Input((2,)), Noise(seed)]))
    drawn = [model.predict(np.zeros((6, 2)), batch_size=2, verbose=0) for _ in range(2)]
    assert len(np.unique(drawn)) == 24


class WithAScalar(Own):
    def call(self, x):
        return {"y": self.dense(x), "mean": ops.mean(x)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred["y"]) ** 2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: data_parallel(WithAScalar)(), "an output does not have one row for each example"),
        (lambda: dense(data_parallel(keras.Sequential)), "a loss without a reduction"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(make, told):
    with make_strategy(2).scope():
        model = make()
        model.compile("sgd", None if isinstance(model, Own) else keras.losses.MeanSquaredError(reduction="none"))
    with pytest.raises(ValueError, match=told):
        model.fit(X, Y, BATCH, verbose=0)


def test_parts_of_a_batch_set_between_two_fits_count():
    model = ours(layers.BatchNormalization())
    model.fit(X, Y, BATCH, verbose=0)
    with model.distribute_strategy.scope():
        data_parallel(model, accumulate=2)
    with pytest.raises(ValueError, match="accumulate needs a model without BatchNormalization: set accumulate = 1"):
        model.fit(X, Y, BATCH, verbose=0)


@pytest.mark.parametrize("rest", [True, False])
def test_parts_that_do_not_divide_a_batch_are_refused(rest):
    model = ours(accumulate=3)
    data = tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(8, drop_remainder=not rest)
    with pytest.raises((UserError, tf.errors.InvalidArgumentError), match="accumulate=3 must divide"):
        model.fit(data, verbose=0)


def test_accumulate_is_refused_with_a_custom_step():
    class Trained(Own):
        def train_step(self, data):
            return {"loss": ops.mean(data[0])}

    with make_strategy(2).scope():
        model = data_parallel(Trained, accumulate=2)()
        with pytest.raises(ValueError, match="accumulate has no effect: Trained has its own train_step"):
            model.compile("sgd", "mse")


class Measured(layers.Layer):
    """Has a metric, which its call updates."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        self.mean.update_state(x)
        return x


def test_predictions_do_not_count_in_a_metric_that_a_call_updates():
    with make_strategy(2).scope():
        model = data_parallel(dense(keras.Sequential, Measured()))
        model.compile("sgd", "mse")
    model.evaluate(X, Y, BATCH, verbose=0)
    before = model.get_metrics_result()["mean"]
    model.predict(X[:1], BATCH, verbose=0)
    assert model.get_metrics_result()["mean"] == before != 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_draws_none_of_pythons_random_numbers(replicas, tmp_path):
    """From which the next model's weights would be."""
    keras.utils.clear_session()
    with make_strategy(replicas).scope():
        model = dense(keras.Sequential)
        before = getstate()
        data_parallel(model).compile("sgd", "mse")
    model.fit(X, Y, BATCH, verbose=0, callbacks=[Checkpoints(tmp_path)])
    assert getstate() == before


def test_a_step_that_takes_other_data_than_the_model_needs_no_build():
    class Pairs(keras.Model):
        def train_step(self, data):
            return {"loss": ops.mean(self(data[:, 0]) - self(data[:, 1]))}

    for replicas in (1, 2):
        with make_strategy(replicas).scope():
            inputs = keras.Input((FEATURES,))
            model = data_parallel(Pairs(inputs, layers.Dense(1)(inputs)))
            model.compile("sgd", "mse")
        history = model.fit(np.stack([X, X], axis=1), batch_size=BATCH, verbose=0).history
        assert history == {"loss": [0.0]}


class Total(keras.metrics.Metric):
    """As in Keras's guide, its result is the value of its variable."""

    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.cast(y_true, self.dtype)))

    def result(self):
        return self.total.value


def test_a_metric_may_return_the_value_of_its_variable():
    found = []
    for strategy in (None, make_strategy(2)):
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1)])
            model = data_parallel(model) if strategy else model
            model.compile("sgd", "mse", metrics=[Total()])
        history = model.fit(X, Y, BATCH, verbose=0).history["total"]
        found.append([*history, model.evaluate(X, Y, BATCH, verbose=0, return_dict=True)["total"]])
    np.testing.assert_allclose(*found, rtol=1e-6)


class Scaled(keras.losses.Loss):
    """Divides by a moving average of itself, which is a variable."""

    def __init__(self):
        super().__init__()
        self.scale = keras.Variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        values = keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
        self.scale.assign(0.9 * self.scale + 0.1 * keras.ops.mean(values))
        return values / keras.ops.stop_gradient(self.scale)


def test_a_loss_may_keep_a_variable():
    x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")

    def trained(wrap, strategy=None):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1), Scaled())
            model = wrap(model)
        history = model.fit(x, x[:, :2], 8, 2, verbose=0, shuffle=False).history
        return [*history["loss"], *model.get_weights(), np.asarray(keras.ops.convert_to_numpy(model.loss.scale))]

    plain = trained(lambda model: model)
    assert_same(trained(data_parallel, make_strategy(2)), plain, rtol=1e-5, atol=1e-6)
    assert plain[-1] != 1.0


def test_an_update_that_nothing_keeps_is_refused():
    class Counts(keras.layers.Layer):
        def call(self, x):
            COUNT.assign_add(1.0)
            return x

    with make_strategy(2).scope():
        COUNT = keras.Variable(0.0, trainable=False, name="count")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), Counts()])
        model.compile("sgd", "mse")
        data_parallel(model)
    with pytest.raises(UserError, match="count is updated in each step, but is no variable of the model"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), 4, verbose=0)
