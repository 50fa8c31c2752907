# SPDX-License-Identifier: Apache-2.0
"""The trainer that replaces Keras's in the classes that `data_parallel` makes.

Keras's hook, what it does there, and what it does here, and why:

- `compile` keeps losses and metrics. Here it does so in the strategy's scope, and `losses.py` finds which add up.
- `fit` goes over epochs and batches. Here `arguments.py` makes it begin where a run goes on.
- `_maybe_symbolic_build` averages the first batch over replicas, to build from it. Booleans, strings and uneven batches
  have no average (keras-team/keras#19246, #21172), nor has anything on several workers (#20585): here it builds from
  shapes.
- `make_train_function` makes a `tf.function` over steps, and a mean of what replicas return. Here steps are in a loop
  that collectives allow (#20582), and replicas return what they have summed (`step_calls.py`).
- `train_step` takes the gradient of a replica's mean; the optimizer sums. Here sums are divided once (`step.py`).
- `test_step` does the same without an update, in both.
- `predict_step` computes a replica's outputs, in both. Here a replica may have no examples (`empty.py`).
- `train_on_batch` and the like give every replica the whole batch. Here each takes a part.
- Saving and pickling are of the class. Here they are of the plain class, so that files load without this library.
"""

import contextlib
import functools
import inspect
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.arguments import begin_fit, checkpoints_in, with_divided_data
from keras_replicas.building import Building
from keras_replicas.counted import CountedSteps
from keras_replicas.custom_step import run_custom_prediction
from keras_replicas.division import as_tensor, divide_batch
from keras_replicas.loop import StepLoop, without_tf_function
from keras_replicas.noise import use_global_seed
from keras_replicas.optimizers import without_strategy
from keras_replicas.outputs import in_words
from keras_replicas.private import TensorFlowTrainer
from keras_replicas.replicas import map_given, own_copies
from keras_replicas.step_calls import StepCalls
from keras_replicas.waiting import call_of_all_workers


