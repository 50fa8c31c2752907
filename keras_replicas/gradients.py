# SPDX-License-Identifier: Apache-2.0
"""Gradients of a replica's pass, which add up to those of the batch's loss."""

import keras
import tensorflow as tf

from keras_replicas.forward import Forward
from keras_replicas.outputs import logits_of
from keras_replicas.replicas import replicas, sum_over_replicas


class Gradients(Forward):
    """For the passes in `passes.py`."""

    def _gradients_by_sums(self, tape, loss, divisor, weights, scale):
        """Gradients of this replica's sum of a loss, times `scale`."""
        divisor = tf.where(divisor > 0, divisor, tf.ones_like(divisor))
        overwritten = [variable.overwrite_with_gradient for variable in self.trainable_variables]
        float8 = any(overwritten)  # by what depends on a gradient's size
        if float8:
            self._needs_all_replicas("a model that is not quantised to float8")
        if not float8 and not isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            divisor = tf.ones_like(divisor)
        elif self._compiling or self.accumulate > 1:  # as if all passes had as much
            divisor *= replicas() * self.accumulate
        else:  # as large as on one device, where float16 has a limit
            divisor = sum_over_replicas(divisor)
        gradients = tape.gradient(loss, weights, tf.cast(scale, loss.dtype) / divisor)
        return [
            gradient if gradient is None or as_is else times(gradient, divisor)
            for gradient, as_is in zip(gradients, overwritten, strict=False)
        ]

    def _gathered_gradients(self, tape, scope, data, y_pred, added, examples, weights, scale, training):
        """The loss of all replicas' examples; and this replica's gradients, whose sum over replicas is the batch's."""
        outputs = [leaf for leaf in keras.tree.flatten(y_pred) if leaf is not None and leaf.dtype.is_floating]
        sources = [*outputs, *filter(lambda logits: logits is not None, map(logits_of, outputs)), *added]
        with tf.GradientTape() as of_loss:
            of_loss.watch([*sources, *weights])
            loss, share = self._gathered_loss(scope, data, y_pred, added, examples, training)
        found = of_loss.gradient(loss, [*sources, *weights], tf.cast(scale, loss.dtype))
        pairs = [pair for pair in zip(sources, found, strict=False) if pair[1] is not None]
        through = tape.gradient([source for source, _ in pairs], weights, [gradient for _, gradient in pairs])
        # Every replica has all that reaches weights in another way than through its outputs, so each takes a share.
        direct = [None if gradient is None else times(gradient, share) for gradient in found[len(sources) :]]
        return loss, [plus(a, b) for a, b in zip(through, direct, strict=True)]


def times(gradient, factor):
    """A gradient, multiplied by a scalar."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def plus(first, second):
    """The sum of two gradients; either may be None."""
    if first is None or second is None:
        return second if first is None else first
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)
