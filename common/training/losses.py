# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy with few passes over the logits: in a small BERT with a large vocabulary, half the time of a step."""

import keras
import tensorflow as tf

from common.training.fused import fuse

MANY = 2**13  # classes: with fewer, compiling takes longer than it saves in a short run


class CrossEntropy(keras.losses.Loss):
    """As `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, with fewer passes over the logits.

    By default, it is the weighted sum over labels.
    """

    adds_up = True  # for `data_parallel`

    def __init__(self, reduction="sum", name="cross_entropy", dtype=None):
        super().__init__(name, reduction, dtype)

    def call(self, y_true, y_pred):
        """The loss of each label, in nats, in y_true's shape; see `cross_entropy`."""
        return cross_entropy(y_pred, tf.cast(y_true, tf.int32))  # Keras has cast the labels to floats


class LabelAccuracy(keras.metrics.Mean):
    """The fraction of labels, by weight, that have the highest logit; see `label_hits`."""

    adds_up = True  # for `data_parallel`

    def __init__(self, name="accuracy", dtype=None):
        super().__init__(name, dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Counts every label alike: Keras would average over those of an example, and replicas pad differently."""
        weight = None if sample_weight is None else tf.reshape(sample_weight, [-1])
        return super().update_state(tf.reshape(label_hits(y_true, y_pred), [-1]), weight)


@tf.custom_gradient
def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """log(sum(exp(logits))) - logits[label], whose gradient is softmax(logits) less 1 at the label.

    The exponentials serve both the loss and the gradient. Takes logits [..., classes] and labels, int32 [...]; returns
    the loss of each label, in nats, [...].
    """
    highest, exponentials = _exponentials(logits)
    total = tf.reduce_sum(exponentials, axis=-1, keepdims=True)  # not by XLA: TensorFlow's sums are more accurate

    def gradient(of_losses):
        of_losses = of_losses[..., None]
        return _gradient(exponentials, of_losses / total, labels, of_losses), None

    return tf.squeeze(highest + tf.math.log(total) - label_logits(logits, labels), axis=-1), gradient


@fuse(MANY)
def _exponentials(logits):
    highest = _highest(logits)
    return highest, tf.exp(logits - highest)


@fuse(MANY)
def _gradient(exponentials, factors, labels, at_labels):
    classes = tf.shape(exponentials)[-1]
    return exponentials * factors - tf.where(tf.range(classes) == labels[..., None], at_labels, 0.0)


@fuse(MANY)
def _highest(logits):
    return tf.reduce_max(logits, axis=-1, keepdims=True)


def label_logits(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Each label's own logit, [..., 1]; see `cross_entropy`."""
    return tf.gather(logits, labels[..., None], batch_dims=labels.shape.rank)


def label_hits(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """1.0 where a label has the highest logit (in 16 bits, the first such), else 0.0; see `cross_entropy`."""
    labels = tf.cast(labels, tf.int32)
    if logits.dtype == tf.float32:  # ties are rare, and one more pass over the logits would take 1 % of a step
        return tf.cast(tf.squeeze(label_logits(logits, labels) >= _highest(logits), axis=-1), tf.float32)
    # Cast, as for the loss: in 16 bits, argmax takes twice as long.
    first = tf.argmax(tf.cast(logits, tf.float32), axis=-1, output_type=tf.int32)
    return tf.cast(first == labels, tf.float32)
