# SPDX-License-Identifier: Apache-2.0
"""The examples of a check: what `fit` takes, as a few batches, of which two are short."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.division import as_tensor, concat_rows, count_rows, slice_rows, sparse_rows
from keras_replicas.errors import UserError
from keras_replicas.private import get_data_adapter
from keras_replicas.trial_run import without_optionals

Batch = Any  # a structure of tensors, each [examples, ...], as a data set yields it; of arrays, (x, y, sample_weight)
NO_EXAMPLES = (
    "give examples as fit takes them: check(build, x, y), or a function that returns (model, x, y) or (model, dataset)"
)


class Examples(NamedTuple):
    """Batches to train on, in two calls of `fit`.

    Attributes:
        sections: the batches of each call. If there are short ones, the last of the first section has one example less
            than the others, so that replicas get unlike numbers, and the last of the second section has a single one.
        are_arrays: whether `fit` gets arrays and `batch_size`; else it gets a `tf.data.Dataset` of the batches.
        batch_size: the number of examples in a batch that is not short.
    """

    sections: tuple[list[Batch], list[Batch]]
    are_arrays: bool
    batch_size: int

    @property
    def inputs(self) -> list[Any]:
        """What the model is called with, for each batch of the first section."""
        return [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in self.sections[0]]

    @property
    def batch_sizes(self) -> list[int]:
        """The number of examples of each batch."""
        return [count_examples(batch) for section in self.sections for batch in section]

    def calls_of_fit(self, reorder: Callable[[Batch], Batch]) -> Iterator[dict[str, Any]]:
        """The data arguments of the calls of `fit`.

        Args:
            reorder: gives each batch's examples another order, or returns it as it is.
        """
        for section in self.sections:
            yield self._arguments([reorder(batch) for batch in section])

    def for_evaluate(self) -> dict[str, Any]:
        """The data arguments of `evaluate`: the first section."""
        return self._arguments(self.sections[0])

    def for_predict(self) -> dict[str, Any]:
        """The data arguments of `predict`: the first section."""
        return {name: value for name, value in self.for_evaluate().items() if name in ("x", "batch_size")}

    def _arguments(self, batches: list[Batch]) -> dict[str, Any]:
        if not self.are_arrays:
            return {"x": dataset_of(batches, [batch for section in self.sections for batch in section])}
        x, y, weight = map_leaves(lambda *leaves: concat_rows(leaves), *batches)
        return {"x": x, "y": y, "sample_weight": weight, "batch_size": self.batch_size}


def examples_of(data: tuple, batch_size: int, steps: int, with_short_batches: bool) -> Examples:
    """Examples of what `fit` takes.

    Args:
        data: `x`, or (x, y) or (x, y, sample_weight) of `fit`. Rows or batches are repeated if there are too few.
        batch_size: of arrays.
        steps: the number of batches, at least two.
        with_short_batches: whether the last batch of each section is short.

    Raises:
        UserError: when there are no examples.
    """
    x, y, weight = [*data, None, None, None][:3]
    if x is None:
        raise UserError(NO_EXAMPLES)
    leaves = [leaf for leaf in keras.tree.flatten((x, y, weight)) if leaf is not None]
    are_arrays = bool(leaves) and all(getattr(leaf, "shape", None) for leaf in leaves)
    if are_arrays:
        batches = _batches_of_arrays((x, y, weight), batch_size, steps)
    else:
        batches = _batches_of_dataset((x, y, weight), steps)
    middle = len(batches) // 2
    sections = batches[:middle], batches[middle:]
    if with_short_batches:
        sections[0][-1] = _shortened(sections[0][-1], count_examples(sections[0][-1]) - 1)
        sections[1][-1] = _shortened(sections[1][-1], 1)
    return Examples(sections, are_arrays, count_examples(batches[0]))


def _batches_of_arrays(data: Batch, batch_size: int, steps: int) -> list[Batch]:
    tensors = map_leaves(as_tensor, data)
    rows = count_examples(tensors)
    if not rows:
        raise UserError("there are no examples: x has no rows")
    if not _has_like_rows(tensors):
        raise UserError("x, y and sample_weight must have the same number of examples")
    numbers = np.arange(steps * batch_size) % rows
    return [take_rows(tensors, each) for each in np.split(numbers, steps)]


def replayable(x: Any, steps: int) -> Any:
    """What can be read again and again: a data set of the first batches, if `x` is an iterator, as a generator is."""
    if not hasattr(x, "__next__"):
        return x
    batches = _batches_of_dataset((x, None, None), steps)
    return dataset_of(batches, batches)


def _batches_of_dataset(data: tuple, steps: int) -> list[Batch]:
    """The first batches of a data set, a `PyDataset`, a generator or a `DataLoader`, by Keras's own adapters."""
    try:
        dataset = get_data_adapter(*data).get_tf_dataset()
        batches = [_without_missing(batch) for batch in dataset.take(steps)]
    except (ValueError, TypeError) as error:
        raise UserError(NO_EXAMPLES) from error
    if not batches or not count_examples(batches[0]):
        raise UserError("there are no examples: the data set is empty")
    return [batches[number % len(batches)] for number in range(steps)]


