# SPDX-License-Identifier: Apache-2.0
"""Dropout whose noise is a function of the layer's seed, the step and the replica, without state, and comes fast.

Keras counts up seeds kept in mirrored variables: every replica drops the same units, and no checkpoint saves the count.
"""

import functools
from collections.abc import Iterator

import keras
import tensorflow as tf

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
        return tf.where(
            stays, inputs * tf.constant(2**16 / (2**16 - dropped), inputs.dtype), tf.zeros([], inputs.dtype)
        )


def make_dropout_fast(model: keras.Model) -> None:
    """Has the model's dropout layers do as the class above: KerasHub gives no way to choose them.

    What is saved of the model stays as it is.
    """
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.Dropout and layer.noise_shape is None:
            layer.call = functools.partial(Dropout.call, layer)


def noise_seeds(model: keras.Model, count: tf.Tensor) -> Iterator[tuple[keras.Variable, tf.Tensor]]:
    """The variables that hold seeds, and the values that they have for this replica.

    Args:
        model: whose variables are looked through.
        count: an integer, another one for each time that the model is called: the step, or a part of it.
    """
    replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
    for variable in model.non_trainable_variables:
        if variable.name == "seed_generator_state":
            yield variable, tf.stack([variable.value[0] + replica * 2**32, tf.cast(count, tf.int64) * DRAWS])
