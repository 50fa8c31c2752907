"""`data_parallel`: what the rows of test_conformance.py do not compare."""

import contextlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.features import no_autotune
from keras_replicas import data_parallel, make_strategy, steps_in_one_call
from tests.conftest import assert_same, collective_strategy, interrupt_at, on_replicas

FEATURES, BATCH = 4, 7
X, Y = np.random.default_rng(0).normal(size=(2, 19, FEATURES)).astype(np.float32)
# Of 8 examples, the first of two replicas has one weight in five, and with four replicas the second has none.
WEIGHTS = np.array([1, 0, 0, 0, 1, 1, 1, 1], np.float32)
WEIGHTED = keras.losses.MeanSquaredError("mean_with_sample_weight")


def batches(*data, size=BATCH):
    return tf.data.Dataset.from_tensor_slices(data).batch(size).with_options(no_autotune())


def sgd(rate=0.1, **options):
    """What makes it, in the strategy's scope."""
    return lambda: keras.optimizers.SGD(rate, **options)


def make_model(replicas, *layers, optimizer=keras.optimizers.SGD, policy="float32", accumulate=1, **options):
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        with make_strategy(replicas).scope():
            dense = keras.layers.Dense(FEATURES, "tanh"), *layers, keras.layers.Dense(FEATURES)
            model = keras.Sequential([keras.Input((FEATURES,)), *dense])
            model.compile(optimizer(), **{"loss": "mse"} | options)
            return data_parallel(model, accumulate=accumulate)
    finally:
        keras.config.set_dtype_policy("float32")


def weights_of(model):
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_options_at_once_end_with_the_same_weights(replicas):
    """One by one, they are rows of the conformance table."""
    data = np.tile(X[:16], (2, 1)), np.tile(Y[:16], (2, 1)), np.tile(WEIGHTS, 4)
    found = []
    for each, options in (1, {}), (replicas, {"accumulate": 2, "jit_compile": True, "steps_per_execution": 3}):
        model = make_model(each, optimizer=sgd(global_clipnorm=0.5), loss=WEIGHTED, **options)
        history = model.fit(batches(*data, size=8), epochs=2, verbose=0).history
        found.append([*history["loss"], *weights_of(model)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("mean_over", ["examples", "labels"])
def test_the_mean_loss_of_an_epoch_is_over_examples_or_over_labels(mean_over, replicas):
    """Of labels: the summed loss, divided by the sum of the weights; batches and replicas have unequal parts of it."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 19, 5, FEATURES)).astype(np.float32)
    weight = rng.uniform(size=(19, 5)).astype(np.float32) * (rng.uniform(size=(19, 1)) < 0.5)
    with make_strategy(replicas).scope():
        model = data_parallel(keras.Sequential([keras.Input((5, FEATURES)), keras.layers.Dense(FEATURES)]))
        data_parallel(model, mean_over=mean_over).compile(keras.optimizers.SGD(0.0), WEIGHTED)
    losses = np.square(model.predict(x, verbose=0) - y).mean(axis=-1) * weight
    parts = [slice(at, at + BATCH) for at in range(0, 19, BATCH)]
    if mean_over == "labels":
        expected = losses.sum() / weight.sum()
    else:
        expected = np.average([losses[p].sum() / weight[p].sum() for p in parts], weights=[7, 7, 5])
    assert model.evaluate(batches(x, y, weight), verbose=0) == pytest.approx(expected, rel=1e-5)
    assert model.fit(batches(x, y, weight), verbose=0).history["loss"] == pytest.approx([expected], rel=1e-5)


def test_an_argument_or_a_target_that_makes_no_sense_is_refused():
    for value in (0, "2"):
        with pytest.raises(ValueError, match=f"accumulate must be a number of parts, 1 or more, not {value!r}"):
            data_parallel(keras.Sequential(), accumulate=value)
    for wrong in (keras.layers.Dense(1), keras.layers.Dense, "a model"):
        with pytest.raises(TypeError, match="takes a Keras model, or a subclass of keras.Model; got"):
            data_parallel(wrong)
    with pytest.raises(ValueError, match="mean_over must be 'examples' or 'labels', not 'tokens'"):
        data_parallel(keras.Sequential, mean_over="tokens")


def test_in_float16_the_gradient_is_clipped_as_it_is_without_the_losss_scale():
    model = make_model(2, optimizer=sgd(global_clipnorm=0.01), policy="mixed_float16")
    before = weights_of(model)
    model.fit(batches(X, Y, size=19), verbose=0)
    assert model.optimizer.iterations.numpy() == 1  # not skipped for an overflow
    assert np.linalg.norm(weights_of(model) - before) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_an_overflow_on_one_replica_is_skipped_on_all():
    model = make_model(2, policy="mixed_float16")
    before, scale = weights_of(model), float(model.optimizer.dynamic_scale.numpy())
    model.fit(batches(X[:4], Y[:4], np.array([1, 1, np.inf, 1], np.float32)), verbose=0)  # the second replica has it
    np.testing.assert_array_equal(weights_of(model), before)
    for variable in model.optimizer.inner_optimizer.variables:
        for local in model.distribute_strategy.experimental_local_results(variable.value):
            assert np.isfinite(local).all()
    assert float(model.optimizer.dynamic_scale.numpy()) == scale / 2 and model.optimizer.iterations.numpy() == 0
    model.fit(batches(X[:4], Y[:4]), verbose=0)
    assert np.isfinite(weights_of(model)).all() and (weights_of(model) != before).any()


class Keep(keras.callbacks.Callback):
    """Notes each call's logs, and the values of its steps."""

    def __init__(self):
        super().__init__()
        self.logs, self.values = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))
        self.values.append({name: list(value) for name, value in self.model.step_values.items()})


