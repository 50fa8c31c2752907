# SPDX-License-Identifier: Apache-2.0
"""Fast dropout without state: its noise is a function of the layer's seed, the step and the replica.

Keras counts up seeds kept in mirrored variables: every replica drops the same units, and no checkpoint saves the count.
"""

import contextlib
import functools
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

DRAWS = 2**16  # more than the random numbers that one layer draws in a step


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


class Dropout(keras.layers.Dropout):
    """As Keras's, with 16 random bits for each unit, where Keras draws 32 and converts them to a float.

    The rate is rounded to a multiple of 2^-16, and at most 1 - 2^-15; what stays is divided by the share that stays.
    """

    def call(self, inputs, training=False):
        """Drops units in training; see `keras.layers.Dropout`."""
        dropped = min(round(self.rate * 2**16), 2**16 - 2)  # float16 holds 2^15, but not 2^16
        if not training or not dropped:
            return inputs
        units = tf.size(inputs)
        seed = tf.cast(self.seed_generator.next(), tf.int64)
        words = tf.random.stateless_uniform([(units + 3) // 4], seed, minval=None, maxval=None, dtype=tf.uint64)
        numbers = tf.reshape(tf.reshape(tf.bitcast(words, tf.uint16), [-1])[:units], tf.shape(inputs))
        stays = numbers >= tf.constant(dropped, tf.uint16)
        return inputs * (tf.cast(stays, inputs.dtype) * tf.constant(2**16 / (2**16 - dropped), inputs.dtype))


def make_dropout_fast(model: keras.Model) -> None:
    """Makes the model's dropout layers compute like `Dropout`: KerasHub offers no way to choose them.

    What is saved of the model does not change.
    """
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.Dropout and layer.noise_shape is None:
            layer.call = functools.partial(Dropout.call, layer)


def keep_global_seed(model: keras.Model) -> None:
    """Keeps, on the model, the generator that Keras draws from if no seed is given, as in `keras.random.normal(shape)`.

    Call it outside a step, in which a generator cannot be made, and `use_global_seed` inside: each thread has its own.
    """
    generator = global_seed_generator()
    seed = int(keras.ops.convert_to_numpy(generator.state)[0])  # of another strategy, maybe, when a step is traced
    vars(model).update(global_seed_generator=generator, global_seed=seed)  # assigned as usual, they would be saved


def use_global_seed(model: keras.Model) -> None:
    """See `keep_global_seed`; nothing for a model that keeps none."""
    if "global_seed" in vars(model):
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, model.global_seed_generator)


def noise_seeds(model: keras.Model, count: tf.Tensor) -> Iterator[tuple[keras.Variable, tf.Tensor]]:
    """The variables that hold seeds, with their values for this replica.

    Args:
        model: whose seeds they are.
        count: an integer, a different one each time the model is called: the number of the step, or of a part of it.
    """
    replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
    variables = [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]
    seeds = [(variable, variable.value[0]) for variable in variables]
    if "global_seed" in vars(model):
        seeds.append((model.global_seed_generator.state, tf.constant(model.global_seed, tf.int64)))
    for variable, seed in seeds:
        yield variable, tf.stack([seed + replica * 2**32, tf.cast(count, tf.int64) * DRAWS])
