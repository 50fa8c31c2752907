# SPDX-License-Identifier: Apache-2.0
"""One replica's part of a step of any Keras model: its passes, one sum over replicas, the update, the logs."""

import warnings
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.division import common_rows
from keras_replicas.gradients import times
from keras_replicas.optimizers import apply_summed
from keras_replicas.origins import operations_so_far
from keras_replicas.passes import Passes, Sums
from keras_replicas.replicas import (
    assign_sum,
    is_reduced_apart,
    no_strategy,
    reduce_gradients,
    sum_over_replicas,
    waiting_for,
)
from keras_replicas.state import aggregation_of, assign_state


class ReplicaStep(Passes):
    """The step that `trainer.py` runs."""

    mean_over = "examples"  # a step's weight in the epoch's loss; with "labels", it is the divisor of the step's loss

    def _step(self, data, stop=0.0, training=False):
        """One replica's part of a step: a dict of running values, the step's own values as `step/...`, and `stop`.

        All are the same on every replica.
        """
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        with waiting_for((data, common_rows(leaves))):
            sums, batch = self._passes(keras.utils.unpack_x_y_sample_weight(data), training)
            total = add_up(sums._replace(stop=tf.cast(stop, tf.float32)), self.trainable_variables)
            loss = tf.math.divide_no_nan(total.loss, total.divisor)
            values = {"loss": loss}
            self._update_state(total.state, total.examples)
            if training:
                values |= learning_rate(self.optimizer)
                self._update_weights(total.gradients, total.divisor)
            else:
                self.step_counter.end_evaluation_step()
            logs, metrics = self._track(loss, total, batch, data)
        values |= metrics
        return logs | {f"step/{name}": value for name, value in values.items()} | {"stop": total.stop}

    def _update_weights(self, gradients, divisor):
        """The optimizer's update, by gradients that are divided here, once."""
        if not self.trainable_variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            self.step_counter.end_training_step()
            return
        variables = self.trainable_variables
        share = tf.math.divide_no_nan(tf.ones_like(divisor), divisor)
        divided = {
            index: gradient if variables[index].overwrite_with_gradient else times(gradient, share)
            for index, gradient in gradients.items()
        }
        apply_summed(self.optimizer, [divided.get(index) for index in range(len(variables))], variables)

    def _update_state(self, state, examples):
        """Gives this replica's copies of what layers update its new value, of all replicas."""
        variables = self._model_variables()
        for index, total in state.items():
            assign_state(aggregation_of(variables[index], self), variables[index], total, examples)

    def _track(self, loss, total, batch, data):
        """Updates the metrics; returns dicts of the epoch's values so far, and of the step's own, if they add up."""
        operations = operations_so_far()
        variables, weight = self._metric_variables(), total.divisor if self.mean_over == "labels" else total.examples
        now = [before + added for before, added in zip(total.metrics_before, total.metrics, strict=True)]
        with no_strategy(), keras.StatelessScope(list(zip(variables, now, strict=True))) as scope:
            if self._loss_tracker is not None:
                self._loss_tracker.update_state(loss, sample_weight=weight)
            logs = flat(self.get_metrics_result() if self._metrics_add_up() else self.compute_metrics(*batch))
        values = [scope.get_current_value(variable) for variable in variables]
        if not self._metrics_add_up():
            self._refuse_local([*values, *logs.values()], "a metric", data, operations)
        for variable, value in zip(variables, values, strict=True):
            assign_sum(variable, value)
        of_step = own_metrics(self, zip(variables, total.metrics, strict=True)) if self._metrics_add_up() else {}
        return logs, of_step


def own_metrics(model: Any, added: Iterable[tuple[keras.Variable, tf.Tensor]]) -> dict[str, tf.Tensor]:
    """A step's own metrics, without losses and vectors, from what it adds to each of their variables."""
    with no_strategy(), keras.StatelessScope(list(added)):
        metrics = flat(model.get_metrics_result())
    of_losses = {"loss", *(tracker.name for tracker in model._loss_trackers())}
    return {
        name: value
        for name, value in metrics.items()
        if name not in of_losses and not tf.convert_to_tensor(value).shape.rank
    }


def add_up(sums: Sums, variables: list[keras.Variable]) -> Sums:
    """Over all replicas, in one reduction; of a table, the replicas gather rows instead."""
    apart = {index for index, each in sums.gradients.items() if is_reduced_apart(each, variables[index])}
    dense = {index: each for index, each in sums.gradients.items() if index not in apart}
    total = sum_over_replicas(sums._replace(gradients=dense))
    others = {index: each for index, each in sums.gradients.items() if index in apart}
    return total._replace(gradients=total.gradients | reduce_gradients(others, variables))


def learning_rate(optimizer: keras.Optimizer) -> dict[str, tf.Tensor]:
    """The optimizer's rate, by name; nothing for a `MultiOptimizer`, which has several, or without an optimizer."""
    rate = getattr(optimizer, "learning_rate", None)
    return {} if rate is None else {"learning_rate": tf.cast(rate, tf.float32)}


def flat(logs: dict) -> dict:
    """Logs as Keras's callbacks see them: dicts in them, as from metrics with several results, are flattened."""
    pairs = [flat(value).items() if isinstance(value, dict) else [(name, value)] for name, value in logs.items()]
    return {name: value for items in pairs for name, value in items}


def split_logs(values: dict) -> tuple[dict, dict]:
    """The epoch's values so far, and each step's own values."""
    of_step = {name for name in values if name.startswith("step/")}
    logs = {name: value for name, value in values.items() if name not in of_step | {"stop"}}
    return logs, {name.removeprefix("step/"): values[name] for name in values if name in of_step}
