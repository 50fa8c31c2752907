# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy with few passes over the logits: in a small BERT with a large vocabulary, half the time of a step."""

import keras
import tensorflow as tf


class CrossEntropy(keras.losses.Loss):
    """As `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, with fewer passes over the logits."""

    adds_up = True  # for `data_parallel`

    def __init__(self, reduction="mean_with_sample_weight", name="cross_entropy", dtype=None):
        super().__init__(name, reduction, dtype)

    def call(self, y_true, y_pred):
        """The loss of each label, in nats, in y_true's shape; see `cross_entropy`."""
        return cross_entropy(y_pred, tf.cast(y_true, tf.int32))  # Keras has cast the labels to floats


@tf.custom_gradient
def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """log(sum(exp(logits))) - logits[label], whose gradient is softmax(logits) less 1 at the label.

    The exponentials serve both the loss and the gradient. Takes logits [..., classes] and labels, int32 [...]; returns
    the loss of each label, in nats, [...].
    """
    highest = tf.reduce_max(logits, axis=-1, keepdims=True)
    exponentials = tf.exp(logits - highest)
    total = tf.reduce_sum(exponentials, axis=-1, keepdims=True)

    def gradient(of_losses):
        of_losses = of_losses[..., None]
        is_label = tf.range(tf.shape(logits)[-1]) == labels[..., None]
        return exponentials * (of_losses / total) - tf.where(is_label, of_losses, 0.0), None

    own = tf.gather(logits, labels[..., None], batch_dims=labels.shape.rank)
    return tf.squeeze(highest + tf.math.log(total) - own, axis=-1), gradient
