import time

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from common.model.masked_lm import BertMaskedLM
from common.training import CrossEntropy
from common.training import make_optimizer
from keras_replicas.batches import Batches
from keras_replicas.model import data_parallel
from keras_replicas.strategy import make_strategy
from tests.conftest import collective_strategy
from tests.test_conformance import no_autotune

SLOTS, LENGTH = 2, 8


def examples(count, weights=None):
    """Random ids; every weight 1.0, or [count] weights for each sequence's labels."""
    random = np.random.default_rng(0)
    ids = random.integers(1, 50, (count, LENGTH)).astype(np.int32)
    x = {
        "token_ids": ids,
        "segment_ids": np.zeros_like(ids),
        "padding_mask": np.ones_like(ids),
        "mask_positions": np.tile(np.array([1, 3], np.int32), (count, 1)),
    }
    weight = np.ones(count) if weights is None else np.asarray(weights)
    return x, ids[:, [1, 3]], np.repeat(weight[:, None], SLOTS, axis=1).astype(np.float32)


def batches(data, size):
    return tf.data.Dataset.from_tensor_slices(data).batch(size)


def make_model(replicas, dropout=0.0, task=BertMaskedLM, optimizer=None, clip=None, accumulate=1, **options):
    keras.utils.set_random_seed(1)
    with make_strategy(replicas).scope():
        backbone = keras_hub.models.BertBackbone(50, 1, 1, 16, 16, dropout=dropout, max_sequence_length=LENGTH)
        model = task(backbone, compile=False)
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=clip) if optimizer is None else optimizer()
        model.compile(optimizer=optimizer, loss=CrossEntropy("mean_with_sample_weight"), **options)
        return model if accumulate == 1 else data_parallel(model, accumulate=accumulate)


def still():
    return keras.optimizers.SGD(0.0)


def weights_after(model):
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


class Steps(keras.callbacks.Callback):
    """The values that `fit` gives for each batch."""

    def __init__(self):
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


def fit(model, data, size, **kwargs):
    steps = Steps()
    history = model.fit(batches(data, size), verbose=0, callbacks=[steps], **kwargs).history
    return steps.logs, history


def hand_loss(model, data):
    x, y, weight = data
    log_probability = tf.nn.log_softmax(model(x, training=False))
    losses = -np.take_along_axis(np.asarray(log_probability), y[..., None], axis=-1)[..., 0]
    return (losses * weight).sum() / weight.sum()


@pytest.mark.slow
def test_keras_itself_still_fails_and_ours_does_not():
    """keras-team/keras#19246: the day the first half fails, `data_parallel` may lose a part."""
    x, y, weight = examples(8)
    x["padding_mask"] = x["padding_mask"].astype(bool)
    plain = make_model(2, task=keras_hub.models.BertMaskedLM)
    with pytest.raises(Exception, match="bool"):
        plain.fit(batches((x, y, weight), 4), verbose=0)
    fit(make_model(2), (x, y, weight), 4)


WEIGHTS = [1, 0, 0, 0, 1, 1, 1, 1]  # of a batch of 8, the first of two replicas has one label in five


# With a loss that is a part's, a replica's or a call's own, the weights would differ by 1e-3 and more.
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_options_at_once_end_with_the_same_weights(replicas, one_device):
    """One by one, they are rows of the conformance table."""
    model = make_model(replicas, clip=0.5, accumulate=2, jit_compile=True, steps_per_execution=3)
    _, history = fit(model, one_device["data"], 8, steps_per_epoch=4)
    np.testing.assert_allclose(weights_after(model), one_device["weights"], atol=2e-7)
    assert history["loss"][0] == pytest.approx(one_device["loss"], rel=1e-6)


@pytest.fixture(scope="module")
def one_device():
    """Four steps on one device, of unequal shares and an uneven last batch (filled with weight 0)."""
    data = examples(32, [*WEIGHTS, 1, 1, 1, 0, 1, 1, 1, 1] + [1] * 11 + [0] * 5)
    model = make_model(1, clip=0.5)
    _, history = fit(model, data, 8, steps_per_epoch=4)
    return {"data": data, "weights": weights_after(model), "loss": history["loss"][0]}


