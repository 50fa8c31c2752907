"""Dropout's noise: another for each layer, replica and step, and none that is counted."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas import UserError, data_parallel, make_strategy, noise_of_step
from keras_replicas.noise import noise_seeds
from tests.conftest import on_replicas


def make_model(*layers, **options):
    keras.utils.set_random_seed(1)
    with make_strategy(2).scope():
        dropouts = keras.layers.Dropout(0.5), keras.layers.Dropout(0.5)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), *dropouts, *layers])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return data_parallel(model, **options)


def test_no_two_draws_of_a_run_have_the_same_seed():
    """A seed is two words: the replica is in the high half of the first, and the second has room for 65,536 draws."""
    model = make_model()
    strategy = model.distribute_strategy
    own = [int(v.value[0]) for v in model.non_trainable_variables if v.name == "seed_generator_state"]
    own.append(model.global_seed)
    for step in (0, 1, 5):
        seeds = strategy.run(lambda step=step: [seed for _, seed in noise_seeds(model, tf.constant(step))])
        for layer, seed in zip(own, seeds, strict=True):
            words = np.array([np.asarray(of_replica) for of_replica in strategy.experimental_local_results(seed)])
            assert words.tolist() == [[layer + (replica << 32), step * 65_536] for replica in range(2)]


class Noisy(keras.optimizers.SGD):
    """Adds noise to the weights, as stochastic gradient Langevin dynamics does."""

    def __init__(self, draw):
        super().__init__(0.1)
        self.draw = draw

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        self.assign_add(variable, self.draw(variable.shape))


def weights_of_replicas(optimizer):
    """Each replica's copy of a weight, after some steps."""
    with make_strategy(2).scope():
        model = data_parallel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)]))
        model.compile(optimizer, "mse")
    model.fit(np.ones((9, 4)), np.ones((9, 3)), 4, verbose=0)
    return model.distribute_strategy.experimental_local_results(model.layers[0].kernel.value)


def test_an_optimizer_draws_the_same_on_all_replicas():
    def by_generator(shape):
        return keras.random.normal(shape, seed=generator)

    with make_strategy(2).scope():
        generator = keras.random.SeedGenerator(1)
        of_generator = Noisy(by_generator)
        of_generator.generator = generator
        optimizers = Noisy(keras.random.normal), of_generator
    for optimizer in optimizers:
        first, second = weights_of_replicas(optimizer)
        np.testing.assert_array_equal(first, second)


def test_an_optimizer_that_draws_by_tensorflow_is_refused():
    with make_strategy(2).scope():
        optimizer = Noisy(tf.random.normal)
    with pytest.raises(UserError, match="the optimizer noisy.* draws random numbers by tf.random"):
        weights_of_replicas(optimizer)


def test_a_loop_of_ones_own_draws_the_noise_of_a_step():
    model, ones = make_model(), tf.ones((500, 4))
    strategy = model.distribute_strategy

    @tf.function
    def outputs(step):
        def on_replica():
            with noise_of_step(model, step):
                return model(ones, training=True)

        return strategy.experimental_local_results(strategy.run(on_replica))

    drawn = [each.numpy().tobytes() for step in (0, 1) for each in outputs(tf.constant(step))]
    assert len({*drawn}) == 4 and outputs(tf.constant(0))[1].numpy().tobytes() == drawn[1]


class Note(keras.layers.Layer):
    """Keeps what it is given, in every pass."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x):
        def note(values):
            self.seen.append(values.tobytes())
            return values

        return x + 0 * tf.stop_gradient(tf.ensure_shape(tf.numpy_function(note, [x], x.dtype), x.shape))


def test_fit_draws_other_noise_for_each_replica_part_and_step_and_keeps_its_seeds():
    model = make_model(note := Note(), accumulate=2)
    seeds, x = [variable.numpy()[0] for variable in model.non_trainable_variables], np.ones((1024, 4), np.float32)
    model.fit(x, x, batch_size=512, verbose=0)
    assert len(note.seen) == len({*note.seen}) == 8
    assert [variable.numpy()[0] for variable in model.non_trainable_variables] == seeds


def test_keras_may_have_drawn_under_another_strategy_before():
    """Its global generator has then a copy for each replica of that one."""
    make_strategy(2)  # splits the CPU
    keras.utils.clear_session()
    with tf.distribute.MirroredStrategy([tf.config.list_logical_devices()[0].name]).scope():
        keras.random.uniform((2,))
    on_replicas(keras.layers.Dense(4)).fit(np.zeros((8, 4)), np.zeros((8, 4)), verbose=0)
