import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas.noise import Dropout, noise_seeds
from tests.test_data_parallel import make_model


def dropped(layer, shape, dtype=tf.float32, jit=False):
    @tf.function(jit_compile=jit)
    def run():
        ones = tf.ones(shape, dtype)
        with tf.GradientTape() as tape:
            tape.watch(ones)
            result = layer(ones, training=True)
        return result, tape.gradient(result, ones)

    return run()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.99])
def test_it_drops_the_rate_and_keeps_the_mean(rate, jit):
    result, gradient = dropped(Dropout(rate, seed=1), [100, 999], jit=jit)
    stays = np.asarray(result) > 0
    assert stays.mean() == pytest.approx(1 - rate, abs=4 * np.sqrt(rate * (1 - rate) / stays.size))
    np.testing.assert_allclose(np.asarray(result)[stays], 1 / (1 - rate), rtol=1e-3)
    np.testing.assert_array_equal(gradient, result)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16])
@pytest.mark.parametrize("rate", [0.99998, 0.999995, 1.0])
def test_a_rate_that_drops_nearly_all_gives_finite_numbers(rate, dtype):
    result, _ = dropped(Dropout(rate, seed=1), [1000, 999], dtype)
    result = np.asarray(result)
    assert np.isfinite(result).all() and 0 < np.count_nonzero(result) < 100


def test_units_are_dropped_by_themselves():
    draws = [np.asarray(dropped(Dropout(0.5, seed=seed), [100_000])[0]) > 0 for seed in (1, 2)]
    for distance in (1, 2, 3, 4, 8, 64):
        assert abs(np.corrcoef(draws[0][:-distance], draws[0][distance:])[0, 1]) < 0.015
    assert abs(np.corrcoef(*draws)[0, 1]) < 0.015


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_it_keeps_the_format(dtype):
    result, gradient = dropped(Dropout(0.25, seed=1, dtype=dtype.name), [7, 3], dtype)
    assert result.dtype == gradient.dtype == dtype


def test_out_of_training_nothing_is_dropped():
    ones = tf.ones([50])
    np.testing.assert_array_equal(Dropout(0.5)(ones, training=False), ones)
    np.testing.assert_array_equal(Dropout(0.0)(ones, training=True), ones)


def test_a_compiled_model_has_it_and_is_described_as_before():
    model = make_model(1, dropout=0.1)
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dropout)]
    assert layers and all(layer.call.func is Dropout.call for layer in layers)
    assert "common" not in str(keras.saving.serialize_keras_object(model.backbone))


def test_no_two_draws_of_a_run_have_the_same_seed():
    """A seed is two words: the replica is in the high half of the first, and the second has room for 65,536 draws."""
    model = make_model(2, dropout=0.1)
    strategy = model.distribute_strategy
    own = [int(v.value[0]) for v in model.non_trainable_variables if v.name == "seed_generator_state"]
    own.append(model.global_seed)
    for step in (0, 1, 5):
        seeds = strategy.run(lambda step=step: [seed for _, seed in noise_seeds(model, tf.constant(step))])
        for layer, seed in zip(own, seeds, strict=True):
            words = np.array([np.asarray(of_replica) for of_replica in strategy.experimental_local_results(seed)])
            assert words.tolist() == [[layer + (replica << 32), step * 65_536] for replica in range(2)]