def muon():
    return make_optimizer("muon", 0.01, weight_decay=0.1, clip_norm=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "knobs"),
    [
        (2, {"accumulate": 2, "jit_compile": True, "steps_per_execution": 3}),
        (4, {}),
    ],
)
def test_muon_is_the_same_on_all_replicas(replicas, knobs, one_device):
    data = one_device["data"]
    models = [make_model(1, optimizer=muon), make_model(replicas, optimizer=muon, **knobs)]
    for model in models:
        fit(model, data, 8, steps_per_epoch=4)
    muons = [momentum is not None for momentum in models[1].optimizer.adam_velocities].count(False)
    assert muons == 7  # kernels of the one layer, and the pooler's
    # In theory an attention key's bias has no gradient: by AdamW its value is rounding noise.
    weights = [
        np.concatenate([np.ravel(w) for w in model.weights if not w.path.endswith("key/bias")]) for model in models
    ]
    np.testing.assert_allclose(*weights, atol=1e-6)


def test_in_float16_the_gradient_is_clipped_as_it_is_without_the_losss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model(2, clip=0.01)
    finally:
        keras.config.set_dtype_policy("float32")
    before = weights_after(model)
    fit(model, examples(8, WEIGHTS), 8)
    assert model.optimizer.iterations.numpy() == 1  # not skipped for an overflow
    assert np.linalg.norm(weights_after(model) - before) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_an_overflow_on_one_replica_is_skipped_on_all():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model(2)
    finally:
        keras.config.set_dtype_policy("float32")
    weights = np.ones(4)
    weights[2] = np.inf  # the second replica has it
    before, scale = weights_after(model), float(model.optimizer.dynamic_scale.numpy())
    fit(model, examples(4, weights), 4)
    np.testing.assert_array_equal(weights_after(model), before)
    for variable in model.optimizer.inner_optimizer.variables:
        for local in model.distribute_strategy.experimental_local_results(variable.value):
            assert np.isfinite(local).all()
    assert float(model.optimizer.dynamic_scale.numpy()) == scale / 2 and model.optimizer.iterations.numpy() == 0
    fit(model, examples(4), 4)
    assert np.isfinite(weights_after(model)).all() and (weights_after(model) != before).any()
    assert model.optimizer.iterations.numpy() == 1


def test_steps_of_one_call_keep_their_own_values():
    data = examples(28)
    one, three = make_model(2), make_model(2, steps_per_execution=3)
    values = []
    for model in (one, three):
        log = []

        class Keep(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, log=log):
                log.append({name: list(v) for name, v in self.model.step_values.items()})

        model.fit(batches(data, 4).repeat(), epochs=2, steps_per_epoch=7, verbose=0, callbacks=[Keep()])
        assert model.steps_done == 14
        values.append(log)
    assert [len(call["loss"]) for call in values[1]] == [3, 3, 1, 3, 3, 1]
    for name in values[0][0]:
        ours, theirs = ([value for call in log for value in call[name]] for log in values)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_kerashub_task_predicts_batches_in_the_order_of_the_rows():
    x, *_ = examples(6)
    model = make_model(2)
    np.testing.assert_allclose(model.predict(Batches(x, 4), verbose=0), model.predict_on_batch(x), rtol=1e-5, atol=1e-6)


def test_applied_twice_it_is_the_same():
    ours = data_parallel(keras_hub.models.BertMaskedLM)
    assert data_parallel(ours) is ours
    model = make_model(1)
    model.compile(model.optimizer, model.loss)


