# SPDX-License-Identifier: Apache-2.0
"""A replica's examples. A data set's last batch may leave a replica none: what it then computes must not count."""

import contextlib
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.losses import loss as loss_module


class _Forward(threading.local):
    """The forward pass, of one replica, that this thread traces."""

    is_running = False
    has_examples: tf.Tensor | None = None  # whether there are any; None where that is known


_forward, _scaled = _Forward(), loss_module.scale_loss_for_distribution
loss_module.scale_loss_for_distribution = lambda value: value if _forward.is_running else _scaled(value)


@contextlib.contextmanager
def forward_pass(has_examples: tf.Tensor | None) -> Iterator[None]:
    """While it lasts, a Keras loss that a layer computes has the value that it has on one device.

    Under a strategy, Keras divides it by the number of replicas, so that gradients add up.

    Args:
        has_examples: whether this replica has examples; None where that is known.
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


def outputs_of_examples(y_pred, examples):
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
        return tf.cond(examples > 0, lambda: value, lambda: tf.zeros_like(value))

    # A condition for each tensor: with one for all, no worker could send a gradient before it has them all.
    return tf.nest.map_structure(kept, values)