class Trainer(Building):
    """Replaces Keras's trainer among the bases of a class that `data_parallel` makes."""

    _steps_done = 0
    _counted: CountedSteps | None = None  # on one replica
    _last_step: int | None = None
    _steps_in_call = 0
    _epoch_end: int | None = None  # the step, while `fit` runs and was told `steps_per_epoch`
    _test_steps_left: int | None = None  # while `evaluate` runs
    plain_class: Any
    predict_function: Any
    _step_values: dict[str, np.ndarray] | None = None
    step_loss: tf.Tensor | None = None  # while a step is traced
    train_function: Any

    @functools.wraps(TensorFlowTrainer.compile)
    def compile(self, *args, **kwargs):  # noqa: D102
        with self._scope():
            super().compile(*args, **kwargs)
            self._forget_step_plans()
            self._prepare()

    def compile_from_config(self, config):
        """Compiles a loaded model as Keras does, which would mistake this `compile` for a user's own."""
        if type(self).compile is Trainer.compile:
            self.compile(**keras.saving.deserialize_keras_object(config))
            with self._scope():
                self._build_optimizer()  # whose state may be loaded next
        else:
            super().compile_from_config(config)

    def __reduce__(self):
        """Pickles the model as one of the plain class, like one that is saved to a file."""
        _, content = super().__reduce__()
        return keras.Model._unpickle_model, content

    @functools.wraps(TensorFlowTrainer.fit)
    @call_of_all_workers("fit")
    @in_words()
    def fit(self, *args, **kwargs):  # noqa: D102
        given: dict[str, Any] = inspect.signature(super().fit).bind(*args, **kwargs).arguments
        checkpoints = checkpoints_in(given)
        data = given.get("x")
        step, given = begin_fit(self, given, checkpoints)
        self._forget_function("train_function", given.get("x"))
        self._counted = None if self.train_function is None else self._counted
        self._steps_done = step - (self._counted.count() if self._counted else 0)
        self._last_step = checkpoints.max_steps if checkpoints else None
        self._fit_iterator, self._begins_anywhere = None, given.get("x") is not data
        try:
            with checkpoints.listening() if checkpoints else contextlib.nullcontext():
                history = super().fit(**given)
            if checkpoints:
                checkpoints.end_fit()
            return history
        finally:
            self._fit_iterator, self._epoch_end = False, None

    @functools.wraps(TensorFlowTrainer.evaluate)
    @call_of_all_workers("evaluate")
    @in_words()
    def evaluate(self, *args, **kwargs):  # noqa: D102
        given = inspect.signature(super().evaluate).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if not given.get("_use_cached_eval_dataset"):
            given = with_divided_data(self, given, "test_step")
        self._forget_function("test_function", given.get("x"))
        self._test_steps_left = given.get("steps")
        self._begin_evaluation()
        try:
            return super().evaluate(**given)
        finally:
            self._test_steps_left = None

    @functools.wraps(TensorFlowTrainer.predict)
    @call_of_all_workers("predict")
    @in_words()
    def predict(self, *args, **kwargs):  # noqa: D102
        given = with_divided_data(self, inspect.signature(super().predict).bind(*args, **kwargs).arguments)
        self._begin_evaluation()
        return super().predict(**given)

    def reset_metrics(self):
        """Resets the metrics, and measures custom steps again if it is time; see `StepPlans.measure_again`."""
        super().reset_metrics()
        if self.step_plans is not None:
            self.step_plans.measure_again()
        self.probe_call_again()

    def get_metrics_result(self):
        """The metrics' results by name, each a tensor: a metric may return the value of its variable."""
        results = super().get_metrics_result()
        return keras.tree.map_structure(
            lambda each: tf.convert_to_tensor(each) if isinstance(each, tf.distribute.DistributedValues) else each,
            results,
        )

    def _make_function(self, step_function):
        """Keras's train function, which leaves each step's own values in `step_values`, or its test function."""
        training = step_function == self.train_step
        if self.steps_by_keras:
            step = self._with_copies_of_replica(step_function)
            if not training:
                return super()._make_function(step)
            self._counted = CountedSteps(self, super()._make_function, step)
            return self._counted
        run_steps = StepCalls(self, "train_step" if training else "test_step")

        def train_function(iterator):
            left, epochs = self._steps_left_of_epoch(), self._fit_iterator
            if left is not None and epochs._num_batches:  # data may end first, and Keras has counted this call
                left = min(left, epochs._num_batches - epochs._steps_seen + self.steps_per_execution)
            steps, logs, self._step_values = run_steps(iterator, left)
            self._steps_done, self._steps_in_call = self._steps_done + steps, steps
            if left is not None:  # Keras counts whole calls: finite data would seem to end too soon
                epochs._steps_seen -= self.steps_per_execution - steps
            return logs

        def test_function(iterator):
            steps, logs, _ = run_steps(iterator, self._test_steps_left)
            if self._test_steps_left is not None:
                self._test_steps_left -= steps
            return logs

        return train_function if training else test_function

    def _with_copies_of_replica(self, step):
        """A step of one replica, in which Keras finds no copies of variables, as without a strategy.

        A `train_step` of the model's own may have other optimizers, which need the copies of weights.
        """
        if not self._distribute_strategy:
            return step
        step, is_keras = without_tf_function(step), type(self).train_step is StepLoop.train_step

        def with_copies(data):
            use_global_seed(self)
            is_built = self.optimizer is not None and self.optimizer.built
            if is_built and is_keras:
                copies = without_strategy(self.optimizer, [*self.variables, *self._metric_variables()])
            else:
                copies = own_copies([*self.non_trainable_variables, *self._metric_variables()])
            with copies:
                return step(data)

        return with_copies

    def make_predict_function(self, force=False):
        """Makes Keras's function for predictions; a model that is not built yet is built first, for XLA."""
        if self.predict_function is not None and not force:
            return
        step = self.custom_step_function("predict_step")
        if step is not None and not self.steps_by_keras:
            with self._scope():
                self._make_step_counter()
                self._make_step_plans()
            object.__setattr__(self, "predict_step", functools.partial(self._custom_prediction, step))
        super().make_predict_function(force)
        if self.steps_by_keras:
            return
        if not self.compiled:
            with self._scope():
                self._prepare()
        predict = self.predict_function
        local = self.distribute_strategy.experimental_local_results

        def predict_function(data):
            if self.jit_compile and not all(layer.built for layer in self._flatten_layers()):
                self._call_symbolically(keras.tree.map_structure(lambda leaf: local(leaf)[0], data[0]))
            with self.refusal_raised(), in_words():
                return predict(data)

        self.predict_function = predict_function

    def _custom_prediction(self, step, data):
        """A custom `predict_step` on one replica."""
        return run_custom_prediction(self, step, data, has_rows_unknown=not self.jit_compile)

    def predict_on_batch(self, x):
        """Predicts for a batch, of which each replica takes a part."""
        if self.steps_by_keras:
            return super().predict_on_batch(x)
        self.make_predict_function()
        outputs = self.predict_function([divide_batch(self.distribute_strategy, map_given(as_tensor, (x,)))])
        return keras.tree.map_structure(lambda t: t if isinstance(t, tf.RaggedTensor) else np.asarray(t), outputs)

    @property
    def steps_done(self):
        """Steps of this `fit` so far, with those before it was resumed."""
        return self._steps_done + (self._counted.count() if self._counted else 0)

    @property
    def steps_in_call(self):
        """Steps since the last callback."""
        return self._counted.in_last_call() if self._counted else self._steps_in_call

    @property
    def step_values(self):
        """For the steps since the last callback, vectors [steps]: each step's own values, by name."""
        return self._counted.values() if self._counted else self._step_values

    @property
    def at_epoch_end(self):
        """Whether the last step of the epoch that `fit` was told the steps of is done."""
        return self.steps_done == self._epoch_end

    def _compute_loss(self, *args, **kwargs):
        """Computes the loss as Keras does, and keeps it as that of the step."""
        loss = super()._compute_loss(*args, **kwargs)
        self.step_loss = loss
        return loss

    def become_data_parallel(self) -> None:
        """Makes a model of the plain class, whose class has been changed, ready; it may be compiled already."""
        if self.compiled:
            self.train_function = self.test_function = self.predict_function = None
            self._forget_step_plans()
            with self._scope():
                self._prepare()

    def _forget_step_plans(self):
        object.__setattr__(self, "step_plans", None)  # assigned as usual, they would be tracked
        object.__setattr__(self, "_call_findings", {})
        object.__setattr__(self, "_inputs_of_unknown_losses", {})
        self._has_outputs_of_one_axis = None

    def _steps_left_of_epoch(self):
        """Steps until `fit` evaluates; None if it was not told how many an epoch has."""
        return None if self._epoch_end is None else self._epoch_end - self.steps_done

    def _begin_epochs_where_they_are(self, epoch_iterator):
        """Makes Keras's loop begin its first epoch at `steps_done`, and end its last one at `last_step`.

        An epoch may also end sooner, with the data; the next one has all its steps again.
        """
        enumerate_whole = epoch_iterator._enumerate_iterator
        steps = epoch_iterator.steps_per_epoch or epoch_iterator.num_batches

        def enumerate_rest():
            done = self.steps_done % steps if self._epoch_end is None else 0
            self._epoch_end = min(self.steps_done - done + steps, self._last_step or sys.maxsize)
            if epoch_iterator.steps_per_epoch:
                epoch_iterator.steps_per_epoch = self._epoch_end - self.steps_done
            for first, last, iterator in enumerate_whole():
                yield done + first, done + last, iterator

        epoch_iterator._enumerate_iterator = enumerate_rest
