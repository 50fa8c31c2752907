# SPDX-License-Identifier: Apache-2.0
"""Steps on all replicas, several in one call."""

import contextlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.custom_step import run_custom_step
from keras_replicas.division import as_tensor, count_rows, divide_batch, iterator_over, refuse_unlike_rows
from keras_replicas.empty import first_input
from keras_replicas.outputs import in_words
from keras_replicas.replicas import first_replica, map_given
from keras_replicas.step import split_logs
from keras_replicas.trial_run import local_batch
from keras_replicas.waiting import note_steps


class StepsDone(NamedTuple):
    """What the steps of one call did.

    Attributes:
        steps: their number.
        logs: the epoch's values so far, by name.
        of_steps: each step's own values, vectors [steps] by name.
    """

    steps: int
    logs: dict[str, Any]
    of_steps: dict[str, np.ndarray]


class StepCalls:
    """Does the steps of one call of a training or an evaluation loop.

    A worker that is told to stop says so in the step's reduction, so that all stop after the same step.

    Args:
        model: of `data_parallel`.
        name: of the step, "train_step" or "test_step".
    """

    def __init__(self, model: Any, name: str):
        self._model, self._name = model, name
        self._strategy = model.distribute_strategy
        self._custom_step = model.custom_step_function(name)
        self._do_steps = steps_in_one_call(lambda iterator, stop: self._step(next(iterator), stop))
        in_graph = tf.function(self._step, autograph=False, reduce_retracing=True)
        self._step_on_batch = self._step if model.run_eagerly else in_graph

    def __call__(self, iterator: Any, left: int | None) -> StepsDone:
        """Does `steps_per_execution` steps, at most `left`, if that is not None, and no more than there is data for."""
        model = self._model
        count = model.steps_per_execution if left is None else min(model.steps_per_execution, left)
        with in_words(), model.refusal_raised():
            values = self._values_of_steps(iterator, count, data_is_known=left is not None)
        if self._custom_step is not None:
            model.step_plans.warn(self._name)
        stops = values.pop("stop")
        model.all_told_to_stop = bool(stops[-1])
        note_steps(len(stops))
        logs, of_steps = split_logs(values)
        return StepsDone(len(stops), {name: value[-1] for name, value in logs.items()}, of_steps)

    def _values_of_steps(self, iterator, count, data_is_known):
        """The values of `count` steps; of fewer if the data ends, unless it is known not to. Vectors, by name."""
        rows: list[dict[str, np.ndarray]] = []
        while count > 0:
            try:
                if self._goes_batch_by_batch(iterator):
                    rows.append(self._values_of_batch(iterator))
                else:
                    rows.append(self._do_steps(iterator, count if data_is_known else 1, self._model.told_to_stop))
            except (StopIteration, tf.errors.OutOfRangeError):
                if not rows:
                    raise
                break
            count -= len(rows[-1]["stop"])
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _goes_batch_by_batch(self, iterator):
        is_prepared = self._model.is_step_prepared(self._name)
        return isinstance(iterator, types.GeneratorType) or self._model.run_eagerly or not is_prepared

    def _values_of_batch(self, iterator):
        """Takes a batch, finds by it what is to be known before the step is traced, and does the step."""
        batch, stop = next(iterator), tf.constant(float(self._model.told_to_stop))
        if isinstance(iterator, types.GeneratorType):  # of `train_on_batch` and the like: it gives the whole batch
            batch = map_given(as_tensor, batch)
            self._prepare(batch)
            even = int(count_rows(first_input(batch))) % self._strategy.num_replicas_in_sync == 0
            return _as_row(self._step_on_batch(divide_batch(self._strategy, batch), stop, even))
        self._prepare(local_batch(self._strategy, batch))
        same_again = None if self._model.run_eagerly else iterator_over(self._strategy, batch, iterator)
        if same_again is None:
            return _as_row(self._step_on_batch(batch, stop, even=False))
        return self._do_steps(same_again, 1, self._model.told_to_stop)

    def _prepare(self, batch):
        if self._custom_step is None and self._strategy.num_replicas_in_sync > 1:
            refuse_unlike_rows(batch)
        self._model.prepare_step(self._name, batch)

    def _step(self, data, stop, even=True):
        """One step on all replicas; `even` is whether all have the same number of examples."""
        model = self._model
        model._rows_known = even and not tf.executing_eagerly()
        is_custom = self._custom_step is not None
        with model.step_plans.surrounding(self._name) if is_custom else contextlib.nullcontext():
            return first_replica(self._strategy, self._strategy.run(self._replica_step, args=(data, stop)))

    def _replica_step(self, data, stop):
        data = _copied(data)
        if self._custom_step is None:
            return self._model._step(data, stop, training=self._name == "train_step")
        return run_custom_step(self._model, self._name, self._custom_step, data, stop)


def _copied(data):
    """A replica's part of the data, in its own memory, with None for an input that is not given.

    A part of a batch from a Python generator is otherwise still the generator's array, into which TensorFlow 2.21
    writes what it computes from it.
    """
    strategy = tf.distribute.get_strategy()
    may_be_shared = strategy.num_replicas_in_sync > 1 and "CPU" in strategy.extended.worker_devices[0]

    def copied(leaf):
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        if not may_be_shared:
            return leaf
        return tf.nest.map_structure(lambda tensor: tf.raw_ops.DeepCopy(x=tensor), leaf, expand_composites=True)

    return keras.tree.map_structure(copied, data)


def _as_row(values: dict) -> dict:
    return {name: np.asarray(value)[None] for name, value in values.items()}


def _as_log(value):
    return tf.cast(value, tf.float64 if keras.config.floatx() == "float64" else tf.float32)


def steps_in_one_call(step: Callable) -> Callable[..., dict[str, np.ndarray]]:
    """A function of (iterator, count, stop) that does `count` steps in one call, and returns each step's values.

    They are arrays [count, ...], float32, or float64 where that is Keras's floatx. Keras's own loop of several steps
    fails where replicas reduce with collectives (`You must feed a value for placeholder`). The iterator
    is a distributed data set's.

    Args:
        step: maps (iterator, stop) to a dict of scalars, or of tensors of known shapes. `stop` is a float that the step
            may reduce, so that all workers know when one was asked to stop.
    """
    shapes: dict[str, tf.TensorShape] = {}

    @tf.function(reduce_retracing=True, autograph=False)
    def many_steps(iterator, count, stop):
        def one_step(stop):
            values = {name: _as_log(value) for name, value in step(iterator, stop).items()}
            shapes.clear()
            shapes.update(
                {name: value.shape if value.shape.rank else tf.TensorShape([]) for name, value in values.items()}
            )
            return tf.concat([tf.reshape(value, [-1]) for value in values.values()], axis=0)

        # The flag is an element of the loop: if the loop captured it, it would never arrive on another device.
        stops, scope = tf.fill([count], stop), tf.compat.v1.get_variable_scope()
        try:
            return tf.map_fn(one_step, stops, fn_output_signature=_as_log(0).dtype, parallel_iterations=1)
        except BaseException:
            scope.set_caching_device(None)  # `map_fn` leaves it set, and no strategy's scope could be entered again
            raise

    def run_steps(iterator, count, stop=0.0):
        rows = many_steps(iterator, tf.constant(count), tf.constant(float(stop))).numpy()
        ends = np.cumsum([shape.num_elements() for shape in shapes.values()])[:-1]
        columns = np.split(rows, ends, axis=1)
        return {
            name: column.reshape(count, *shape) for (name, shape), column in zip(shapes.items(), columns, strict=True)
        }

    return run_steps
