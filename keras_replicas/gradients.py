# SPDX-License-Identifier: Apache-2.0
"""Gradients of each use of a weight, and their sum over replicas, which workers begin during the backward pass."""

import contextlib
import itertools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

from keras_replicas.replicas import gather_over_replicas, replicas, sum_over_replicas

BUCKET = 2**20  # about how many numbers workers reduce at once: with fewer, the latency shows
ROWS = 2**11  # rows per replica that a table must have to be sent by rows: the tokens of a batch have fewer


class Stateless(keras.StatelessScope):
    """As Keras's, but no gradient flows through what is assigned to a variable, as with TensorFlow's variables."""

    def add_update(self, update):
        """See `keras.StatelessScope`."""
        variable, value = update
        super().add_update((variable, tf.stop_gradient(value)))


class Uses(Stateless):
    """A stateless scope in which each use of a weight is a tensor of its own, with a gradient of its own.

    BERT uses its token table twice: in its last layer as a matrix, in its first by rows. Together, their gradients
    would be known only at the end of the backward pass, and TensorFlow would turn both into rows. Apart, the large one
    is known at the beginning.

    Raises:
        ValueError: when a weight is used where it gets no gradient, as in `keras.remat`, which knows only variables.
    """

    def __init__(self, mapping, weights, tape, **kwargs):
        super().__init__(mapping, **kwargs)
        self._tape, self._graph = tape, tf.compat.v1.get_default_graph()
        self._uses = {id(weight): [self.state_mapping[id(weight)]] for weight in weights}
        tape.watch(list(self._uses.values()))

    def get_current_value(self, variable):
        """See `keras.StatelessScope`."""
        value = super().get_current_value(variable)
        # No gradient flows to what is made in the graph of a loop or a condition.
        if id(variable) not in self._uses or tf.compat.v1.get_default_graph() is not self._graph:
            return value
        if not could_possibly_record():
            raise ValueError(
                f"{variable.path} would not be trained where it is used, as in keras.remat: leave that out"
            )
        with self._tape.stop_recording():
            use = tf.identity(value)
        self._tape.watch(use)
        self._uses[id(variable)].append(use)
        return use

    def gradients(self, objective) -> tuple[dict, dict]:
        """Gradients, by the weight's index as a string; a weight without a gradient has no entry.

        Returns:
            Dense gradients; and those of some rows of a weight, to be added to its dense one if there is one: values
            [n, ...] and the rows' numbers [n], which may repeat.
        """
        found = self._tape.gradient(objective, list(self._uses.values()))
        dense, rows = {}, {}
        for index, uses in enumerate(found):
            slices = [each for each in uses if isinstance(each, tf.IndexedSlices)]
            whole = [each for each in uses if each is not None and not isinstance(each, tf.IndexedSlices)]
            if whole:
                dense[str(index)] = tf.add_n(whole) if len(whole) > 1 else whole[0]
            if slices:
                values = tf.concat([tf.convert_to_tensor(each.values) for each in slices], axis=0)
                rows[str(index)] = values, tf.concat([each.indices for each in slices], axis=0)
        return dense, rows


def add_rows(dense: dict, rows: dict, weights: list) -> dict:
    """Dense gradients of these weights, from both dicts that `Uses.gradients` returns."""
    result = dict(dense)
    for index, (values, numbers) in rows.items():
        values = tf.cast(values, weights[int(index)].dtype)  # workers gather bfloat16 as float32
        if index in dense:
            result[index] = tf.tensor_scatter_nd_add(dense[index], numbers[:, None], values)
        else:
            result[index] = tf.math.unsorted_segment_sum(values, numbers, weights[int(index)].shape[0])
    return result


def sum_gradients(dense: dict, rows: dict, sums: list, weights: list) -> tuple[dict, list]:
    """Sums the gradients of `Uses.gradients`, and a list of float32 tensors, over all replicas.

    Args:
        dense, rows: gradients of these weights.
        sums: the other tensors to add up.
        weights: tensors.
    """
    if between_workers():
        with at_the_same_time():
            return sum_between_workers(dense, rows, sums, weights)
    return sum_over_replicas((add_rows(dense, rows, weights), sums))


def between_workers() -> bool:
    """Whether there are several workers."""
    return isinstance(tf.distribute.get_strategy(), tf.distribute.MultiWorkerMirroredStrategy)


