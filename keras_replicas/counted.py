# SPDX-License-Identifier: Apache-2.0
"""Steps on one replica: Keras's own, counted, with each one's own values."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_replicas.replicas import waiting_for
from keras_replicas.step import learning_rate, own_metrics

WIDTH = 64  # numbers that are kept of a step


class CountedSteps:
    """Keras's function of the steps of one call, for `fit`.

    It counts in variables, for a call may end with the data; and nobody waits for a step before its count is asked for.

    Args:
        model: whose `train_function` this is.
        make_function: Keras's `_make_function`.
        step_function: the model's `train_step`.
    """

    def __init__(self, model: Any, make_function: Callable, step_function: Callable):
        self._model, self._step = model, step_function
        self._size = model.steps_per_execution
        self._done = _variable(np.int64(0))
        self._done_before = _variable(np.int64(0))
        self._names: list[str] = []
        self._rows = _variable(np.zeros([self._size, WIDTH], np.float32))  # one for each step of a call
        self._of_so_many = functools.cache(lambda steps: make_function(self._counted))

    def __call__(self, iterator):
        """Does the steps of one call, and returns the logs of the last."""
        model, size = self._model, self._size
        left = model._steps_left_of_epoch()
        model.steps_per_execution = size if left is None else min(size, left)
        if size > 1:
            self._done_before.assign(self._done)
        try:
            logs = self._of_so_many(model.steps_per_execution)(iterator)
        finally:
            model.steps_per_execution = size
        model.all_told_to_stop = model.told_to_stop
        if left is not None:  # Keras counts whole calls: finite data would seem to end too soon
            model._fit_iterator._steps_seen -= size - self.in_last_call()
        return logs

    def count(self) -> int:
        """Steps so far."""
        return int(self._done)

    def in_last_call(self) -> int:
        """Steps of the last call."""
        return 1 if self._size == 1 else int(self._done - self._done_before)

    def values(self) -> dict[str, np.ndarray]:
        """Of each step of the last call, by name."""
        done = self.count()
        rows = self._rows.numpy()[np.arange(done - self.in_last_call(), done) % self._size]
        return dict(zip(self._names, rows.T, strict=False))

    def _counted(self, data):
        """A step; when it is traced, or runs eagerly."""
        model = self._model
        before = {id(variable): tf.convert_to_tensor(variable.value) for variable in model._metric_variables()}
        model.step_loss, rate = None, learning_rate(model.optimizer)  # a step changes what a schedule says
        with metrics_waiting_for(data, model):
            logs = self._step(data)
        if model.step_loss is not None:
            values = {"loss": model.step_loss} | rate
            if model._metrics_add_up():
                added = [
                    (variable, variable.value - before[id(variable)] if id(variable) in before else variable.value)
                    for variable in model._metric_variables()
                ]
                values |= own_metrics(model, added)
            self._note(values)
        with waiting_for(() if model.jit_compile else data):  # XLA waits by itself
            self._done.assign_add(1)
        return logs

    def _note(self, values: dict[str, tf.Tensor]) -> None:
        values = {name: tf.convert_to_tensor(value) for name, value in values.items()}
        self._names = list(values)[:WIDTH]
        row = tf.stack([tf.cast(values[name], tf.float32) for name in self._names])
        row = tf.pad(row, [[0, WIDTH - len(self._names)]])
        self._rows.scatter_nd_update([[self._done % self._size]], [row])


@contextlib.contextmanager
def metrics_waiting_for(data: Any, model: Any) -> Iterator[None]:
    """Context in which Keras's step updates the metrics of a model only once the data has come.

    TensorFlow runs what does not depend on the data, such as a count of examples of known shape, at the data's end,
    too, where there is none. Only the metrics wait: were all of the step to wait, TensorFlow would optimise it
    otherwise, and its results would not be those of plain Keras to the bit.
    """
    metrics = [] if model.jit_compile else [model._loss_tracker, model._compile_metrics, *model._loss_trackers()]
    metrics = [each for each in metrics if each is not None and "update_state" not in vars(each)]

    def update_state(update, *args, **kwargs):
        with waiting_for(data):
            return update(*args, **kwargs)

    for metric in metrics:  # assigned as usual, it would be tracked
        vars(metric)["update_state"] = functools.partial(update_state, metric.update_state)
    try:
        yield
    finally:
        for metric in metrics:
            del vars(metric)["update_state"]


def _variable(value: Any) -> tf.Variable:
    """A variable on the device; in a strategy's scope, TensorFlow makes copies of it, here one."""
    variable = tf.Variable(value, trainable=False)
    return variable.values[0] if isinstance(variable, tf.distribute.DistributedValues) else variable