def test_epoch_values_are_exact_and_steps_are_their_own():
    data = examples(16)  # of 4 in a step
    model = make_model(2, optimizer=still)
    finite = batches(data, 4).filter(lambda *_: True).batch(1).unbatch()  # fit does not know how long it is
    own = []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: own.append(model.step_values))
    history = model.fit(finite, verbose=0, callbacks=[log := Steps(), keep]).history
    losses = [hand_loss(model, tf.nest.map_structure(lambda a, i=i: a[4 * i : 4 * i + 4], data)) for i in range(4)]
    np.testing.assert_allclose([step["loss"][0] for step in own], losses, rtol=1e-6)
    np.testing.assert_allclose([step["loss"] for step in log.logs], np.cumsum(losses) / [1, 2, 3, 4], rtol=1e-6)
    assert history["loss"][0] == pytest.approx(np.mean(losses), rel=1e-6)  # not N / (N + 1) of it
    uneven = examples(8, WEIGHTS)
    scores = model.evaluate(batches(uneven, 8), verbose=0, return_dict=True)
    assert scores["loss"] == pytest.approx(hand_loss(model, uneven), rel=1e-6)
    assert history["tokens"] == [16 * LENGTH] and own[0]["tokens"] == log.logs[0]["tokens"] == 4 * LENGTH


