# SPDX-License-Identifier: Apache-2.0
"""Dropout whose noise is a function of the layer's seed, the step and the replica, without state, and comes fast.

Keras counts up seeds kept in mirrored variables: every replica drops the same units, and no checkpoint saves the count.
"""

import functools
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

DRAWS = 2**16  # more than the random numbers that one layer draws in a step


class Dropout(keras.layers.Dropout):
    """As Keras's, with 16 random bits for each unit, where Keras draws 32 and makes a float of them.

    The rate is that asked for, rounded to a multiple of 2^-16 and 1 - 2^-15 at most; what stays is divided by the share
    that stays.
    """

    def call(self, inputs, training=False):
        """Drops units in training; see `keras.layers.Dropout`."""
        dropped = min(round(self.rate * 2**16), 2**16 - 2)  # float16 holds 2^15, and not 2^16
        if not training or not dropped:
            return inputs
        units = tf.size(inputs)
        seed = tf.cast(self.seed_generator.next(), tf.int64)
        words = tf.random.stateless_uniform([(units + 3) // 4], seed, minval=None, maxval=None, dtype=tf.uint64)
        numbers = tf.reshape(tf.reshape(tf.bitcast(words, tf.uint16), [-1])[:units], tf.shape(inputs))
        stays = numbers >= tf.constant(dropped, tf.uint16)
        return inputs * (tf.cast(stays, inputs.dtype) * tf.constant(2**16 / (2**16 - dropped), inputs.dtype))


def make_dropout_fast(model: keras.Model) -> None:
    """Has the model's dropout layers do as the class above: KerasHub gives no way to choose them.

    What is saved of the model stays as it is.
    """
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.Dropout and layer.noise_shape is None:
            layer.call = functools.partial(Dropout.call, layer)


def keep_global_seed(model: keras.Model) -> None:
    """Has a model know what Keras draws from where no seed is named, as in `keras.random.normal(shape)`.

    Call it outside of a step, in which it cannot be made, and `use_global_seed` within: each thread has one of its own.
    """
    generator = global_seed_generator()
    seed = int(keras.ops.convert_to_numpy(generator.state)[0])  # of another strategy, maybe, when a step is traced
    vars(model).update(global_seed_generator=generator, global_seed=seed)  # set as attributes, they would be saved


def use_global_seed(model: keras.Model) -> None:
    """See `keep_global_seed`."""
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, model.global_seed_generator)


def noise_seeds(model: keras.Model, count: tf.Tensor) -> Iterator[tuple[keras.Variable, tf.Tensor]]:
    """The variables that hold seeds, and the values that they have for this replica.

    Args:
        model: whose variables are looked through.
        count: an integer, another one for each time that the model is called: the step, or a part of it.
    """
    replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
    own = [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]
    seeds = [(variable, variable.value[0]) for variable in own]
    for variable, seed in [*seeds, (model.global_seed_generator.state, tf.constant(model.global_seed, tf.int64))]:
        yield variable, tf.stack([seed + replica * 2**32, tf.cast(count, tf.int64) * DRAWS])
