# SPDX-License-Identifier: Apache-2.0
"""Adapts generators and `PyDataset`s, as Keras reads them, to a strategy, which reads ahead and divides batches."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.device_copies import do_not_tune_device_copies
from keras_replicas.private import get_data_adapter


@contextlib.contextmanager
def read_ahead(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Replaces each generator or `PyDataset` among the arguments of `fit`, `evaluate` or `predict` with an adapter.

    `given` holds the arguments by name; the others stay as they are.
    """
    do_not_tune_device_copies()
    own = {}
    of_x = {name: given.get(name) for name in ("y", "sample_weight", "class_weight")} | {
        "shuffle": given.get("shuffle", False)
    }
    for name, options in (("x", of_x), ("validation_data", {})):
        if isinstance(given.get(name), types.GeneratorType | keras.utils.PyDataset):
            own[name] = _for_a_strategy(get_data_adapter(given[name], **options))
    try:
        yield given | own
    finally:
        for adapter in own.values():
            if getattr(adapter, "enqueuer", None):
                adapter.enqueuer.stop()


def _for_a_strategy(adapter: Any) -> Any:
    """Keras's adapter of a generator or a `PyDataset`, as a strategy needs it.

    - The entries of SciPy's sparse matrices come in any order; to be divided, they must come row by row.
    - The threads of a `PyDataset` go on from epoch to epoch. Keras stops them after each, and then fails where one has
      already read into the next (`Iterator called after on_epoch_end`).
    """
    read = adapter.get_tf_dataset

    def in_order(leaf):
        return tf.sparse.reorder(leaf) if isinstance(leaf, tf.SparseTensor) else leaf

    def get_tf_dataset():
        dataset = read()
        if not any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(dataset.element_spec)):
            return dataset
        whole = isinstance(dataset.element_spec, tuple)
        return dataset.map(lambda *batch: tf.nest.map_structure(in_order, batch if whole else batch[0]))

    def on_epoch_end():
        adapter.py_dataset.on_epoch_end()
        adapter._within_epoch = False

    adapter.get_tf_dataset = get_tf_dataset
    if hasattr(adapter, "py_dataset"):
        adapter.on_epoch_end = on_epoch_end
    return adapter
