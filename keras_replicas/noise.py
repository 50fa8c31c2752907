# SPDX-License-Identifier: Apache-2.0
"""Noise without state: what dropout draws is a function of the layer's seed, the step and the replica.

Keras counts up seeds kept in mirrored variables: every replica drops the same units, and no checkpoint saves the count.
"""

import contextlib
import random
from collections.abc import Iterator

import keras
import tensorflow as tf

from keras_replicas.private import (
    GLOBAL_SEED_GENERATOR,
    get_global_attribute,
    global_seed_generator,
    set_global_attribute,
)
from keras_replicas.replicas import local_value, replica_context

DRAWS = 2**16  # more than the random numbers that one layer draws in a step
DRAWS_OF_TENSORFLOW = 2**15  # from here on, of TensorFlow's functions with a state, in a custom step
REPLICAS_APART = 2**32  # between two replicas' seeds; more than a layer's own seed


@contextlib.contextmanager
def noise_of_step(model: keras.Model, step: tf.Tensor) -> Iterator[None]:
    """While it lasts, the model's layers draw the noise of that step and this replica, and no other.

    Call the model in it, in a replica's step of an explicit loop; `fit` of a `data_parallel` model needs no such care.
    What layers update while training is not kept, such as the averages of `BatchNormalization`.

    Args:
        model: a built model.
        step: an integer scalar, another for each call of the model, the same on all replicas, such as
            `optimizer.iterations`.

    Raises:
        RuntimeError: outside of a replica's step.
    """
    use_global_seed(model)
    with keras.StatelessScope(state_mapping=list(noise_seeds(model, step))):
        yield


def keep_global_seed(model: keras.Model) -> None:
    """Keeps, on the model, a copy of the generator that Keras draws from if no seed is given.

    Call it in the strategy's scope, but outside a step, in which a generator cannot be made, and `use_global_seed`
    inside: each thread has its own.
    """
    drawn = random.getstate()
    generator = global_seed_generator()  # which Keras may make of Python's random numbers: the next model has the same
    random.setstate(drawn)
    state = keras.ops.convert_to_numpy(generator.state)
    if vars(model).get("global_seed") != state[0]:
        generator = keras.random.SeedGenerator(int(state[0]))
        generator.state.assign(state)
        # Assigned as usual, they would be saved.
        vars(model).update(global_seed_generator=generator, global_seed=int(state[0]))


def use_global_seed(model: keras.Model) -> None:
    """Makes Keras draw from the generator that `keep_global_seed` has kept on the model, if there is one."""
    if "global_seed" in vars(model):
        set_global_attribute(GLOBAL_SEED_GENERATOR, model.global_seed_generator)


def share_global_seed() -> None:
    """Makes all replicas draw the same from Keras's global generator; `noise_seeds` sets it anew in the next pass."""
    generator = get_global_attribute(GLOBAL_SEED_GENERATOR)
    if generator is not None:
        state = local_value(generator.state)
        state.assign(tf.stack([state[0] % REPLICAS_APART, state[1]]))


@contextlib.contextmanager
def global_seed_of(model: keras.Model) -> Iterator[None]:
    """Context in which Keras draws from the generator that `keep_global_seed` has kept on the model."""
    before = get_global_attribute(GLOBAL_SEED_GENERATOR)
    use_global_seed(model)
    try:
        yield
    finally:
        set_global_attribute(GLOBAL_SEED_GENERATOR, before)


def noise_seeds(model: keras.Model, number: tf.Tensor) -> Iterator[tuple[keras.Variable, tf.Tensor]]:
    """The variables that hold seeds, with their values for this replica.

    Args:
        model: whose seeds they are.
        number: an integer, another each time the model is called, such as that of the step.
    """
    replica = tf.cast(replica_context().replica_id_in_sync_group, tf.int64)
    variables = [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]
    seeds = [(variable, variable.value[0] % REPLICAS_APART) for variable in variables]
    if "global_seed" in vars(model):
        seeds.append((model.global_seed_generator.state, tf.constant(model.global_seed, tf.int64)))
    for variable, seed in seeds:
        yield variable, tf.stack([seed + replica * REPLICAS_APART, tf.cast(number, tf.int64) * DRAWS])


def seed_of_draws(model: keras.Model, step: tf.Tensor, draw: int, seed: int | None, is_shared: bool) -> tf.Tensor:
    """The seed of a random function of TensorFlow with a state, which in a step has none.

    Args:
        model: whose global seed it begins with.
        step: the step's number.
        draw: the draw's number in the step.
        seed: what the caller gave; None for nothing.
        is_shared: whether all replicas draw the same.
    """
    replica = tf.cast(0 if is_shared else replica_context().replica_id_in_sync_group, tf.int64)
    first = tf.constant(vars(model).get("global_seed", 0), tf.int64) + tf.cast(seed or 0, tf.int64)
    return tf.stack([first + replica * REPLICAS_APART, tf.cast(step, tf.int64) * DRAWS + draw])
