"""Models that users write, on two replicas of which the second has no example in the last batch."""

import pickle
import warnings
from random import getstate

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_replicas.checkpoints import Checkpoints
from keras_replicas.model import data_parallel
from keras_replicas.noise import noise_seeds
from keras_replicas.private import minor
from keras_replicas.strategy import make_strategy

pytestmark = pytest.mark.slow  # test_data_parallel.py and test_conformance.py have shorter ones

EXAMPLES, BATCH, SIZE = 9, 4, 8
random = np.random.default_rng(0)
IMAGES = random.normal(size=(EXAMPLES, SIZE, SIZE, 2)).astype(np.float32)
X, Y = random.normal(size=(2, EXAMPLES, 3)).astype(np.float32)


def fit(model, x, y, **options):
    """Weights, values of each epoch, scores and predictions."""
    history = model.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0, **options).history
    scores = model.evaluate(x, y, BATCH, verbose=0)
    values = [history[name] for name in sorted(history)]
    return [*values, scores, *model.get_weights(), *keras.tree.flatten(model.predict(x, BATCH, verbose=0))]


def dense(kind, *layers_):
    return kind([keras.Input((3,)), *layers_, layers.Dense(3)])


def images(kind):
    convolutions = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.MaxPooling2D(2), layers.DepthwiseConv2D(2)]
    model = kind([keras.Input(IMAGES.shape[1:]), *convolutions, layers.GlobalAveragePooling2D(), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return IMAGES, model


def a_renormalised_batch(kind):
    model = dense(kind, layers.BatchNormalization(renorm=True))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return X, model


def images_in_a_sequence(kind):
    model = kind([keras.Input((None, SIZE, SIZE, 2)), layers.ConvLSTM2D(2, 3), layers.Flatten(), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return IMAGES[:, None], model


class Endpoint(layers.Layer):
    """As in Keras's guide: a loss of Keras's that a layer computes."""

    loss = keras.losses.MeanSquaredError()

    def call(self, outputs, target):
        self.add_loss(self.loss(target, outputs))
        return outputs


def a_loss_in_a_layer(kind):
    inputs = keras.Input((3,))
    model = kind(inputs, Endpoint()(layers.Dense(3)(inputs), inputs))
    model.compile(keras.optimizers.SGD(0.1))
    return X, model


def a_loss_as_metric(kind):
    model = dense(kind)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[keras.losses.MeanSquaredError(name="q")])
    return X, model


def a_dict_of_outputs_and_losses(kind):
    inputs = keras.Input((3,))
    outputs = {name: layers.Dense(3, name=name)(inputs) for name in ("high", "low")}
    model = kind(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), {"high": "mse", "low": "mae"})
    return X, model


def a_masked_mean(kind):
    """Of an example that is all padding it is NaN."""
    words = layers.Embedding(9, 3, mask_zero=True)
    model = kind([keras.Input((5,)), words, layers.GlobalAveragePooling1D(), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return 1 + np.arange(5 * EXAMPLES).reshape(EXAMPLES, 5) % 8, model


def a_mask_on_the_outputs(kind):
    """It is what the loss and its mean leave out."""
    model = kind([keras.Input((3,)), layers.Embedding(9, 3, mask_zero=True), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return np.arange(3 * EXAMPLES).reshape(EXAMPLES, 3) % 4, model


def saturated(activation, loss):
    """Of softmax and sigmoid, Keras's losses take the logits: probabilities would be cut off."""

    def make(kind):
        model = kind([keras.Input((3,)), layers.Rescaling(50.0), layers.Dense(3), layers.Activation(activation)])
        model.compile(keras.optimizers.SGD(0.01), loss)
        return X, model

    make.__name__ = f"a saturated {activation.__name__}, {getattr(loss, '__name__', loss)}"
    return make


def of_own(y, predicted):
    return keras.losses.categorical_crossentropy(y, predicted)


class Added(layers.Layer):
    """Adds a value for each example, whose sum Keras takes."""

    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(x), axis=-1, keepdims=True))
        return x


def a_value_for_each_example_added(kind):
    model = dense(kind, layers.Dense(2), Added())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return X, model


class OfLarge(keras.losses.MeanSquaredError):
    """Over the large labels: a mean of its own, though of Keras's class."""

    def call(self, y_true, y_pred):
        kept = ops.cast(ops.abs(y_true) > 0.3, y_pred.dtype)
        return ops.sum(kept * (y_true - y_pred) ** 2) / ops.sum(kept)


def a_subclass_of_a_loss_of_keras(kind):
    model = dense(kind)
    model.compile(keras.optimizers.SGD(0.1), OfLarge())
    return X, model


class Counts(keras.metrics.Metric):
    def __init__(self, **options):
        super().__init__(**options)
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(ops.shape(y_true)[0])

    def result(self):
        return {"seen": self.seen, "twice": 2 * self.seen}


def a_metric_of_whole_numbers_with_two_results(kind):
    model = dense(kind)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[Counts()])
    return X, model


class Drifting(keras.Model):
    """A `compute_loss` that updates a variable, and has weights in it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense, self.scale = layers.Dense(3), self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean((y - y_pred) ** 2)
        if training:
            self.scale.assign(0.9 * self.scale + 0.1 * loss)
        return loss * self.scale + 0.1 * ops.sum(self.dense.kernel**2)


def a_loss_with_state(kind):
    model = kind(Drifting)()
    model.compile(keras.optimizers.SGD(0.1))
    return X, model


def a_loss_and_a_metric_over_the_batch_axis(kind):
    model = dense(kind)
    metrics = [keras.metrics.CosineSimilarity(axis=0)]
    model.compile(keras.optimizers.SGD(0.1), keras.losses.CosineSimilarity(axis=0), metrics=metrics)
    return X, model


class Counting(layers.Layer):
    """Of steps, from a number that float32 cannot tell from the next."""

    def build(self, shape):
        self.calls = self.add_weight(
            shape=(), dtype="int64", initializer="zeros", trainable=False, aggregation="only_first_replica"
        )
        self.calls.assign(10**12 + 1)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        return x


def a_layer_that_counts(kind):
    model = dense(kind, Counting())
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return X, model


class Slow(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.1 * gradient, variable) for gradient, variable in grads_and_vars])


def an_optimizer_with_its_own_apply_gradients(kind):
    model = dense(kind)
    model.compile(Slow(0.1), "mse")
    return X, model


@pytest.mark.parametrize(
    ("make", "base"),
    [
        (images, keras.Sequential),
        *([(a_renormalised_batch, keras.Sequential)] if minor(keras.__version__) >= [3, 15] else []),
        (images_in_a_sequence, keras.Sequential),
        (a_loss_in_a_layer, keras.Model),
        (a_loss_as_metric, keras.Sequential),
        (a_dict_of_outputs_and_losses, keras.Model),
        (a_masked_mean, keras.Sequential),
        (a_mask_on_the_outputs, keras.Sequential),
        (a_subclass_of_a_loss_of_keras, keras.Sequential),
        (a_metric_of_whole_numbers_with_two_results, keras.Sequential),
        (a_loss_and_a_metric_over_the_batch_axis, keras.Sequential),
        (a_layer_that_counts, keras.Sequential),
        *((saturated(tf.nn.softmax, loss), keras.Sequential) for loss in ("categorical_crossentropy", of_own)),
        *((saturated(ops.softmax, loss), keras.Sequential) for loss in ("categorical_crossentropy", of_own)),
        *((saturated(of, "binary_crossentropy"), keras.Sequential) for of in (tf.nn.sigmoid, ops.sigmoid)),
        (a_value_for_each_example_added, keras.Sequential),
        (a_loss_with_state, None),
        (an_optimizer_with_its_own_apply_gradients, keras.Sequential),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_computes_what_plain_keras_does(make, base):
    def outcome(kind):
        keras.utils.set_random_seed(0)
        x, model = make(kind)
        y = dict.fromkeys(model.output, Y) if make is a_dict_of_outputs_and_losses else Y
        return fit(model, x, Y[..., None] if make is a_mask_on_the_outputs else y)

    plain = outcome(base or (lambda model_class: model_class))
    with make_strategy(2).scope():
        ours = outcome(data_parallel(base) if base else data_parallel)
    for mine, theirs in zip(ours, plain, strict=True):
        assert np.isfinite(theirs).all()
        rtol = 0 if getattr(mine, "dtype", None) == np.int64 else 1e-5
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=1e-6)


def test_a_metric_made_outside_of_the_scope_is_of_the_whole_data():
    scores = []
    for strategy in (make_strategy(1), make_strategy(2)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = dense(data_parallel(keras.Sequential))
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
        history = model.fit(X, Y, BATCH, epochs=2, shuffle=False, verbose=0).history
        scores.append([*history.values(), model.evaluate(X, Y, BATCH, verbose=0)])
    for mine, theirs in zip(*scores, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


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

    def call(self, x):
        return x + keras.random.normal(ops.shape(x))


@pytest.mark.parametrize("steps", [None, 3])
def test_noise_without_a_seed_is_another_in_each_step_and_replica(steps):
    with make_strategy(2).scope():
        model = dense(data_parallel(keras.Sequential), Noise())
        model.compile(keras.optimizers.SGD(0.0, gradient_accumulation_steps=steps), "mse")
    zeros, seen = np.zeros((4, 3), np.float32), []

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(self.model.step_values["loss"][0]))

    model.fit(zeros, zeros, 4, epochs=3, verbose=0, callbacks=[Keep()])
    assert len(set(seen)) == 3
    assert len(model.weights) == 2  # Keras's generator is no part of the model

    @tf.function
    def of_replicas():
        def one():
            return [seed for _, seed in noise_seeds(model, tf.constant(0))][-1]

        return model.distribute_strategy.experimental_local_results(model.distribute_strategy.run(one))

    first, second = of_replicas()
    assert (first != second).numpy().any()


@keras.saving.register_keras_serializable("tests")
class Registered(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def test_a_registered_class_is_saved_by_its_registered_name(tmp_path):
    model = data_parallel(Registered)()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again) is Registered
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))


def test_a_pickle_holds_the_plain_class():
    inputs = keras.Input(X.shape[1:])
    model = data_parallel(keras.Model)(inputs, layers.Dense(3)(inputs))
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(again, keras.Model) and not hasattr(again, "told_to_stop")
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))
    assert again.optimizer.iterations == model.optimizer.iterations > 0


class Noting(Drifting):
    def call(self, x):
        self.noted = self.dense(x)
        return self.noted


class WithAScalar(Drifting):
    def call(self, x):
        return {"y": self.dense(x), "mean": ops.mean(x)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred["y"]) ** 2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: data_parallel(Noting)(), "call sets noted, of one replica's examples"),
        (lambda: data_parallel(WithAScalar)(), "an output has not one row for each example"),
        (lambda: dense(data_parallel(keras.Sequential)), "a loss without a reduction"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(make, told):
    with make_strategy(2).scope():
        model = make()
        own = isinstance(model, Drifting)
        model.compile("sgd", None if own else keras.losses.MeanSquaredError(reduction="none"))
    with pytest.raises(ValueError, match=told):
        model.fit(X, Y, BATCH, verbose=0)


def test_parts_of_a_batch_set_between_two_fits_count():
    strategy = make_strategy(2)
    with strategy.scope():
        model = dense(data_parallel(keras.Sequential), layers.BatchNormalization())
        model.compile("sgd", "mse")
    model.fit(X, Y, BATCH, verbose=0)
    with strategy.scope():
        data_parallel(model, accumulate=2)
    with pytest.raises(ValueError, match="accumulate needs a model without BatchNormalization: set accumulate = 1"):
        model.fit(X, Y, BATCH, verbose=0)


@pytest.mark.parametrize("value", [0, "2"])
def test_a_number_of_parts_that_makes_no_sense_is_refused(value):
    with pytest.raises(ValueError, match=f"accumulate must be a number of parts, 1 or more, not {value!r}"):
        data_parallel(keras.Sequential(), accumulate=value)


@pytest.mark.parametrize("rest", [True, False])
def test_parts_that_do_not_divide_a_batch_are_refused(rest):
    with make_strategy(2).scope():
        model = dense(data_parallel(keras.Sequential, accumulate=3))
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(8, drop_remainder=not rest)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="accumulate = 3 does not divide"):
        model.fit(data, verbose=0)


@pytest.mark.parametrize("wrong", [layers.Dense(1), layers.Dense, "a model"])
def test_it_is_for_models_and_classes_of_them(wrong):
    with pytest.raises(TypeError, match="takes a Keras model, or a subclass of keras.Model; got"):
        data_parallel(wrong)


def test_a_train_step_of_its_own_comes_with_a_warning():
    class Own(Registered):
        def train_step(self, data):
            return {"loss": ops.mean(data[0])}

    class Scored(Registered):
        def test_step(self, data):
            return {"loss": ops.mean(data[0])}

    class Wrapped(Registered):
        def train_step(self, data):
            return super().train_step(data)

    with make_strategy(2).scope():
        with pytest.warns(UserWarning, match="Own.train_step runs on each replica"):
            data_parallel(Own)().compile("sgd", "mse")
        with pytest.warns(UserWarning, match="Scored.test_step runs on each replica"):
            data_parallel(Scored)().compile("sgd", "mse")
        with warnings.catch_warnings(action="error", category=UserWarning):
            data_parallel(Wrapped)().compile("sgd", "mse")
        model = data_parallel(Own, accumulate=2)()
        with pytest.raises(ValueError, match="accumulate has no effect on Own's own train_step"):
            model.compile("sgd", "mse")


def test_predictions_need_no_compile():
    keras.utils.set_random_seed(0)
    with make_strategy(2).scope():
        model = data_parallel(dense(keras.Sequential))
    outputs = model.predict(X, BATCH, verbose=0)
    np.testing.assert_allclose(outputs, X @ model.get_weights()[0], atol=1e-6)
    np.testing.assert_allclose(model.predict_on_batch(X[:3]), outputs[:3], atol=1e-6)


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
            inputs = keras.Input((3,))
            model = data_parallel(Pairs(inputs, layers.Dense(1)(inputs)))
            model.compile("sgd", "mse")
        history = model.fit(np.stack([X, X], axis=1), batch_size=BATCH, verbose=0).history
        assert history == {"loss": [0.0]}


@pytest.mark.parametrize("seed", [None, 1])
def test_predictions_draw_other_noise_for_each_row_and_each_time(seed):
    class Noisy(layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = seed and keras.random.SeedGenerator(seed)

        def call(self, x):
            return keras.random.normal(ops.shape(x), seed=self.generator)

    with make_strategy(2).scope():
        model = data_parallel(keras.Sequential([keras.Input((2,)), Noisy()]))
    drawn = [model.predict(np.zeros((6, 2)), batch_size=2, verbose=0) for _ in range(2)]
    assert len(np.unique(drawn)) == 24
