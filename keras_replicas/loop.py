# SPDX-License-Identifier: Apache-2.0
"""Steps on all replicas, several in one call, for `trainer.py`."""

import contextlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.custom_step import run_custom_step, running, without_borrowed_example
from keras_replicas.empty import count_examples, first_input, others_example, with_example
from keras_replicas.optimizer_calls import applied_by
from keras_replicas.optimizers import each_row_once
from keras_replicas.outputs import a_row_each, in_words
from keras_replicas.probe import local_batch
from keras_replicas.replicas import first_replica, map_given, own_copies, replicas, sum_over_replicas, waiting_for
from keras_replicas.step import ReplicaStep


class StepLoop(ReplicaStep):
    """Training and evaluation steps, including a class's own `train_step` and `test_step`."""

    told_to_stop = all_told_to_stop = False
    step_plans: Any = None  # `StepPlans`, once the model is compiled

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
            with waiting_for(() if self.jit_compile else data):
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
        filled = None if example is None else with_example(x, example)
        number, examples = self._step_number(0), count_examples(x)
        metrics = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in self._metric_variables()]
        scope = self._own_state(self._copies(), None, metrics)
        with scope:  # which keeps nothing of metrics that a call updates
            y_pred = self._predicted(x, filled, training=False)
        state = self._state_sums(scope, examples, number)
        if state:
            self._update_state(*sum_over_replicas((state, examples)))
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

        @in_words()
        @self.refusal_raised()
        def run_steps(iterator, left):
            count = self.steps_per_execution if left is None else min(self.steps_per_execution, left)
            stop = tf.constant(float(self.told_to_stop))
            is_unknown = step is not None and not self.step_plans.is_prepared(name)
            if left is not None and not self.run_eagerly and not is_unknown:
                values = do_steps(iterator, count, self.told_to_stop)
            else:
                rows = []
                for _ in range(count):
                    try:
                        if isinstance(iterator, types.GeneratorType):
                            batch = next(iterator)
                            self.prepare_custom_step(name, batch)
                            even = len(first_input(batch)) % strategy.num_replicas_in_sync == 0
                            rows.append(_as_row(step_on_batch(self._divided(batch), stop, even)))
                        elif self.run_eagerly or is_unknown:
                            batch = next(iterator)
                            self.prepare_custom_step(name, local_batch(strategy, batch))
                            rows.append(_as_row(step_on_batch(batch, stop, even=False)))
                        else:
                            rows.append(do_steps(iterator, 1, self.told_to_stop))
                    except (StopIteration, tf.errors.OutOfRangeError):
                        if not rows:
                            raise
                        break
                values = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            if step is not None:
                self.step_plans.warn(name)
            stops = values.pop("stop")
            self.all_told_to_stop = bool(stops[-1])
            logs, of_steps = _split(values)
            return len(stops), {name: value[-1] for name, value in logs.items()}, of_steps

        return run_steps

    @contextlib.contextmanager
    def refusal_raised(self):
        """Raises the refusal of a custom step as it was, where AutoGraph or Keras has wrapped it."""
        try:
            yield
        except Exception:
            refusal = self.step_plans.refusal if self.step_plans else None
            if refusal is None:
                raise
            self.step_plans.refusal = None
            raise refusal from None

    def custom_step_function(self, name):
        """The model's own "train_step", "test_step" or "predict_step", to be called with data; None if it is ours."""
        method = getattr(type(self), name)
        if method is getattr(StepLoop, name):
            return None
        return without_tf_function(method.__get__(self, type(self)))

    def prepare_custom_step(self, name, batch, needs_optimizers=False):
        """Finds how the results of a custom step combine over replicas, if it has one, from some examples."""
        step = self.custom_step_function(name)
        if step is not None and batch is not None:
            self.step_plans.prepare(name, step, batch, needs_optimizers)

    def _divided(self, batch):
        """Each replica's part of a batch, in the replicas' order; the last ones may have fewer examples, or none."""
        strategy = self.distribute_strategy
        replicas = strategy.num_replicas_in_sync

        def distributed(leaf):
            leaf, size = tf.convert_to_tensor(leaf), -(-len(leaf) // replicas)
            return strategy.experimental_distribute_values_from_function(
                lambda context: leaf[context.replica_id_in_sync_group * size :][:size]
            )

        return batch if replicas == 1 else map_given(distributed, batch)


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
