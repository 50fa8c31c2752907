# SPDX-License-Identifier: Apache-2.0
"""The steps of one replica, and what is known of the model's own, for `trainer.py`."""

import contextlib
import inspect
import warnings
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.call_probe import CallFindings, agreed_findings
from keras_replicas.counted import metrics_waiting_for
from keras_replicas.custom_step import running, without_borrowed_example
from keras_replicas.division import common_rows
from keras_replicas.empty import count_examples, others_example, with_example, without_added_example
from keras_replicas.errors import UserError
from keras_replicas.optimizer_calls import applied_by
from keras_replicas.optimizers import each_row_once
from keras_replicas.outputs import a_row_each
from keras_replicas.replicas import own_copies, replicas, sum_over_replicas
from keras_replicas.step import ReplicaStep, split_logs


class StepLoop(ReplicaStep):
    """Training and evaluation steps, including a class's own `train_step` and `test_step`."""

    told_to_stop = all_told_to_stop = False
    step_plans: Any = None  # `StepPlans`, once the model is compiled
    step_counter: Any = None  # `StepCounter`, once it is needed
    probe_call = True
    _call_findings: dict[str, CallFindings] = {}  # by the name of the step
    _inputs_of_unknown_losses: dict[str, Any] = {}  # by the name of the step, where a loss of a layer was 0
    _refusal: UserError | None = None
    recording: Any = None  # the `Recording` of a trial run of the model, while there is one

    def train_step(self, data):
        """One replica's part of a training step; returns a dict of the epoch's values so far."""
        if self.recording is not None:
            self.recording.note_passed(data)
            with applied_by(lambda *_: None):  # our own step is right, whatever its gradients add up to
                return super().train_step(data)
        if step := running():
            return self._step_in_custom_step(step, data, training=True)
        if self.steps_by_keras:
            with each_row_once(self.optimizer, dense=self.jit_compile):
                return super().train_step(data)
        return split_logs(self._step(data, training=True))[0]

    def _step_in_custom_step(self, step, data, training):
        """Our own step, called by a custom one, as by `super().train_step(data)`."""
        data = without_borrowed_example(step, data)
        with step.suspended():
            return split_logs(self._step(data, training=training))[0]

    def test_step(self, data):
        """One replica's part of an evaluation step."""
        if self.recording is not None:
            self.recording.note_passed(data)
            return super().test_step(data)
        if step := running():
            return self._step_in_custom_step(step, data, training=False)
        if self.steps_by_keras:
            with metrics_waiting_for(data, self):
                return super().test_step(data)
        return split_logs(self._step(data, training=False))[0]

    def predict_step(self, data):
        """One replica's part of a batch of predictions."""
        if running():
            return super().predict_step(data)
        if self.steps_by_keras:
            with own_copies(self.non_trainable_variables):
                return super().predict_step(data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        common_rows([leaf for leaf in keras.tree.flatten(x) if leaf is not None])  # fails where they are unlike
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
        if not self.has_custom_step(name):
            return None
        return without_tf_function(getattr(type(self), name).__get__(self, type(self)))

    def has_custom_step(self, name):
        """Whether "train_step", "test_step" or "predict_step" is the model's own."""
        return getattr(type(self), name) is not getattr(StepLoop, name)

    def is_step_prepared(self, name):
        """Whether all is known that a step needs to know of the model's code."""
        if self.has_custom_step(name) and not self.step_plans.is_prepared(name):
            return False
        return not self._is_call_probed(name) or name in self._call_findings

    def _is_call_probed(self, name):
        """Whether a step calls the model as Keras's own does, and several replicas do."""
        is_wanted = self.probe_call and self._has_call and self.distribute_strategy.num_replicas_in_sync > 1
        return is_wanted and not has_own(self, name)

    def prepare_step(self, name, batch):
        """Finds what a step needs to know of the model's code, from some examples."""
        if self.is_step_prepared(name):
            return
        if self.has_custom_step(name):
            self.prepare_custom_step(name, batch)
        if self._is_call_probed(name):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            found = agreed_findings(self, x, training=name == "train_step")
            self._note_call_findings(name, found)
            if "either" in found.losses:
                self._inputs_of_unknown_losses[name] = x

    def probe_call_again(self):
        """Probes `call` again where a loss that a layer adds was 0, as one whose weight grows later.

        Call it where metrics are reset.
        """
        for name, x in list(self._inputs_of_unknown_losses.items()):
            before = self._call_findings[name].losses
            found = agreed_findings(self, x, training=name == "train_step").losses
            if "either" not in found:
                del self._inputs_of_unknown_losses[name]
            if ("either", "sum") in zip(before, found, strict=False):
                warnings.warn(
                    f"a layer of {type(self).__name__} gives add_loss a sum over examples, which was 0 when training "
                    "began, and is averaged over replicas: give add_loss a value for each example",
                    stacklevel=2,
                )

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


def has_own(model: keras.Model, step: str) -> bool:
    """Whether a model's class overrides a step, such as `train_step`, without calling Keras's."""
    method = inspect.unwrap(getattr(type(model), step))
    return not method.__module__.startswith(("keras.", "keras_replicas.")) and "super" not in method.__code__.co_names


def without_tf_function(step):
    """A `train_step` without its `@tf.function`, in which no replica could wait for another, as TensorFlow does it."""
    return tf.autograph.to_graph(step.python_function) if hasattr(step, "python_function") else step
