# SPDX-License-Identifier: Apache-2.0
"""`BatchNormalization` by the moments of the whole batch."""

import functools

import keras
import tensorflow as tf

from keras_replicas.empty import sum_of_examples
from keras_replicas.replicas import replicas, sum_over_replicas


def take_moments_of_whole_batch(layer: keras.layers.BatchNormalization, model: keras.Model) -> None:
    """Makes a layer of a `data_parallel` model normalise by the mean and variance over all replicas' examples.

    Keras's are those of each replica; with `synchronized=True` they are the mean of the replicas', which is wrong
    where these have different numbers of examples.
    """
    layer._moments = functools.partial(_moments, layer, model)


def _moments(layer, model, inputs, mask):
    """Mean and variance for each channel, each [channels], as the layer takes them on one device."""
    if tf.distribute.in_cross_replica_context() or (replicas() == 1 and model.accumulate == 1):
        return type(layer)._moments(layer, inputs, mask)
    model._needs_all_replicas("a model without BatchNormalization")
    axes = layer._reduction_axes
    if mask is None:
        weights, epsilon = tf.ones_like(inputs), 0.0
    else:
        weights, epsilon = tf.cast(mask[..., None], inputs.dtype) * tf.ones_like(inputs), keras.config.epsilon()
        inputs = tf.where(weights > 0, inputs, 0.0)
    sums = [sum_of_examples(tf.reduce_sum(each, axes, keepdims=True)) for each in (inputs, weights)]
    total, count = sum_over_replicas(sums)
    mean = total / (count + epsilon)
    squares = sum_of_examples(tf.reduce_sum(weights * tf.square(inputs - mean), axes, keepdims=True))
    variance = sum_over_replicas(squares) / (count + epsilon)
    return tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