@pytest.mark.slow
def test_dropout_differs_between_replicas_parts_and_steps_and_keeps_its_seeds():
    data = tf.nest.map_structure(tf.constant, examples(1))
    model = make_model(2, dropout=0.5, optimizer=still, accumulate=2)
    strategy = model.distribute_strategy
    model._maybe_symbolic_build(data_batch=data)

    @tf.function
    def losses_of_replicas(step, part):
        def loss():
            scope, _ = model._own_state(model._copies(), model._step_number(part), [])
            with scope:
                return tf.reduce_sum(model(data[0], training=True) ** 2)

        model.optimizer.iterations.assign(step)
        return strategy.experimental_local_results(strategy.run(loss))

    losses = [losses_of_replicas(tf.constant(step, tf.int64), tf.constant(part)) for step in (0, 1) for part in (0, 1)]
    assert len(set(np.ravel(losses))) == 8
    np.testing.assert_array_equal(losses_of_replicas(tf.constant(0, tf.int64), tf.constant(0)), losses[0])
    before = [np.array(v)[0] for v in model.variables if v.name == "seed_generator_state"]
    fit(model, examples(4), 4)
    after = [np.array(v)[0] for v in model.variables if v.name == "seed_generator_state"]
    np.testing.assert_array_equal(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_preset_is_the_plain_tasks(policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    try:
        model = make_model(2)
    finally:
        keras.config.set_dtype_policy("float32")
    fit(model, examples(8), 4)
    model.save_to_preset(str(tmp_path))
    again = keras_hub.models.BertMaskedLM.from_preset(str(tmp_path))
    assert type(again) is keras_hub.models.BertMaskedLM
    x = examples(2)[0]
    np.testing.assert_array_equal(weights_after(again), weights_after(model))
    if policy == "float32":
        np.testing.assert_allclose(again(x), model(x), atol=1e-6)


# A small model of any kind, on two replicas of which the first has the larger part of every batch.
FEATURES, BATCH = 4, 7
X, Y = np.random.default_rng(0).normal(size=(2, 19, FEATURES)).astype(np.float32)


class Seen(keras.layers.Layer):
    """With state that it updates: the mean of what it saw, and how often it was called, which is a whole number."""

    def build(self, shape):
        state = {"initializer": "zeros", "trainable": False}
        self.mean = self.add_weight(shape=shape[1:], aggregation="mean", **state)
        self.calls = self.add_weight(shape=(), dtype="int32", aggregation="only_first_replica", **state)

    def call(self, x, training=False):
        seen = x - self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            self.calls.assign(self.calls + 1)
        return seen


def sequence_of(*layers):
    def make(model_class):
        inputs = outputs = keras.Input((FEATURES,))
        for layer in layers:
            outputs = layer()(outputs)
        return model_class(inputs, keras.layers.Dense(FEATURES)(outputs))

    return make


def dense():
    return keras.layers.Dense(FEATURES, activation="tanh")


def a_data_set():
    return batches((X, Y), BATCH).with_options(no_autotune())


def test_a_layer_s_state_is_what_plain_keras_makes_of_it():
    def outcome(model_class):
        keras.utils.set_random_seed(0)
        model = sequence_of(dense, Seen)(model_class)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        history = model.fit(a_data_set(), epochs=2, verbose=0).history
        scores = model.evaluate(a_data_set(), verbose=0)
        return [*history.values(), scores, *model.get_weights(), model.predict(X, BATCH, verbose=0)]

    plain = outcome(keras.Model)
    with make_strategy(2).scope():
        ours = outcome(data_parallel(keras.Model))
    for mine, theirs in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_arrays_of_a_generator_stay_as_they_are():
    """TensorFlow 2.21 takes a part of a generator's array for memory of its own, and writes into it."""
    size = np.prod(SHAPE := (8, 16))
    raw = np.zeros(2 * size + 32, np.float32)
    begin = -raw.ctypes.data % 64 // 4
    # TensorFlow copies what does not begin at a multiple of 64 bytes.
    x, y = (raw[at : at + size].reshape(SHAPE) for at in (begin, begin + size))
    assert x.ctypes.data % 64 == y.ctypes.data % 64 == 0
    with make_strategy(2).scope():
        model = data_parallel(keras.Sequential)([keras.layers.Rescaling(3.0), keras.layers.Dense(16)])
        model.compile("sgd", "mse")
    x[:] = y[:] = 1.0
    model.fit(((x, y) for _ in range(2)), verbose=0)
    model.evaluate(((x, y) for _ in range(2)), verbose=0)
    model.predict(((x,) for _ in range(2)), verbose=0)
    assert (x == 1).all() and (y == 1).all()


class Squares(keras.losses.Loss):
    """Not one of Keras's: nothing is known of it."""

    def call(self, y_true, y_pred):
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
            model.compile(keras.optimizers.SGD(0.1), Squares())
        data = batches((ids, np.ones([5, 3, 2], np.float32)), 5)
        histories.append(model.fit(data, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-2)


@pytest.mark.parametrize(("eagerly", "steps"), [(False, None), (False, 3), (True, None)])
def test_all_stop_after_the_step_in_which_one_was_told_to(eagerly, steps):
    with make_strategy(2).scope():
        model = sequence_of(dense)(data_parallel(keras.Model))
        model.compile("sgd", "mse", run_eagerly=eagerly)
    stopped = []
    tell = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(model, "told_to_stop", batch == 1),
        on_train_batch_end=lambda batch, logs: stopped.append(model.all_told_to_stop),
    )
    model.fit(a_data_set(), steps_per_epoch=steps, verbose=0, callbacks=[tell])
    assert stopped == [False, True, False]


@pytest.mark.slow
def test_backup_and_restore_goes_on_with_the_epoch_after_the_last_whole_one(tmp_path):
    def trained(folder, *callbacks):
        keras.utils.set_random_seed(0)
        with make_strategy(2).scope():
            model = sequence_of(dense, keras.layers.BatchNormalization)(data_parallel(keras.Model))
            model.compile(keras.optimizers.Adam(0.1), "mse")
        backup = keras.callbacks.BackupAndRestore(tmp_path / folder)
        epochs = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
        model.fit(a_data_set(), epochs=4, verbose=0, callbacks=[backup, epochs, *callbacks])
        return model

    class Die(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.steps_done == 7:  # of 12: after the first of the third epoch
                raise KeyboardInterrupt

    begun = []
    whole = trained("whole")
    with pytest.raises(KeyboardInterrupt):
        trained("stopped", Die())
    again = trained("stopped")
    assert begun == [0, 1, 2, 3, 0, 1, 2, 2, 3]
    np.testing.assert_array_equal(weights_after(again), weights_after(whole))
    for mine, theirs in zip(again.optimizer.variables, whole.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine, theirs)


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

    with make_strategy(1).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Noting()])
        data_parallel(model, accumulate=3).compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones((6, 3)), tf.ones((6, 2))))
    model.fit(data, verbose=0)
    assert passes == ["forward", "backward"] * 3


@pytest.mark.parametrize("replicas", [1, 2])
def test_none_for_an_input_that_a_model_needs_is_refused_as_by_keras(replicas):
    with make_strategy(replicas).scope():
        x = keras.Input((3,))
        model = data_parallel(keras.Model(x, keras.layers.Dense(1)(x)))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="not optional"):
        model.fit([None], np.ones((4, 1)), verbose=0)
