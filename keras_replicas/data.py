# SPDX-License-Identifier: Apache-2.0
"""What `fit`, `evaluate` and `predict` take, as data that begins at any step: it has the methods of `batches.py`."""

import math
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.batches import Batches, BeginsAnywhere, checksum
from keras_replicas.division import parts_of
from keras_replicas.order import locate
from keras_replicas.private import convert_to_sliceable, get_data_adapter

BATCH_SIZE = 32  # Keras's, where neither it nor steps are given
NEEDS_STEPS = "the data has no known end: give steps_per_epoch, validation_steps or steps"


def as_batches(
    x: Any,
    y=None,
    sample_weight=None,
    *,
    batch_size=None,
    steps=None,
    shuffle=False,
    seed=0,
    class_weight=None,
) -> BeginsAnywhere:
    """The data that these arguments of `fit` give, in an order that is a function of `seed` and the epoch.

    | given | begins by | a resumed run sees |
    | --- | --- | --- |
    | data with `iter_from_step`, such as `Batches` | arithmetic | the same |
    | arrays | arithmetic | the same |
    | a `PyDataset` | the batch's number | the same, if its batches are functions of their numbers |
    | a `tf.data.Dataset` that is the same in each pass | `skip` | the same |
    | one that is shuffled anew in each pass | reading what came before | the same, if the shuffling has a seed |
    | a generator | reading what came before | the same, if the generator repeats itself |

    Raises:
        TypeError: for a distributed data set, which cannot begin anywhere.
        ValueError: for labels or weights beside data that holds them; for data without end and a number of steps.
    """
    begins = hasattr(x, "iter_from_step")
    has_labels = begins or isinstance(x, keras.utils.PyDataset | tf.data.Dataset)
    if has_labels and not (y is sample_weight is None) or begins and class_weight:
        raise ValueError(f"a {type(x).__name__} holds y and weights itself: leave out y, sample_weight, class_weight")
    if begins:
        return x
    if isinstance(x, tf.distribute.DistributedDataset):
        raise TypeError("a distributed data set cannot begin at a later step: give the data undistributed")
    if isinstance(x, keras.utils.PyDataset):
        return Numbered(x, steps, seed if shuffle else None, class_weight)
    if isinstance(x, tf.data.Dataset):
        return WholeBatches(get_data_adapter(x, class_weight=class_weight).get_tf_dataset(), steps)
    leaves = [leaf for leaf in tf.nest.flatten((x, y, sample_weight)) if leaf is not None]
    if all(hasattr(leaf, "__array__") or isinstance(leaf, tf.RaggedTensor) for leaf in leaves):
        rows = len(leaves[0]) if not isinstance(leaves[0], tf.RaggedTensor) else int(leaves[0].nrows())
        adapter = get_data_adapter(x, y, sample_weight, batch_size=rows, class_weight=class_weight)
        arrays = keras.tree.lists_to_tuples(convert_to_sliceable(adapter._inputs, target_backend="tensorflow"))
        batch_size = batch_size or (math.ceil(rows / steps) if steps else BATCH_SIZE)
        return Batches(arrays, batch_size, shuffle=bool(shuffle), seed=seed)
    adapter = get_data_adapter(x, y, sample_weight, batch_size, class_weight=class_weight)
    once = adapter.num_batches is None
    return WholeBatches(row_by_row(adapter.get_tf_dataset()), steps or adapter.num_batches, once)


