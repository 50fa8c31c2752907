# SPDX-License-Identifier: Apache-2.0
"""Steps on all replicas, several in one call, for `trainer.py`."""

import contextlib
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.batches import (
    as_tensor,
    bounds_of_part,
    common_rows,
    count_rows,
    iterator_over,
    refuse_unlike_rows,
    slice_rows,
)
from keras_replicas.call_probe import CallFindings, agreed_findings
from keras_replicas.counted import metrics_waiting_for
from keras_replicas.custom_step import run_custom_step, running, without_borrowed_example
from keras_replicas.empty import count_examples, first_input, others_example, with_example, without_added_example
from keras_replicas.errors import UserError
from keras_replicas.optimizer_calls import applied_by
from keras_replicas.optimizers import each_row_once
from keras_replicas.outputs import a_row_each, in_words
from keras_replicas.replicas import first_replica, map_given, own_copies, replicas, sum_over_replicas
from keras_replicas.step import ReplicaStep
from keras_replicas.trial_run import local_batch
from keras_replicas.waiting import note_steps


class StepLoop(ReplicaStep):
    """Training and evaluation steps, including a class's own `train_step` and `test_step`."""

    told_to_stop = all_told_to_stop = False
    step_plans: Any = None  # `StepPlans`, once the model is compiled
    step_counter: Any = None  # `StepCounter`, once it is needed
    probe_call = True
    _call_findings: dict[str, CallFindings] = {}  # by the name of the step
    _refusal: UserError | None = None

    def train_step(self, data):
        """One replica's part of a training step; returns a dict of the epoch's values so far."""
        if "is_probed" in vars(self):
            with applied_by(lambda *_: None):  # our own step is right, whatever its gradients add up to
                return super().train_step(data)
        if step := running():
            return self._step_in_custom_step(step, data, training=True)
        if self.steps_by_keras:
            with each_row_once(self.optimizer, dense=self.jit_compile):
                return super().train_step(data)
        return _split(self._step(data, training=True))[0]

    def _step_in_custom_step(self, step, data, training):
        """Our own step, called by a custom one, as by `super().train_step(data)`."""
        data = without_borrowed_example(step, data)
        with step.suspended():
            return _split(self._step(data, training=training))[0]

    def test_step(self, data):
        """One replica's part of an evaluation step."""
        if "is_probed" in vars(self):
            return super().test_step(data)
        if step := running():
            return self._step_in_custom_step(step, data, training=False)
        if self.steps_by_keras:
            with metrics_waiting_for(data, self):
                return super().test_step(data)
        return _split(self._step(data, training=False))[0]

    def predict_step(self, data):
        """One replica's part of a batch of predictions."""
        if running():
            return super().predict_step(data)
        if self.steps_by_keras:
            with own_copies(self.non_trainable_variables):
                return super().predict_step(data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        example = None if self.jit_compile else others_example(x, rows_known=False)
        filled = with_example(x, example)
        number, examples = self._number_of_slice(0, training=False), count_examples(x)
        metrics = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in self._metric_variables()]
        scope = self._own_state(self._copies(), number, metrics, (data, filled))
        has_examples = None if example is None else examples > 0
        with scope:  # which keeps nothing of metrics that a call updates
            y_pred = self._predicted(filled, has_examples, training=False)
        y_pred = y_pred if example is None else without_added_example(y_pred, has_examples)
        state = self._state_sums(scope, examples, number)
        if state:
            self._update_state(*sum_over_replicas((state, examples)))
        self.step_counter.end_evaluation_step()
        return a_row_each(y_pred, examples) if replicas() > 1 and not self.jit_compile else y_pred

    def _on_replicas(self, training):
        """A function of (iterator, left) that does the steps of one call, at most `left`, unless that is None.

        It returns the number of steps, a dict of the epoch's values so far, and a dict of each step's own values. A
        worker that is told to stop says so in the step's reduction, so that all stop after the same step.
        """
        strategy = self.distribute_strategy
        name = "train_step" if training else "test_step"
        step = self.custom_step_function(name)

        def replica_step(data, stop):
            data = _copied(data)
            if step is None:
                return self._step(data, stop, training)
            return run_custom_step(self, name, step, data, stop)

        def step_on_data(data, stop, even=True):
            self._rows_known = even and not tf.executing_eagerly()
            with contextlib.nullcontext() if step is None else self.step_plans.surrounding(name):
                return first_replica(strategy, strategy.run(replica_step, args=(data, stop)))

        def one_step(iterator, stop):
            return step_on_data(next(iterator), stop)

        do_steps = steps_in_one_call(one_step)
        in_graph = tf.function(step_on_data, autograph=False, reduce_retracing=True)
        step_on_batch = step_on_data if self.run_eagerly else in_graph

        def one_batch(iterator, stop):
            """Takes a batch, finds by it what is to be known before the step is traced, and does the step."""
            batch = next(iterator)
            if isinstance(iterator, types.GeneratorType):
                batch = map_given(as_tensor, batch)
                alike = step is None
                if alike and strategy.num_replicas_in_sync > 1:
                    refuse_unlike_rows(batch)
                self._prepare_step(name, batch)
                even = int(count_rows(first_input(batch))) % strategy.num_replicas_in_sync == 0
                return _as_row(step_on_batch(self._divided(batch, alike), stop, even))
            self._prepare_step(name, local_batch(strategy, batch))
            same_again = None if self.run_eagerly else iterator_over(strategy, batch, iterator)
            if same_again is None:
                return _as_row(step_on_batch(batch, stop, even=False))
            return do_steps(same_again, 1, self.told_to_stop)

        @in_words()
        @self.refusal_raised()
        def run_steps(iterator, left):
            count = self.steps_per_execution if left is None else min(self.steps_per_execution, left)
            stop, rows = tf.constant(float(self.told_to_stop)), []
            is_given = isinstance(iterator, types.GeneratorType)
            while count > 0:
                try:
                    if is_given or self.run_eagerly or not self._is_step_prepared(name):
                        rows.append(one_batch(iterator, stop))
                    else:
                        together = 1 if left is None else count
                        rows.append(do_steps(iterator, together, self.told_to_stop))
                except (StopIteration, tf.errors.OutOfRangeError):
                    if not rows:
                        raise
                    break
                count -= len(rows[-1]["stop"])
            values = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            if step is not None:
                self.step_plans.warn(name)
            stops = values.pop("stop")
            self.all_told_to_stop = bool(stops[-1])
            note_steps(len(stops))
            logs, of_steps = _split(values)
            return len(stops), {name: value[-1] for name, value in logs.items()}, of_steps

        return run_steps

    def refused(self, message: str) -> UserError:
        """An error to raise in a step; `refusal_raised` raises it without what Keras adds to it."""
        error = UserError(message)
        object.__setattr__(self, "_refusal", error)
        return error

    @contextlib.contextmanager
    def refusal_raised(self):
        """Raises an error of `refused` as it was, where AutoGraph or Keras has made another one of it."""
        try:
            yield
        except Exception:
            refusal = self._refusal
            object.__setattr__(self, "_refusal", None)
            if refusal is None:
                raise
            raise refusal from None

    def custom_step_function(self, name):
        """The model's own "train_step", "test_step" or "predict_step", to be called with data; None if it is ours."""
        method = getattr(type(self), name)
        if method is getattr(StepLoop, name):
            return None
        return without_tf_function(method.__get__(self, type(self)))

    def _is_step_prepared(self, name):
        """Whether all is known that a step needs to know of the model's code."""
        if self.custom_step_function(name) is not None:
            return self.step_plans.is_prepared(name)
        is_probed = self.probe_call and self._has_call and self.distribute_strategy.num_replicas_in_sync > 1
        return not is_probed or name in self._call_findings

    def _prepare_step(self, name, batch):
        """Finds what a step needs to know of the model's code, from some examples."""
        if self._is_step_prepared(name):
            return
        if self.custom_step_function(name) is not None:
            self.prepare_custom_step(name, batch)
        else:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            self._note_call_findings(name, agreed_findings(self, x, training=name == "train_step"))

    def _note_call_findings(self, name, found):
        has_warned = any(each.warnings for each in self._call_findings.values())
        # Assigned as usual, it would be tracked.
        object.__setattr__(self, "_call_findings", self._call_findings | {name: found})
        if found.warnings and not has_warned:
            what = "; ".join(found.warnings)
            warnings.warn(
                f"{type(self).__name__} is not the same on several replicas as on one device: {what}. "
                "keras_replicas.check tells how much that changes; data_parallel(model, probe_call=False) leaves out "
                "this probe",
                stacklevel=2,
            )

    def prepare_custom_step(self, name, batch, needs_optimizers=False):
        """Finds how the results of a custom step combine over replicas, if it has one, from some examples."""
        step = self.custom_step_function(name)
        if step is not None and batch is not None:
            self.step_plans.prepare(name, step, batch, needs_optimizers)

    def _divided(self, batch, alike=True):
        """Each replica's part of a batch, in the replicas' order, as by `batches.bounds_of_part`.

        Args:
            batch: of all replicas.
            alike: as of `batches.parts_of`.

        Raises:
            InvalidArgumentError: of TensorFlow, with the sentence `UNLIKE_ROWS`, when all tensors must have the same
                number of rows, and have not.
        """
        strategy = self.distribute_strategy
        replicas = strategy.num_replicas_in_sync
        if replicas == 1:
            return batch
        batch = map_given(as_tensor, batch)
        common = common_rows([leaf for leaf in keras.tree.flatten(batch) if leaf is not None]) if alike else None

        def distributed(leaf):
            rows = common if alike else tf.cast(count_rows(leaf), tf.int64)

            def part(context):
                return slice_rows(leaf, *bounds_of_part(rows, context.replica_id_in_sync_group, replicas))

            return strategy.experimental_distribute_values_from_function(part)

        return map_given(distributed, batch)


def has_own(model: keras.Model, step: str) -> bool:
    """Whether a model's class overrides a step, such as `train_step`, without calling Keras's."""
    method = inspect.unwrap(getattr(type(model), step))
    return not method.__module__.startswith(("keras.", "keras_replicas.")) and "super" not in method.__code__.co_names


def without_tf_function(step):
    """A `train_step` without its `@tf.function`, in which no replica could wait for another, as TensorFlow does it."""
    return tf.autograph.to_graph(step.python_function) if hasattr(step, "python_function") else step


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


def _split(values: dict) -> tuple[dict, dict]:
    """The epoch's values so far, and each step's own values."""
    of_step = {name for name in values if name.startswith("step/")}
    logs = {name: value for name, value in values.items() if name not in of_step | {"stop"}}
    return logs, {name.removeprefix("step/"): values[name] for name in values if name in of_step}


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
