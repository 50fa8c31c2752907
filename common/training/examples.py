# SPDX-License-Identifier: Apache-2.0
"""A replica's examples. The last batch of a data set may leave a replica none, and nothing it computes then counts."""

import contextlib
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.losses import loss as loss_module


class _Forward(threading.local):
    """The forward pass that this thread traces: that of one replica."""

    is_running = False
    has_examples: tf.Tensor | None = None  # whether it is of examples; None, where that is known


_forward, _scaled = _Forward(), loss_module.scale_loss_for_distribution
loss_module.scale_loss_for_distribution = lambda value: value if _forward.is_running else _scaled(value)


@contextlib.contextmanager
def forward_pass(has_examples: tf.Tensor | None) -> Iterator[None]:
    """While it lasts, a loss of Keras's that a layer computes is what it is on one device.

    Under a strategy Keras divides it by the number of replicas, for gradients to add up.

    Args:
        has_examples: whether it is of this replica's examples, or there are none; None, where that is known.
    """
    _forward.is_running, _forward.has_examples = True, has_examples
    try:
        yield
    finally:
        _forward.is_running, _forward.has_examples = False, None


def of_examples(total: tf.Tensor) -> tf.Tensor:
    """A sum over examples in a `forward_pass`; zeros where there are none."""
    if _forward.has_examples is None:
        return total
    return tf.where(_forward.has_examples, total, tf.zeros_like(total))


def count_examples(x) -> tf.Tensor:
    """The number of examples in this replica's part of a batch, a float."""
    first = first_input(x)
    return tf.cast(first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0], tf.float32)


def first_input(x):
    """The first tensor of a model's inputs."""
    return next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)


def with_an_example(x):
    """This replica's inputs; where it has none, of one example, zeros: many of TensorFlow's kernels fail without.

    The very same, where their number is known.
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


def outputs_of_examples(y_pred, examples):
    """The outputs of so many examples, and their masks, without that of an example of `with_an_example`."""
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
    """A structure of tensors; zeros where there are no examples: what `with_an_example` gives may be NaN."""

    def known(value):
        return tf.cond(examples > 0, lambda: value, lambda: tf.zeros_like(value))

    # A condition for each, or no worker could send a gradient before it has all.
    return tf.nest.map_structure(known, values)