def test_steps_of_one_call_keep_their_own_values():
    found = []
    for steps in (1, 3):
        model = make_model(2, steps_per_execution=steps, metrics=["mae"])
        model.fit(batches(X, Y).repeat(), epochs=2, steps_per_epoch=7, verbose=0, callbacks=[keep := Keep()])
        assert model.steps_done == 14
        found.append({name: sum((call[name] for call in keep.values), []) for name in keep.values[0]})
    assert [len(call["loss"]) for call in keep.values] == [3, 3, 1, 3, 3, 1]
    assert found[0].keys() == {"loss", "mae", "learning_rate"}
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-6)


def test_each_step_of_a_call_has_its_values_in_their_shapes_and_knows_of_the_stop():
    def step(iterator, stop):
        number = next(iterator)
        return {"number": number, "table": tf.reshape(tf.range(6) + 6 * number, [2, 3]), "stop": stop}

    values = steps_in_one_call(step)(iter(tf.data.Dataset.range(3, output_type=tf.int32)), 3, True)
    assert (values["number"].tolist(), values["stop"].tolist()) == ([0, 1, 2], [1, 1, 1])
    np.testing.assert_array_equal(values["table"], np.arange(18).reshape(3, 2, 3))


def test_epoch_values_are_exact_and_steps_are_their_own():
    model = make_model(2, optimizer=sgd(0.0))
    unknown = batches(X, Y).filter(lambda *_: True)  # fit does not know how long it is
    history = model.fit(unknown, verbose=0, callbacks=[keep := Keep()]).history
    losses, sizes = np.square(model.predict(X, verbose=0) - Y).mean(axis=1), [7, 7, 5]
    means = [losses[:7].mean(), losses[7:14].mean(), losses[14:].mean()]
    np.testing.assert_allclose([step["loss"][0] for step in keep.values], means, rtol=1e-6)
    so_far = np.cumsum(np.multiply(means, sizes)) / np.cumsum(sizes)
    np.testing.assert_allclose([logs["loss"] for logs in keep.logs], so_far, rtol=1e-6)
    assert history["loss"][0] == pytest.approx(losses.mean(), rel=1e-6)  # not N / (N + 1) of it


def test_applied_twice_it_is_the_same():
    ours = data_parallel(keras.Sequential)
    assert data_parallel(ours) is ours
    model = make_model(1)
    assert data_parallel(model) is model


def test_the_arrays_of_a_generator_stay_as_they_are():
    """TensorFlow 2.21 takes a part of a generator's array for memory of its own, and writes into it."""
    size = np.prod(SHAPE := (8, 16))
    raw = np.zeros(2 * size + 32, np.float32)
    begin = -raw.ctypes.data % 64 // 4
    # TensorFlow copies what does not begin at a multiple of 64 bytes.
    x, y = (raw[at : at + size].reshape(SHAPE) for at in (begin, begin + size))
    assert x.ctypes.data % 64 == y.ctypes.data % 64 == 0
    model = on_replicas(keras.layers.Rescaling(3.0), keras.layers.Dense(16))
    x[:] = y[:] = 1.0
    model.fit(((x, y) for _ in range(2)), verbose=0)
    model.evaluate(((x, y) for _ in range(2)), verbose=0)
    model.predict(((x,) for _ in range(2)), verbose=0)
    assert (x == 1).all() and (y == 1).all()


