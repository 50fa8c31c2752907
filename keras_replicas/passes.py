# SPDX-License-Identifier: Apache-2.0
"""One replica's passes through a model: what it computes of its examples, to be added up over replicas.

The passes change no variable, so that XLA can compile them, and slices of a batch can come one after another.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_replicas.empty import (
    count_examples,
    first_input,
    forward_pass,
    with_an_example,
    without_added_example,
    zeros_without_examples,
)
from keras_replicas.losses import BatchLoss, Stateless
from keras_replicas.noise import noise_seeds, use_global_seed
from keras_replicas.replicas import gather, is_first_replica, is_shared, local_value, replicas, sum_over_replicas


class Sums(NamedTuple):
    """What a replica computes of its examples, and what adds up: the sum over replicas is that of the whole batch."""

    gradients: dict[int, Any]  # of `loss`, by the weight's index: tensors, or `tf.IndexedSlices` of a table's rows
    loss: tf.Tensor  # a sum, which `divisor` divides
    divisor: tf.Tensor
    examples: tf.Tensor  # their number
    metrics: list[tf.Tensor]  # what the batch adds to each variable of the metrics
    metrics_before: list[tf.Tensor]  # what this replica holds of these variables
    changes: dict[int, tf.Tensor]  # of each other variable that layers update, times the examples; by its index
    stop: tf.Tensor  # not 0 if this worker is to stop


class Passes(BatchLoss):
    """The passes of the step in `step.py`."""

    _jitted: Any = None

    def update_counts(self, x, y, sample_weight):
        """Override this to update a class's own metrics that add up, from a replica's examples."""

    def _passes(self, data, training):
        """This replica's `Sums`, and the gathered batch if metrics need it, else ()."""
        before = self._local_metrics()
        by_sums = self._one_loss_adds_up() and self._metrics_add_up()
        if not by_sums:
            before = sum_over_replicas(before)
        scale, divided = tf.constant(1.0), tf.constant(1.0)
        if training and self.optimizer is not None:
            scale = tf.convert_to_tensor(self.optimizer.scale_loss(1.0), tf.float32)
            if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
                divided = sum_over_replicas(count_examples(data[0]))  # keeps numbers small in float16
        compute = self._one_pass
        if self.jit_compile:
            if self._jitted is None:
                self._jitted = tf.function(self._one_pass, autograph=False, jit_compile=True)
            compute = self._jitted

        def one_pass(number, data):
            filled = with_an_example(data[0])
            sums, after, batch = compute(self._model_values(number), before, data, filled, scale, divided, training)
            if filled is not data[0]:
                found = sums.gradients, sums.changes
                gradients, changes = zeros_without_examples(sums.examples, found)
                sums = sums._replace(gradients=gradients, changes=changes)
            return sums, after, batch

        slices = self.accumulate > 1 and training
        sums, after, batch = self._slice_by_slice(one_pass, data) if slices else one_pass(0, data)
        is_first = is_first_replica()
        if not by_sums:  # all replicas hold the same
            before = [tf.where(is_first, value, tf.zeros_like(value)) for value in after or before]
        if [each.loss.loss.reduction for each in self._compiled_losses()] == ["sum"]:  # nothing divides it
            sums = sums._replace(divisor=tf.cast(is_first, tf.float32))
        return sums._replace(metrics_before=before), batch

    def _slice_by_slice(self, one_pass, data):
        """Adds up the `Sums` of `accumulate` slices of this replica's examples, computed one after another."""
        wrong = f"accumulate = {self.accumulate} does not divide a replica's number of examples"
        size = tf.cast(count_examples(data[0]), tf.int32)
        if (first_input(data[0]).shape[0] or 0) % self.accumulate:
            raise ValueError(wrong)
        with tf.control_dependencies([tf.debugging.assert_equal(size % self.accumulate, 0, wrong)]):
            slices = keras.tree.map_structure(
                lambda t: None if t is None else tf.reshape(t, [self.accumulate, -1, *tf.unstack(tf.shape(t))[1:]]),
                data,
            )

        @tf.function(autograph=False)
        def numbered_pass(number):
            sums, *rest = one_pass(number, keras.tree.map_structure(lambda t: None if t is None else t[number], slices))
            dense = {index: tf.convert_to_tensor(gradient) for index, gradient in sums.gradients.items()}
            return sums._replace(gradients=dense), *rest

        def add(totals, number):
            with tf.control_dependencies(tf.nest.flatten(totals)):  # else slices are computed at the same time
                number = tf.identity(number)
            return tf.nest.map_structure(tf.add, totals, numbered_pass(number))

        first, rest = numbered_pass(tf.constant(0)), tf.range(1, self.accumulate)
        return tf.foldl(add, rest, initializer=first, parallel_iterations=1)

    def _one_pass(self, values, metrics_before, data, filled, scale, divided, training):
        """Computes `Sums` of some examples. It is a function of tensors, which changes no variable.

        Args:
            values: those of `_model_variables`.
            metrics_before: those of the metrics' variables.
            data: (x, y, sample_weight).
            filled: x or, if it is empty, one example; see `with_an_example`.
            scale: multiplies the loss whose gradient is taken.
            divided: divides a loss by sums while its gradient is taken.
            training: whether to train, not evaluate.

        Returns:
            The `Sums`; values of the metrics' variables, if the loss is a gathered one, which may update them, else ();
            and the gathered (x, y, y_pred, sample_weight), if metrics need it, else ().
        """
        x, y, sample_weight = data
        use_global_seed(self)
        variables, metric_variables = self._model_variables(), self._metric_variables()
        mapping = list(zip(variables, values, strict=True))
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metric_variables]
        trained = self.trainable_variables if training else []
        weights = values[: len(trained)]
        examples, after, batch = count_examples(x), (), ()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            with Stateless([*mapping, *zeros], trained, collect_losses=True) as scope:
                given = dict(scope.state_mapping)
                y_pred = self._predicted(x, filled, training)
                self.update_counts(x, y, sample_weight)
                if self._compile_metrics is not None and self._metrics_add_up():
                    self._compile_metrics.update_state(y, y_pred, sample_weight)
                added = [tf.cast(tf.reduce_sum(term), keras.config.floatx()) for term in self.losses]
                by_sums = self._one_loss_adds_up() and not added
                if by_sums:
                    loss, divisor = self._loss_by_sums(y, y_pred, sample_weight)
                    objective = loss * tf.cast(scale / divided, loss.dtype)
                else:
                    self._refuse_jit_and_accumulate("a single loss of Keras's, without add_loss or regularisers")
                    metrics = list(zip(metric_variables, metrics_before, strict=True))
                    whole, after, updates = self._gathered_loss(
                        mapping, metrics, data, y_pred, added, examples, training
                    )
                    scope.state_mapping |= updates
                    objective = whole * tf.cast(scale, whole.dtype)
                    loss, divisor = tf.where(is_first_replica(), whole, 0.0), tf.cast(is_first_replica(), whole.dtype)
        gradients = dict(enumerate(tape.gradient(objective, weights)))
        gradients = {index: gradient for index, gradient in gradients.items() if gradient is not None}
        if by_sums and isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            gradients = {index: times(gradient, divided) for index, gradient in gradients.items()}
        if not self._metrics_add_up():
            self._refuse_jit_and_accumulate("metrics of Keras's, and no compute_metrics")
            batch = gather(x) if self._overrides("compute_metrics") else x, *gather((y, y_pred, sample_weight))
        changes = {
            index: tf.cast(wide(scope.state_mapping[id(v)]) - wide(given[id(v)]), tf.float32) * examples
            for index, v in enumerate(variables)
            if scope.state_mapping[id(v)] is not given[id(v)] and v.name != "seed_generator_state"
        }
        metrics = self._metric_sums(given, scope.state_mapping)
        stop = tf.constant(0.0)
        return Sums(gradients, loss, divisor, examples, metrics, [], changes, stop), after, batch

    def _predicted(self, x, filled, training):
        """The model's outputs for this replica's examples, computed from `filled`."""
        examples, known, before = count_examples(x), filled is x, dict(vars(self))
        with forward_pass(None if known else examples > 0):
            y_pred = self(filled, training=training) if self._call_has_training_arg else self(filled)
        noted = [n for n, value in vars(self).items() if isinstance(value, tf.Tensor) and value is not before.get(n)]
        if noted and self._overrides("compute_loss") and replicas() > 1:
            raise ValueError(
                f"call sets {noted[0]}, of one replica's examples, but compute_loss is of all: return it from call, so "
                "that it is gathered, or use add_loss in call"
            )
        return y_pred if known else without_added_example(y_pred, examples)

    def _model_variables(self):
        return [*self.trainable_variables, *self.non_trainable_variables, self.global_seed_generator.state]

    def _model_values(self, number):
        """Values of `_model_variables`; seeds are those of this replica and step, and of a slice of its examples."""
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        # This counts every step: `iterations` counts updates, of which `gradient_accumulation_steps` steps share one.
        steps = 0 if optimizer is None else optimizer._iterations
        count = tf.cast(steps, tf.int64) * self.accumulate + tf.cast(number, tf.int64)
        seeds = {id(variable): seed for variable, seed in noise_seeds(self, count)}
        return [
            seeds[id(variable)] if id(variable) in seeds else tf.convert_to_tensor(variable.value)
            for variable in self._model_variables()
        ]

    def _local_metrics(self):
        """This replica's values of the metrics' variables; the value of each is the sum over replicas."""

        def counted_once(variable):
            value = tf.convert_to_tensor(local_value(variable))
            return tf.where(is_first_replica(), value, tf.zeros_like(value)) if is_shared(variable) else value

        return [counted_once(variable) for variable in self._metric_variables()]


def times(gradient, factor):
    """A gradient, multiplied by a scalar."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def wide(value):
    """A number from which another can be subtracted; float32 may not tell a large count from the next."""
    return value if value.dtype.is_floating else tf.cast(value, tf.int64)