class WholeBatches:
    """A `tf.data.Dataset` of whole batches, over and over.

    Args:
        dataset: of whole batches.
        steps: in an epoch; None for one pass over the data.
        once: whether it can be read only once, as a generator.
    """

    one_reader = True

    def __init__(self, dataset: tf.data.Dataset, steps: int | None, once: bool = False):
        self._dataset, self.is_read_once = dataset, once
        size = int(dataset.cardinality())
        if size == tf.data.UNKNOWN_CARDINALITY and not once and not steps:
            size = int(dataset.reduce(np.int64(0), lambda count, *_: count + 1))
        self._size = size if size > 0 else None
        if not (steps or self._size):
            raise ValueError(NEEDS_STEPS)
        self._steps: int = steps or self._size  # type: ignore[assignment]

    def __len__(self):
        return self._steps

    def iter_from_step(self, step: int, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """The parts of the batches from that step on, for the replicas of one input pipeline."""
        if self.is_read_once:
            return parts_of(self._dataset.skip(step), context)
        if self._size and not varies(self._dataset):
            rest = self._dataset.skip(step % self._size)
            return parts_of(rest.concatenate(self._dataset.repeat()), context)
        return parts_of(self._dataset.repeat().skip(step), context)

    def warn_if_unrepeatable(self) -> None:
        """Warns of shuffling without a seed, which no resumed run can repeat."""
        nodes = {node.name: node for node in _graph_of(self._dataset)}
        shuffles = [node.input for node in nodes.values() if node.op == "ShuffleDatasetV3"]
        for _, _, *seeds, _ in shuffles:
            if not any(np.any(tf.make_ndarray(nodes[seed].attr["value"].tensor)) for seed in seeds if seed in nodes):
                warnings.warn(
                    "the data is shuffled without a seed: if this run is interrupted, it goes on with another order. "
                    "Give shuffle a seed, or call keras.utils.set_random_seed first",
                    stacklevel=2,
                )

    def fingerprint(self) -> dict[str, Any]:
        """Facts that must be the same on all workers; none of data that can be read only once."""
        return {} if self.is_read_once else {"checksum of the first batch": checksum([next(iter(self._dataset))])}


class Numbered(keras.utils.PyDataset):
    """The batches of a `PyDataset`, in an order that is a function of seed and epoch, from a step on, without end.

    Its threads read ahead, over the ends of epochs too; but where the data set does something between epochs, batches
    are asked for one after the other.
    """

    one_reader = True

    def __init__(self, dataset: keras.utils.PyDataset, steps: int | None, seed: int | None, class_weight: Any):
        super().__init__()
        hooks = ("on_epoch_begin", "on_epoch_end")
        self._hooked = any(getattr(type(dataset), name) is not getattr(keras.utils.PyDataset, name) for name in hooks)
        threads = 1 if self._hooked else max(1, dataset.workers)
        self._threads, self._ahead = ThreadPoolExecutor(threads), threads if threads == 1 else dataset.max_queue_size
        self._dataset, self._seed, self._class_weight = dataset, seed, class_weight
        if not (steps or dataset.num_batches):
            raise ValueError(NEEDS_STEPS)
        self._steps, self._first, self._epoch = steps or dataset.num_batches, 0, -1
        self._promised: dict[int, Future] = {}

    def __len__(self):
        return self._steps

    @property
    def num_batches(self):
        """None: Keras reads on until `fit` ends."""
        return

    def __getitem__(self, index):
        for number in range(index, index + self._ahead):
            if number not in self._promised:
                self._promised[number] = self._threads.submit(self._read, self._first + number)
        return self._promised.pop(index).result()

    def _read(self, step):
        size = self._dataset.num_batches
        if size is None:
            return self._dataset[step]
        while self._hooked and self._epoch < step // size:
            if self._epoch >= 0:
                self._dataset.on_epoch_end()
            self._dataset.on_epoch_begin()
            self._epoch += 1
        _, indices = locate(tf.constant([step], tf.int64), size, 1, self._seed)
        return self._dataset[int(indices[0])]

    def iter_from_step(self, step: int, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """The parts of the batches from that step on, for the replicas of one input pipeline."""
        self._first, self._promised = step, {}
        return parts_of(get_data_adapter(self, class_weight=self._class_weight).get_tf_dataset(), context)

    def fingerprint(self) -> dict[str, Any]:
        """Facts that must be the same on all workers."""
        return {"batches": self._dataset.num_batches, "checksum of the first batch": checksum([self._dataset[0]])}


def row_by_row(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set with the entries of sparse tensors in order, to be divided: SciPy's may stand in any."""
    if not any(isinstance(spec, tf.SparseTensorSpec) for spec in tf.nest.flatten(dataset.element_spec)):
        return dataset

    def in_order(*batch):
        batch = batch if isinstance(dataset.element_spec, tuple) else batch[0]
        return tf.nest.map_structure(lambda t: tf.sparse.reorder(t) if isinstance(t, tf.SparseTensor) else t, batch)

    return dataset.map(in_order)


def varies(dataset: tf.data.Dataset) -> bool:
    """Whether a data set may differ from pass to pass: where it shuffles, draws, or calls Python."""
    functions = _graph_of(dataset)
    return any(word in node.op for node in functions for word in ("Shuffle", "Random", "PyFunc", "Multinomial"))


def _graph_of(dataset: tf.data.Dataset) -> list[Any]:
    variant = tf.data.experimental.to_variant(dataset)
    graph = tf.compat.v1.GraphDef.FromString(
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant, external_state_policy=1, strip_device_assignment=True
        ).numpy()
    )
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
