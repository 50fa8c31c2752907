# SPDX-License-Identifier: Apache-2.0
"""A model's outputs on several replicas: rows that are put in order, with what Keras keeps with them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.division import UNLIKE_ROWS
from keras_replicas.errors import UserError
from keras_replicas.origins import SAME_ON_REPLICAS
from keras_replicas.private import get_keras_mask, set_keras_mask
from keras_replicas.replicas import gather, map_given, replica_context

ROWS = (  # without an apostrophe, which TensorFlow would escape
    "an output does not have one row for each example, so the rows of several replicas cannot be put in order: return "
    "one row for each example, such as [batch, 2, features] for two views; or use only losses and metrics that Keras "
    "has, or whose adds_up is true; or use one replica"
)
ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}


def gather_around(values: Any) -> Any:
    """The tensors of all replicas, as by `gather`; gradients flow through this replica's rows."""
    replica = replica_context().replica_id_in_sync_group
    first = next(leaf for leaf in keras.tree.flatten(values) if leaf is not None)
    sizes = gather((first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0])[None])
    start, end = tf.reduce_sum(sizes[:replica]), tf.reduce_sum(sizes[: replica + 1])

    def around(mine):
        everyones = gather(mine)
        with tf.name_scope(SAME_ON_REPLICAS):
            return tf.concat([everyones[:start], mine, everyones[end:]], axis=0)

    return map_given(lambda tensor: rows_changed(tensor, around), values)


def a_row_each(values: Any, examples: tf.Tensor) -> Any:
    """Checks that each output has one row for each of a replica's examples; else rows could not be put in order.

    Raises:
        ValueError: when an output has no first axis. When it has other rows, an `InvalidArgumentError` with the
            sentence `ROWS`, which `in_words` turns into a `ValueError`.
    """

    def checked(output):
        if not output.shape.rank:
            raise UserError(ROWS)
        rows = output.nrows() if isinstance(output, tf.RaggedTensor) else tf.shape(output)[0]
        same = tf.debugging.assert_equal(tf.cast(rows, tf.int32), tf.cast(examples, tf.int32), ROWS)
        with tf.control_dependencies([same] if same is not None else []):
            return rows_changed(output, tf.identity)

    return map_given(checked, values)


def rows_changed(output: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """An output with changed rows, and so are its mask and its logits, which Keras keeps with it for losses.

    Of softmax and sigmoid, Keras's losses take the logits: those that Keras's own keep, or the operation's input.
    """
    kept = hasattr(output, "_keras_logits")
    if not kept and (kind := _activation(output)):
        result = ACTIVATIONS[kind](change(output.op.inputs[0]))
    else:
        result = change(output)
    if kept:
        result._keras_logits = change(output._keras_logits)
    if (mask := get_keras_mask(output)) is not None:
        set_keras_mask(result, change(mask))
    return result


def logits_of(output: tf.Tensor) -> tf.Tensor | None:
    """The logits from which Keras computes losses, for softmax and sigmoid; None for others."""
    return getattr(output, "_keras_logits", output.op.inputs[0] if _activation(output) else None)


def _activation(output: tf.Tensor) -> str:
    """The operation whose output it is, if that is one of `ACTIVATIONS`."""
    kind = getattr(getattr(output, "op", None), "type", "")  # an eager or ragged one has none
    return kind if kind in ACTIVATIONS else ""


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Raises what `a_row_each` and `common_rows` say as a `UserError`, without TensorFlow's list of operations."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        for sentence in (ROWS, UNLIKE_ROWS):
            if sentence in error.message:
                raise UserError(sentence) from None
        raise
