# SPDX-License-Identifier: Apache-2.0
"""One replica's part of a step of any Keras model: its passes, one sum over replicas, the update, the logs."""

import warnings

import keras
import tensorflow as tf

from keras_replicas.optimizers import apply_summed
from keras_replicas.passes import Passes, Sums, times, wide
from keras_replicas.replicas import assign_sum, local_value, no_strategy, sum_over_replicas, sum_rows


class ReplicaStep(Passes):
    """The step that `trainer.py` runs."""

    mean_over = "examples"  # a step's weight in the epoch's loss; with "values", it is the divisor of the step's loss

    def _step(self, data, stop=0.0, training=False):
        """One replica's part of a step: a dict of running values, the step's own values as `step/...`, and `stop`.

        All are the same on every replica.
        """
        data = keras.utils.unpack_x_y_sample_weight(data)
        sums, batch = self._passes(data, training)
        leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
        with tf.control_dependencies(leaves):  # at the end of the data, nothing is to be counted
            total = add_up(sums._replace(stop=tf.cast(stop, tf.float32)))
        loss = tf.math.divide_no_nan(total.loss, total.divisor)
        values = {"loss": loss}
        if training:
            with tf.control_dependencies([total.divisor]):  # nor by the optimizer, which counts steps
                values["learning_rate"] = tf.cast(self.optimizer.learning_rate, tf.float32)
                self._update_layers(total.changes, total.examples)
                self._update_weights(total.gradients, total.divisor)
        logs, metrics = self._track(loss, total, batch)
        values |= metrics
        return logs | {f"step/{name}": value for name, value in values.items()} | {"stop": total.stop}

    def _update_weights(self, gradients, divisor):
        """The optimizer's update. Here, and nowhere else, gradients are divided."""
        if not self.trainable_variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        share = tf.math.divide_no_nan(1.0, divisor)
        divided = {index: times(gradient, share) for index, gradient in gradients.items()}
        variables = self.trainable_variables
        apply_summed(self.optimizer, [divided.get(index) for index in range(len(variables))], variables)

    def _update_layers(self, changes, examples):
        """Changes this replica's copies of what layers update in training by the mean change over all examples."""
        variables = self._model_variables()
        for index, total in changes.items():
            change = tf.math.divide_no_nan(total, examples)
            variable = local_value(variables[index])
            value = wide(tf.convert_to_tensor(variable))
            change = change if variable.dtype.is_floating else tf.round(change)
            variable.assign(tf.cast(value + tf.cast(change, value.dtype), variable.dtype))

    def _track(self, loss, total, batch):
        """Updates the metrics; returns dicts of the epoch's values so far, and of the step's own, if they add up."""
        variables, weight = self._metric_variables(), total.divisor if self.mean_over == "values" else total.examples
        now = [before + added for before, added in zip(total.metrics_before, total.metrics, strict=True)]
        with no_strategy(), keras.StatelessScope(list(zip(variables, now, strict=True))) as scope:
            if self._loss_tracker is not None:
                self._loss_tracker.update_state(loss, sample_weight=weight)
            logs = flat(self.get_metrics_result() if self._metrics_add_up() else self.compute_metrics(*batch))
        for variable in variables:
            assign_sum(variable, scope.get_current_value(variable))
        if not self._metrics_add_up():
            return logs, {}
        of_losses = {"loss", *(tracker.name for tracker in self._loss_trackers())}
        with no_strategy(), keras.StatelessScope(list(zip(variables, total.metrics, strict=True))):
            metrics = flat(self.get_metrics_result())
        return logs, {name: value for name, value in metrics.items() if name not in of_losses}


def add_up(sums: Sums) -> Sums:
    """Over all replicas, in one reduction; of a table, the replicas gather rows instead."""
    rows = {index: each for index, each in sums.gradients.items() if isinstance(each, tf.IndexedSlices)}
    dense = {index: each for index, each in sums.gradients.items() if index not in rows}
    total = sum_over_replicas(sums._replace(gradients=dense))
    return total._replace(gradients=total.gradients | {index: sum_rows(each) for index, each in rows.items()})


def flat(logs: dict) -> dict:
    """Logs as Keras's callbacks see them: dicts in them, as from metrics with several results, are flattened."""
    pairs = [flat(value).items() if isinstance(value, dict) else [(name, value)] for name, value in logs.items()]
    return {name: value for part in pairs for name, value in part}
