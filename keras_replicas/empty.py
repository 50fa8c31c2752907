# SPDX-License-Identifier: Apache-2.0
"""A replica without examples. A data set's last batch may leave it none: what it then computes must not count."""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.private import get_keras_mask, set_keras_mask, strategy_seen
from keras_replicas.replicas import replica_context


class OneReplica:
    """The strategy, as a model sees it in a replica's pass: it has one replica.

    Keras divides a loss that a layer computes by the strategy's number of replicas, so that gradients add up. Here a
    loss has the value that it has on one device. A replica context, by which replicas reduce, has the true number.
    """

    num_replicas_in_sync = 1

    def __init__(self, strategy: tf.distribute.Strategy, has_examples: tf.Tensor | None):
        self._strategy, self.has_examples = strategy, has_examples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def forward_pass(has_examples: tf.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """While it lasts, in this thread alone, the strategy is `OneReplica`.

    Args:
        has_examples: whether this replica has examples; None where that is known.
    """
    context = replica_context()
    return strategy_seen(OneReplica(context.strategy, has_examples), context)


def sum_of_examples(total: tf.Tensor) -> tf.Tensor:
    """A sum over examples in a `forward_pass`; zeros where there are none."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, OneReplica) or strategy.has_examples is None:
        return total
    return tf.where(strategy.has_examples, total, tf.zeros_like(total))


def count_examples(x) -> tf.Tensor:
    """The number of a replica's examples, a float."""
    first = first_input(x)
    return tf.cast(first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0], tf.float32)


def first_input(x):
    """The first tensor of a model's inputs."""
    return next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)


def with_an_example(x):
    """This replica's inputs or, if it has none, one example of zeros: many of TensorFlow's kernels fail without one.

    Where the number of examples is known, this is `x` itself.
    """
    dense = all(leaf is None or isinstance(leaf, tf.Tensor) for leaf in keras.tree.flatten(x))
    if not dense or first_input(x).shape[0]:
        return x

    def filled(leaf):
        if leaf is None:
            return None
        shape = tf.concat([[1], tf.shape(leaf)[1:]], axis=0)
        filled = tf.cond(tf.shape(leaf)[0] > 0, lambda: leaf, lambda: tf.zeros(shape, leaf.dtype))
        return tf.ensure_shape(filled, [None, *leaf.shape[1:]])

    return keras.tree.map_structure(filled, x)


def without_added_example(y_pred, examples):
    """The outputs and masks of the first `examples` examples, without the one that `with_an_example` adds."""
    examples = tf.cast(examples, tf.int32)

    def first(output):
        if output is None or not output.shape.rank:
            return output
        result, mask = output[:examples], get_keras_mask(output)
        if mask is not None:
            set_keras_mask(result, mask[:examples])
        return result

    return keras.tree.map_structure(first, y_pred)


def zeros_without_examples(examples, values):
    """The tensors of a structure, or zeros if there are no examples: what comes of `with_an_example` may be NaN."""

    def kept(value):
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(kept(value.values), value.indices, value.dense_shape)
        return tf.cond(examples > 0, lambda: value, lambda: tf.zeros_like(value))

    # A condition for each tensor: with one for all, no worker could send a gradient before it has them all.
    return tf.nest.map_structure(kept, values)
