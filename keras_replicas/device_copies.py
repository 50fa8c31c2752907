# SPDX-License-Identifier: Apache-2.0
"""The copies of batches that a strategy holds ready on each device."""

import tensorflow as tf

from keras_replicas.private import multi_device_iterator_ops

_create = multi_device_iterator_ops._create_device_dataset


def do_not_tune_device_copies() -> None:
    """Stops TensorFlow, from now on, from tuning the copies of batches that it holds ready on each device.

    There is nothing to tune: their number is fixed. But in TensorFlow 2.21, deleting an iterator, as `fit` does after
    each epoch and validation, waits for the tuning thread, which sleeps 10 ms at first, then twice as long each time,
    up to a minute. A data set's own pipeline is tuned as before.
    """
    multi_device_iterator_ops._create_device_dataset = _create_untuned


def _create_untuned(*args):
    return untuned(_create(*args))


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set, with numbers of threads and buffers as they are set."""
    no_autotune = tf.data.Options()
    no_autotune.autotune.enabled = False
    return dataset.with_options(no_autotune)
