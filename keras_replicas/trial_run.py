# SPDX-License-Identifier: Apache-2.0
"""Runs of a model's own code on a few examples, which leave no trace, so that what it computes can be compared.

Every example draws the same random numbers, dropout drops nothing, and BatchNormalization uses its moving averages, so
that an example's results depend on nothing but the example, unless the model's code compares examples.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.custom_step import Occurrences, is_summed_on_read
from keras_replicas.division import concat_rows, count_rows, slice_rows
from keras_replicas.draws import draw_for_each_example, drawn_by, draws_replaceable
from keras_replicas.empty import first_input
from keras_replicas.errors import UserError
from keras_replicas.noise import global_seed_of
from keras_replicas.private import strategy_seen
from keras_replicas.replicas import local_value, one_replica_seen
from keras_replicas.state import same_everywhere

SHARDS = (3, 2)  # examples of the two shards, which must differ for a mean to differ from a sum of means
TOLERANCES = {"float64": 1e-8, "float32": 2e-4, "float16": 3e-2, "bfloat16": 3e-2}


def tolerance_of(model: Any) -> float:
    """The largest relative difference that counts as rounding, by the coarsest of `floatx` and the layers' dtypes."""
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()} | {keras.config.floatx()}
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)


# Examples.


def few_examples(batch: Any, count: int) -> Any:
    """The first examples of a batch, repeated if it has fewer and is not sparse."""

    def few(leaf):
        if leaf is None:
            return None
        rows = int(count_rows(leaf))
        if rows >= count or isinstance(leaf, tf.SparseTensor):
            return slice_rows(leaf, 0, count)
        return tf.concat([leaf] * -(-count // rows), axis=0)[:count]

    return keras.tree.map_structure(few, without_optionals(batch))


def unlike_examples(x: Any) -> Any:
    """Examples for `SHARDS`: the shortest of a batch for the first, and the longest for the second.

    The length of an example is that of a ragged row, or the number of its values up to the last that is not 0. Examples
    are repeated if the batch has fewer. They are the first ones of sparse tensors, and of unlike numbers of rows.
    """
    leaves = [leaf for leaf in keras.tree.flatten(without_optionals(x)) if leaf is not None]
    if any(isinstance(leaf, tf.SparseTensor) for leaf in leaves) or len({int(count_rows(leaf)) for leaf in leaves}) > 1:
        return few_examples(x, sum(SHARDS))
    lengths = np.sum([_lengths_of(leaf) for leaf in leaves], axis=0)
    by_length = np.argsort(lengths, kind="stable")
    middle = max(1, len(by_length) // 2)
    shortest, longest = by_length[:middle][: SHARDS[0]], by_length[-middle:][-SHARDS[1] :]
    chosen = np.concatenate([np.resize(shortest, SHARDS[0]), np.resize(longest, SHARDS[1])])
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.gather(leaf, chosen), without_optionals(x)
    )


def _lengths_of(leaf: Any) -> np.ndarray:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.row_lengths().numpy()
    values = np.asarray(leaf)
    if values.ndim < 2 or values.dtype == object:
        return np.zeros(len(values), np.int64)
    is_given = (values != 0).reshape(len(values), -1)
    return is_given.shape[1] - np.argmax(is_given[:, ::-1], axis=1)


def slice_of(examples: Any, start: int, end: int) -> Any:
    """The examples from `start` to `end`, without it."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else slice_rows(leaf, start, end), examples)


def sizes_of_shards(rows: int) -> tuple[int, int]:
    """The sizes of two shards of more than five examples. They differ as those of `SHARDS` do."""
    first = -(-rows * SHARDS[0] // sum(SHARDS))
    return first, rows - first


def local_batch(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """The examples of all replicas of this worker, of a batch of a distributed data set."""

    def joined(leaf):
        leaves = [each for each in strategy.experimental_local_results(leaf) if each is not None]
        if not leaves or isinstance(leaves[0], tf.experimental.Optional):
            return None
        if len(leaves) == 1:
            return leaves[0]
        return concat_rows([tf.identity(each) for each in leaves])

    return keras.tree.map_structure(joined, batch)


def rows_of(batch: Any) -> int:
    """The number of examples of a batch."""
    return int(count_rows(first_input(without_optionals(batch))))


def constant_batch_size(what: str, rows: int) -> UserError:
    """The error to raise where something, such as "Model.call", works on a whole batch, but on no part of it."""
    return UserError(
        f"{what} works on the batch of {rows} examples, but not on a part of it, as each replica has one: it takes the "
        "batch size from a constant, or the examples are not along the first axis. Take the size from the data, as by "
        "tf.shape(x)[0], or use one replica"
    )


def without_optionals(batch: Any) -> Any:
    """A batch with None for each input that is not given, for which TensorFlow has an optional."""
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)


# Running without a trace.


class Recording(keras.StatelessScope):
    """Records what a step assigns; `put_back` undoes it."""

    def __init__(self, model):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.assigned: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.moments: dict[str, list[np.ndarray]] = {}
        self.undeclared: set[str] = set()  # names in `assigned` of variables that do not say how replicas combine them
        self.passed: list[list[np.ndarray]] = []
        self._model, self._before, self._assignments = model, {}, Occurrences()
        self._moments = Occurrences()
        self._same_everywhere = same_everywhere(model)

    def note_moments(self, layer):
        """For a layer that takes moments, a function that records the gradients of its backward passes."""
        forward, backward = self._moments.name_next(layer.path), Occurrences()

        def note(order, gradients):
            if order == "second":  # [examples, ...]
                gradients = [tf.reduce_sum(each, axis=0) for each in gradients]
            self.moments[backward.name_next(f"{forward} {order}")] = [as_numbers(each) for each in gradients]

        return note

    def note_passed(self, data):
        """Records the dense numbers that a custom step gives to Keras's own."""
        leaves = [leaf for leaf in keras.tree.flatten(data) if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string]
        self.passed.append([as_numbers(leaf) for leaf in leaves])

    def get_current_value(self, variable):
        """The variable's value, as without this scope."""
        return variable._value

    def add_update(self, update):
        """Assigns the variable's copy on this replica, and records it."""
        variable, value = update
        if variable._value is None:
            super().add_update(update)
            return
        copy = local_value(variable)
        old = tf.identity(copy)
        self._before.setdefault(id(variable), (copy, old))
        copy.assign(value)
        is_plain = variable.name == "seed_generator_state" or id(variable) in self._same_everywhere
        if not is_plain and (is_summed_on_read(variable) or variable.aggregation == "none"):
            name = self._assignments.name_next(variable.path)
            self.assigned[name] = (as_numbers(old), as_numbers(value))
            if not is_summed_on_read(variable):
                self.undeclared.add(name)
        elif not is_plain:
            self._assignments.name_next(variable.path)

    def put_back(self):
        """Undoes all assignments."""
        for copy, old in self._before.values():
            copy.assign(old)


def as_numbers(tensor) -> np.ndarray:
    """A tensor as an array of float64."""
    return np.asarray(tf.cast(tensor, tf.float64))


@contextlib.contextmanager
def as_one_replica(model: Any) -> Iterator[None]:
    """Context of a step on the first replica of this worker, without the others, with fixed draws.

    BatchNormalization's moments are fixed by `batchnorm.fixed_moments`.
    """
    strategy = model._distribute_strategy
    with contextlib.ExitStack() as stack:
        stack.enter_context(global_seed_of(model))
        if strategy is not None:
            number = 0
            if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
                resolver = strategy.cluster_resolver
                number = int(getattr(resolver, "task_id", 0) or 0) * len(strategy.extended.worker_devices)
            context = tf.distribute.ReplicaContext(strategy, replica_id_in_sync_group=number)
            stack.enter_context(tf.device(strategy.extended.worker_devices[0]))
            stack.enter_context(strategy_seen(strategy, context))
        stack.enter_context(one_replica_seen())
        stack.enter_context(tf.summary.record_if(False))
        stack.enter_context(draws_replaceable())
        stack.enter_context(drawn_by(draw_for_each_example, draw_for_each_example, is_trial=True))
        yield


@contextlib.contextmanager
def undone(model: Any) -> Iterator[Recording]:
    """Context after which a model is as before; it gives a `Recording`.

    It puts back the variables that are assigned within the recording (a `tf.Variable` is none of them), the attributes
    of layers and their lists, dicts and sets, and the states of random generators: Python's, NumPy's and the layers'.
    """
    attributes = [(vars(layer), dict(vars(layer))) for layer in model._flatten_layers()]
    containers = [(each, _contents(each)) for _, old in attributes for each in old.values() if _is_container(each)]
    generators = [each for _, old in attributes for each in old.values() if isinstance(each, tf.random.Generator)]
    numbers = [tf.identity(each.state) for each in generators]
    states = random.getstate(), np.random.get_state()
    scope = Recording(model)
    vars(model)["recording"] = scope
    try:
        yield scope
    finally:
        scope.put_back()
        for generator, number in zip(generators, numbers, strict=True):
            generator.reset(number)
        random.setstate(states[0])
        np.random.set_state(states[1])
        for current, old in attributes:
            current.clear()
            current.update(old)
        for container, contents in containers:
            _put_back_contents(container, contents)


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | set)


def _contents(container: Any) -> list:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _put_back_contents(container: Any, old: list) -> None:
    """Undoes what was added or removed, if anything was: Keras and TensorFlow track their own kinds of containers."""
    now = _contents(container)
    is_unchanged = len(now) == len(old) and all(_is_same(one, other) for one, other in zip(now, old, strict=True))
    if is_unchanged:
        return
    container.clear()
    if isinstance(container, dict):
        container.update(dict(old))
    elif isinstance(container, list):
        container.extend(old)
    else:
        container.update(old)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def make_new_variables(model: Any) -> None:
    """Makes the variables of what was built within a stateless scope."""
    with model.distribute_strategy.scope(), keras.StatelessScope():
        pass  # at its end, Keras makes them