def _without_missing(batch: Batch) -> Batch:
    """A batch with None for what is not given, as by a generator of (x, y, None); no None at the end of a tuple."""
    batch = without_optionals(batch)
    while isinstance(batch, tuple) and batch[-1] is None:
        batch = batch[:-1]
    return batch


def dataset_of(batches: list[Batch], of_same_kind: list[Batch]) -> tf.data.Dataset:
    """A `tf.data.Dataset` of batches.

    Args:
        batches: what it holds.
        of_same_kind: batches whose shapes its specification covers, so that two data sets are of one type.
    """
    specs = map_leaves(_common_spec, *of_same_kind)
    dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=specs)
    # Where plain Keras has to find the end itself, its optimizer may count a step that has no data.
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def _common_spec(*leaves: Any) -> tf.TypeSpec:
    """The specification of all these tensors: an axis is known if all have the same."""
    specs = [tf.type_spec_from_value(leaf) for leaf in leaves]
    shape = list(specs[0].shape)
    for spec in specs[1:]:
        shape = [one if one == other else None for one, other in zip(shape, spec.shape, strict=True)]
    if isinstance(leaves[0], tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaves[0].dtype, leaves[0].ragged_rank, leaves[0].row_splits.dtype)
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.SparseTensorSpec(shape, leaves[0].dtype)
    return tf.TensorSpec(shape, leaves[0].dtype)


# Rows.


def map_leaves(function: Callable, *structures: Any) -> Any:
    """Applies a function to the tensors of structures; None stays None."""
    return keras.tree.map_structure(lambda *leaves: None if leaves[0] is None else function(*leaves), *structures)


def count_examples(batch: Any) -> int:
    """The number of examples of a batch: the first axis of its first tensor."""
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return int(count_rows(leaves[0])) if leaves and leaves[0].shape.rank else 0


def take_rows(batch: Any, rows: Any) -> Any:
    """These rows of each tensor of a batch."""

    def taken(leaf):
        if not isinstance(leaf, tf.SparseTensor):
            return tf.gather(leaf, rows)
        parts = [slice_rows(leaf, row, row + 1) for row in rows]
        joined = tf.sparse.concat(0, parts)
        return sparse_rows(leaf, joined.indices, joined.values, len(rows))

    return map_leaves(taken, batch)


def reordered(batch: Batch, random: np.random.Generator) -> Batch:
    """The examples of a batch in another order; unchanged where its tensors have unlike numbers of rows."""
    return take_rows(batch, random.permutation(count_examples(batch))) if _has_like_rows(batch) else batch


def _shortened(batch: Batch, rows: int) -> Batch:
    if not _has_like_rows(batch):
        return batch
    return take_rows(batch, np.arange(max(1, rows)))


def _has_like_rows(batch: Batch) -> bool:
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return len({int(count_rows(leaf)) for leaf in leaves}) == 1
