# SPDX-License-Identifier: Apache-2.0
"""Generators and `PyDataset`s as Keras reads them, for a strategy, which reads ahead and divides what it has read."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter


@contextlib.contextmanager
def read_ahead(given: dict[str, Any], shuffle: bool = False) -> Iterator[dict[str, Any]]:
    """Arguments of `fit`, `evaluate` or `predict`, in which an adapter stands for a generator or a `PyDataset`.

    Args:
        given: the arguments by name; others stay as they are.
        shuffle: whether `x` is to be shuffled.
    """
    own = {}
    of_x = {name: given.get(name) for name in ("y", "sample_weight", "class_weight")} | {"shuffle": shuffle}
    for name, options in (("x", of_x), ("validation_data", {})):
        if isinstance(given.get(name), types.GeneratorType | keras.utils.PyDataset):
            own[name] = ReadAhead(get_data_adapter(given[name], **options))
    try:
        yield given | own
    finally:
        for adapter in own.values():
            adapter.close()


class ReadAhead(DataAdapter):
    """Keras's adapter of a generator or a `PyDataset`, as a strategy needs it.

    - The entries of SciPy's sparse matrices come in any order; to be divided, they must come row by row.
    - The threads of a `PyDataset` go on from epoch to epoch. Keras stops them after each, and then fails where one has
      already read into the next (`Iterator called after on_epoch_end`).
    """

    def __init__(self, adapter: DataAdapter):
        self._adapter = adapter

    num_batches = property(lambda self: self._adapter.num_batches)
    batch_size = property(lambda self: self._adapter.batch_size)

    def get_tf_dataset(self):
        """As Keras's, with the entries of sparse tensors in order."""
        dataset = self._adapter.get_tf_dataset()
        specs = tf.nest.flatten(dataset.element_spec)
        if not any(isinstance(spec, tf.SparseTensorSpec) for spec in specs):
            return dataset

        def in_order(leaf):
            return tf.sparse.reorder(leaf) if isinstance(leaf, tf.SparseTensor) else leaf

        whole = isinstance(dataset.element_spec, tuple)
        return dataset.map(lambda *batch: tf.nest.map_structure(in_order, batch if whole else batch[0]))

    def on_epoch_begin(self):
        """As Keras's."""
        self._adapter.on_epoch_begin()

    def on_epoch_end(self):
        """As Keras's; threads go on."""
        if not isinstance(self._adapter, PyDatasetAdapter):
            self._adapter.on_epoch_end()
            return
        self._adapter.py_dataset.on_epoch_end()
        self._adapter._within_epoch = False

    def close(self):
        """Stops threads."""
        if getattr(self._adapter, "enqueuer", None):
            self._adapter.enqueuer.stop()
