# SPDX-License-Identifier: Apache-2.0
"""Dropout whose noise is a function of the layer's seed, the step and the replica, without state.

Keras counts up seeds kept in mirrored variables: every replica drops the same units, and no checkpoint saves the count.
"""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

DRAWS = 2**16  # more than the random numbers that one layer draws in a step


@contextlib.contextmanager
def noise_of_step(model: keras.Model, step: tf.Tensor) -> Iterator[None]:
    """While it lasts, the model's layers draw the noise of that step and this replica. Use it in a replica's step."""
    with keras.StatelessScope(state_mapping=list(noise_seeds(model, step))):
        yield


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