def squares(y_true, y_pred):
    """Not one of Keras's: nothing is known of it."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def test_a_loss_of_its_own_sees_predictions_in_16_bits_and_masks_of_all_replicas():
    """By collectives, as between workers and with NCCL, which gather neither bfloat16 nor booleans."""
    ids = np.array([[1, 2, 0], [3, 0, 0], [1, 1, 1], [2, 3, 0], [3, 3, 0]])  # 0 is masked
    histories = []
    for strategy in (tf.distribute.get_strategy(), collective_strategy()):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            embedding = keras.layers.Embedding(4, 8, mask_zero=True, dtype="mixed_bfloat16")
            model = data_parallel(keras.Sequential)([embedding, keras.layers.Dense(2, dtype="mixed_bfloat16")])
            model.compile(keras.optimizers.SGD(0.1), squares)
        histories.append(model.fit(batches(ids, np.ones([5, 3, 2], np.float32)), epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-2)


@pytest.mark.parametrize(("eagerly", "steps"), [(False, None), (False, 3), (True, None)])
def test_all_stop_after_the_step_in_which_one_was_told_to(eagerly, steps):
    model, stopped = make_model(2, run_eagerly=eagerly), []
    tell = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(model, "told_to_stop", batch == 1),
        on_train_batch_end=lambda batch, logs: stopped.append(model.all_told_to_stop),
    )
    model.fit(batches(X, Y), steps_per_epoch=steps, verbose=0, callbacks=[tell])
    assert stopped == [False, True, False]


@pytest.mark.slow
def test_backup_and_restore_goes_on_with_the_epoch_after_the_last_whole_one(tmp_path):
    def trained(folder, *callbacks):
        model = make_model(2, keras.layers.BatchNormalization(), optimizer=lambda: keras.optimizers.Adam(0.1))
        backup = keras.callbacks.BackupAndRestore(tmp_path / folder)
        epochs = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
        model.fit(batches(X, Y), epochs=4, verbose=0, callbacks=[backup, epochs, *callbacks])
        return [*model.get_weights(), *model.optimizer.variables]

    begun = []
    whole = trained("whole")
    with pytest.raises(KeyboardInterrupt):
        trained("stopped", interrupt_at(7))  # of 12: after the first of the third epoch
    assert_same(trained("stopped"), whole)
    assert begun == [0, 1, 2, 3, 0, 1, 2, 2, 3]


def test_parts_of_a_batch_are_computed_one_after_another():
    passes = []

    def noted(name, tensor, seconds=0.0):
        def note(value):
            time.sleep(seconds)
            passes.append(name)
            return value

        return tf.ensure_shape(tf.numpy_function(note, [tensor], tensor.dtype), tensor.shape)

    @tf.custom_gradient
    def slow_backward(x):
        return noted("forward", x), lambda upstream: noted("backward", upstream, seconds=0.2)

    class Noting(keras.layers.Layer):
        def call(self, x):
            return slow_backward(x)

    model = make_model(1, Noting(), accumulate=3)
    model.fit(batches(X[:6], Y[:6]), verbose=0)
    assert passes == ["forward", "backward"] * 3


@pytest.mark.parametrize("replicas", [1, 2])
def test_none_for_an_input_that_a_model_needs_is_refused_as_by_keras(replicas):
    model = on_replicas(keras.Input((3,)), keras.layers.Dense(1), strategy=make_strategy(replicas))
    errors = ValueError, RuntimeError, AttributeError  # the last is of Keras 3.13, whose message is the second
    with pytest.raises(errors, match="not optional|'NoneType' object has no attribute"):
        model.fit([None], np.ones((4, 1)), verbose=0)


def test_nadam_within_a_loss_scale_is_as_on_one_device():
    """Keras does not list its product of rates among the variables, so that each replica multiplied it."""
    x = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)

    def trained(wrap, strategy=None):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.1)), "mse")
            wrap(model)
        model.fit(x, x[:, :1], 8, 2, verbose=0, shuffle=False)
        return [*model.get_weights(), model.optimizer.inner_optimizer._u_product.numpy()]

    assert_same(trained(data_parallel, make_strategy(2)), trained(lambda model: model), rtol=1e-5, atol=1e-6)
