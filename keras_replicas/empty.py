# SPDX-License-Identifier: Apache-2.0
"""A replica without examples. A data set's last batch may leave it none.

It then computes another replica's example, for nothing made up may reach a user's code; and what it computes does not
count.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.division import count_rows, slice_rows, sparse_rows
from keras_replicas.outputs import rows_changed
from keras_replicas.private import strategy_seen
from keras_replicas.replicas import gather, map_given, replica_context, replicas


def current_graph() -> Any:
    """The graph that operations are added to now; None where they run eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class OneReplica:
    """The strategy, as a model sees it in a replica's pass: it has one replica.

    Keras divides a loss that a layer computes by the strategy's number of replicas, so that gradients add up. Here a
    loss has the value that it has on one device. A replica context, by which replicas reduce, has the true number.
    """

    num_replicas_in_sync = 1

    def __init__(self, strategy: tf.distribute.Strategy, has_examples: tf.Tensor | None):
        self._strategy, self.has_examples = strategy, has_examples
        self.graph = current_graph()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


def forward_pass(has_examples: tf.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """While it lasts, in this thread alone, the strategy is `OneReplica`.

    Args:
        has_examples: whether this replica has examples; None where that is known.
    """
    context = replica_context()
    return strategy_seen(OneReplica(context.strategy, has_examples), context)


class _Thread(threading.local):
    """Whether this thread's replica has examples, in a custom step; None where that is known."""

    has_examples: tf.Tensor | None = None


_thread = _Thread()


@contextlib.contextmanager
def examples_known(has_examples: tf.Tensor | None) -> Iterator[None]:
    """Context of a custom step, in which `sum_of_examples` knows whether this replica has examples."""
    before, _thread.has_examples = _thread.has_examples, has_examples
    try:
        yield
    finally:
        _thread.has_examples = before


def has_examples_here() -> tf.Tensor | None:
    """Whether this replica has examples, in a `forward_pass` or a custom step; None where that is known."""
    strategy = tf.distribute.get_strategy()
    return strategy.has_examples if isinstance(strategy, OneReplica) else _thread.has_examples


def sum_of_examples(total: tf.Tensor, has_examples: tf.Tensor | None) -> tf.Tensor:
    """A sum over examples; zeros where there are none.

    Args:
        total: the sum.
        has_examples: as of `has_examples_here`.
    """
    return total if has_examples is None else tf.where(has_examples, total, tf.zeros_like(total))


def count_examples(x) -> tf.Tensor:
    """The number of a replica's examples, a float."""
    return tf.cast(count_rows(first_input(x)), tf.float32)


def first_input(x):
    """The first tensor of a model's inputs."""
    return next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)


def others_example(data, rows_known: bool):
    """One row of a replica's data, for a replica that has none: many kernels fail without any. Every replica calls it.

    Args:
        data: this replica's.
        rows_known: whether the static shapes tell that all replicas have rows.

    Returns:
        A structure like `data`, the first row of the first replica; None where no replica can be without rows.
    """
    if replicas() == 1 or (rows_known and first_input(data).shape[0]):
        return None
    return map_given(_first_row, data)


def _first_row(leaf):
    """The first row of the first replica, which always has one; see `bounds_of_part`."""
    if not isinstance(leaf, tf.SparseTensor):
        return gather(leaf[:1])[:1]
    row = slice_rows(leaf, 0, 1)
    entries = gather(tf.shape(row.values)[:1])[0]
    return sparse_rows(leaf, gather(row.indices)[:entries], gather(row.values)[:entries], 1)


def with_example(data, example):
    """This replica's data or, if it has no rows, the example."""
    if example is None:
        return data
    has_rows = count_examples(data) > 0

    def filled(leaf, row):
        if isinstance(leaf, tf.SparseTensor):
            indices, values = tf.cond(has_rows, lambda: (leaf.indices, leaf.values), lambda: (row.indices, row.values))
            return sparse_rows(leaf, indices, values, tf.where(has_rows, leaf.dense_shape[0], 1))
        found = tf.cond(has_rows, lambda: leaf, lambda: row)
        return found if isinstance(leaf, tf.RaggedTensor) else tf.ensure_shape(found, [None, *leaf.shape[1:]])

    return map_given(filled, data, example)


def without_added_example(y_pred, has_examples):
    """The outputs; no rows of what was computed of another replica's example."""

    def kept(output):
        if not output.shape.rank:
            return output
        end = tf.where(has_examples, tf.shape(output)[0], 0)
        return rows_changed(output, lambda rows: rows[:end])

    return map_given(kept, y_pred)


def zeros_without_examples(examples, values):
    """The tensors of a structure, or zeros if there are no examples: what comes of `with_example` may be NaN."""

    def kept(value):
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(kept(value.values), value.indices, value.dense_shape)
        return tf.cond(examples > 0, lambda: value, lambda: tf.zeros_like(value))

    # A condition for each tensor: with one for all, no worker could send a gradient before it has them all.
    return tf.nest.map_structure(kept, values)