def sum_between_workers(dense: dict, rows: dict, sums: list, weights: list) -> tuple[dict, list]:
    """As `sum_gradients`, in buckets, each as soon as the backward pass has computed it.

    PyTorch's DistributedDataParallel does the same (Li et al. 2020, arXiv:2006.15704). The gradient of a large matrix
    is several buckets. A large table's rows are gathered, as in Horovod, after those of the same number are added up.
    """
    totals = sum_over_replicas(sums)  # known, and reduced, before any gradient
    large = {index for index in rows if weights[int(index)].shape[0] >= ROWS * replicas()}
    dense = add_rows(dense, {index: rows[index] for index in rows.keys() - large}, weights)
    # The last in a list is reduced first: an output layer's gradient of a table, then layer by layer from the last.
    order = sorted(dense, key=lambda index: (index in large, int(index)))
    parts = {index: split_product(dense[index]) for index in order}
    tensors = [tf.identity(part) for index in order for part in parts[index][0]]
    reduced = []
    for dtype, run in itertools.groupby(tensors, key=lambda each: each.dtype):  # TensorFlow packs one dtype at a time
        buckets = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=BUCKET * dtype.size)
        run = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, list(run), buckets)
        reduced.extend(run)
    summed = {}
    for index in order:
        own, axis = parts[index]
        own, reduced = reduced[: len(own)], reduced[len(own) :]
        summed[index] = tf.concat(own, axis) if len(own) > 1 else own[0]
    gathered = {index: _gather_rows(*rows[index]) for index in sorted(large)}
    return add_rows(summed, gathered, weights), totals


def split_product(gradient) -> tuple[list, int]:
    """The gradient of a matrix in parts of more than a bucket, each a product of its own.

    The first is then sent while the others are computed. This is possible where the graph has the product: not in
    XLA's programs, with gradient accumulation, or for batches of unknown size.

    Returns:
        The parts, or the gradient alone; and the axis along which they are parts.
    """
    whole = [gradient], 0
    if not tf.is_symbolic_tensor(gradient) or not gradient.shape.is_fully_defined():
        return whole
    operation = gradient.op
    if operation.type == "Cast":
        parts, axis = split_product(operation.inputs[0])
        return [tf.cast(part, gradient.dtype) for part in parts], axis
    is_transposed = operation.type == "Transpose" and _swaps(operation.inputs[1])
    product = operation.inputs[0].op if is_transposed else operation
    if product.type != "MatMul" or not product.get_attr("transpose_a") or product.get_attr("transpose_b"):
        return whole
    left, right = reversed(product.inputs) if is_transposed else product.inputs
    axis = int(gradient.shape[0] > gradient.shape[1])  # that of the smaller factor, because slices are copies
    number = gradient.shape[axis] // (BUCKET // gradient.shape[1 - axis] + 1)
    if number < 2:
        return whole
    ends = [gradient.shape[axis] * part // number for part in range(number + 1)]
    slices = [(left, right)[axis][:, start:end] for start, end in itertools.pairwise(ends)]
    factors = [(left, each) if axis else (each, right) for each in slices]
    return [tf.matmul(*pair, transpose_a=True) for pair in factors], axis


def _swaps(permutation) -> bool:
    """Whether it is known to swap the axes of a matrix."""
    if permutation.op.type == "InvertPermutation":
        permutation = permutation.op.inputs[0]
    return np.array_equal(tf.get_static_value(permutation), [1, 0])


@contextlib.contextmanager
def at_the_same_time() -> Iterator[None]:
    """While it lasts, reductions between workers in a graph do not wait for one another, unless their order matters.

    TensorFlow makes each reduction wait for the end of the previous one, which leaves a link idle at each beginning and
    end. Only NCCL needs that order.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    if "GPU" in tf.distribute.get_strategy().extended.worker_devices[0]:
        return
    for operation in graph.get_operations()[before:]:
        if operation.type.startswith("Collective"):
            graph.experimental_acd_manager.run_independently(operation)


def _gather_rows(values, numbers):
    numbers, places = tf.unique(tf.cast(numbers, tf.int32))
    return gather_over_replicas((tf.math.unsorted_segment_sum(values, places, tf.size(numbers)), numbers))
