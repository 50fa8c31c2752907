# SPDX-License-Identifier: Apache-2.0
"""One replica's passes through a model: what it computes of its examples, to be added up over replicas.

No pass trains a weight, so that XLA can compile it, and slices of a batch can come one after another.
"""

import functools
import warnings
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_replicas.empty import (
    count_examples,
    first_input,
    others_example,
    sum_of_examples,
    with_example,
    without_added_example,
    zeros_without_examples,
)
from keras_replicas.errors import UserError
from keras_replicas.gradients import Gradients
from keras_replicas.losses import NotCompilable, variables_of_losses
from keras_replicas.origins import operations_so_far
from keras_replicas.outputs import a_row_each
from keras_replicas.replicas import (
    gather,
    is_first_replica,
    is_shared,
    local_value,
    map_given,
    replicas,
    sum_over_replicas,
)
from keras_replicas.state import OwnState


class Sums(NamedTuple):
    """What a replica computes of its examples, and what adds up: the sum over replicas is that of the whole batch."""

    gradients: dict[int, Any]  # of `loss`, by the weight's index: tensors, or `tf.IndexedSlices` of a table's rows
    loss: tf.Tensor  # a sum, which `divisor` divides
    divisor: tf.Tensor
    examples: tf.Tensor  # their number
    metrics: list[tf.Tensor]  # what the batch adds to each variable of the metrics
    metrics_before: list[tf.Tensor]  # what this replica holds of these variables
    state: dict[int, tf.Tensor]  # of each other variable that layers update, by its index, as `state.py` adds it up
    stop: tf.Tensor  # not 0 if this worker is to stop


class Passes(Gradients):
    """The passes of the step in `step.py`."""

    _rows_known = True  # while a step is traced, whether static shapes tell that all replicas have rows

    def _passes(self, data, training):
        """This replica's `Sums`, and the gathered batch if metrics need it, else ()."""
        before = self._local_metrics()
        by_sums = self._one_loss_adds_up() and self._metrics_add_up()
        if not by_sums:
            before = sum_over_replicas(before)
        scale = tf.constant(1.0)
        if training and self.optimizer is not None:
            scale = tf.convert_to_tensor(self.optimizer.scale_loss(1.0), tf.float32)
        one_pass = functools.partial(self._one_pass, self._copies(), training)
        compute = self._compiled(one_pass) if self.jit_compile else one_pass

        example = others_example(data, self._rows_known)

        def pass_of(number, data):
            filled = None if example is None else with_example(data, example)
            sums, after, batch = compute(self._number_of_slice(number, training), before, data, filled, scale)
            if filled is not None:
                found = sums.gradients, sums.state
                gradients, state = zeros_without_examples(sums.examples, found)
                sums = sums._replace(gradients=gradients, state=state)
            return sums, after, batch

        slices = self.accumulate > 1 and training
        sums, after, batch = self._slice_by_slice(pass_of, data) if slices else pass_of(0, data)
        is_first = is_first_replica()
        if not by_sums:  # all replicas hold the same
            before = [tf.where(is_first, value, tf.zeros_like(value)) for value in after or before]
        if [each.loss.reduction for each in self._compiled_losses()] == ["sum"]:  # nothing divides it
            sums = sums._replace(divisor=tf.cast(is_first, sums.divisor.dtype))
        return sums._replace(metrics_before=before), batch

    def _compiled(self, one_pass):
        """A pass by XLA or, where that is not possible, as it is."""
        compiled = tf.function(one_pass, autograph=False, jit_compile=True)

        def compute(*arguments):
            self._compiling = True
            try:
                return compiled(*arguments)
            except NotCompilable:
                needed = self._compiled_without
                warnings.warn(f"jit_compile has no effect here: on several replicas it needs {needed}", stacklevel=2)
            finally:
                self._compiling = False
            return one_pass(*arguments)

        return compute

    def _slice_by_slice(self, one_pass, data):
        """Adds up the `Sums` of `accumulate` slices of this replica's examples, computed one after another."""
        wrong = f"accumulate={self.accumulate} must divide the number of examples of each replica"
        size = tf.cast(count_examples(data[0]), tf.int32)
        if (first_input(data[0]).shape[0] or 0) % self.accumulate:
            raise UserError(wrong)
        with tf.control_dependencies([tf.debugging.assert_equal(size % self.accumulate, 0, wrong)]):
            slices = map_given(lambda t: tf.reshape(t, [self.accumulate, -1, *tf.unstack(tf.shape(t))[1:]]), data)

        @tf.function(autograph=False)
        def numbered_pass(number):
            sums, *rest = one_pass(number, map_given(lambda t: t[number], slices))
            dense = {index: tf.convert_to_tensor(gradient) for index, gradient in sums.gradients.items()}
            return sums._replace(gradients=dense), *rest

        def add(totals, number):
            with tf.control_dependencies(tf.nest.flatten(totals)):  # else slices are computed at the same time
                number = tf.identity(number)
            return tf.nest.map_structure(tf.add, totals, numbered_pass(number))

        first = numbered_pass(tf.constant(0))
        return tf.foldl(add, tf.range(1, self.accumulate), first, parallel_iterations=1)

    def _one_pass(self, copies, training, number, metrics_before, data, filled, scale):
        """Computes `Sums` of some examples.

        Args:
            copies: this replica's, of `_model_variables`, by `id`.
            training: whether to train, not evaluate.
            number: another one for each step, and for each slice of its examples.
            metrics_before: values of the metrics' variables.
            data: (x, y, sample_weight).
            filled: the data or, if it has no rows, another replica's example; None where it cannot be without rows.
            scale: multiplies the loss whose gradient is taken.

        Returns:
            The `Sums`; values of the metrics' variables, if the loss is a gathered one, which may update them, else ();
            and the gathered (x, y, y_pred, sample_weight), if metrics need it, else ().
        """
        x, y, sample_weight = data if filled is None else filled
        metric_variables = self._metric_variables()
        metrics = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metric_variables]
        scope = self._own_state(copies, number, metrics, (data, filled))
        weights = [copies[id(variable)] for variable in self.trainable_variables] if training else []
        examples = count_examples(data[0])
        has_examples = None if filled is None else examples > 0
        after: list[tf.Tensor] = []
        batch: tuple = ()
        with scope, tf.GradientTape() as tape:
            tape.watch(weights)
            y_pred = self._predicted(x, has_examples, training)
            if self._compile_metrics is not None and self._metrics_add_up():
                self._compile_metrics.update_state(y, y_pred, sample_weight)
            if filled is not None:
                scope.undo_metrics(unless=has_examples)
            rows = first_input(x).shape[0]
            added = [term if term.shape[:1] == [rows] else tf.reduce_sum(term) for term in self.losses]
            added = [tf.cast(term, keras.config.floatx()) for term in added]
            by_sums = self._one_loss_adds_up() and not added
            if by_sums:
                loss, divisor = self._loss_by_sums(y, y_pred, sample_weight)
            if filled is not None:
                y_pred = without_added_example(y_pred, has_examples)
            if replicas() > 1 and not (by_sums and self._metrics_add_up()):
                y_pred = a_row_each(y_pred, examples)
        scope.refuse_lost_updates()
        x, y, sample_weight = data
        if by_sums:
            divisor = sum_of_examples(divisor, has_examples)
            gradients = self._gradients_by_sums(tape, loss, divisor, weights, scale)
            loss = sum_of_examples(loss, has_examples)
        else:
            self._needs_all_replicas("a single loss of Keras's, without add_loss or regularisers")
            own = [(variable, tf.convert_to_tensor(local_value(variable))) for variable in variables_of_losses(self)]
            of_loss = OwnState([*zip(metric_variables, metrics_before, strict=True), *own], scope.copies)
            operations = operations_so_far()
            loss_of_all, gradients = self._gathered_gradients(
                tape, of_loss, data, y_pred, added, examples, weights, scale, training
            )
            self._refuse_local([loss_of_all], "the loss", data, operations)
            after = [of_loss.get_current_value(variable) for variable in metric_variables]
            of_loss.refuse_lost_updates()
            for variable, before in own:
                value = of_loss.get_current_value(variable)
                if value is not before:  # the same on all replicas
                    local_value(variable).assign(value)
            loss = tf.where(is_first_replica(), loss_of_all, tf.zeros_like(loss_of_all))
            divisor = tf.cast(is_first_replica(), loss_of_all.dtype)
        if not self._metrics_add_up():
            self._needs_all_replicas("metrics of Keras's, and no compute_metrics")
            batch = gather(x) if self._overrides("compute_metrics") else x, *gather((y, y_pred, sample_weight))
        sums = Sums(
            {index: gradient for index, gradient in enumerate(gradients) if gradient is not None},
            loss,
            divisor,
            examples,
            self._metric_sums(scope.given, scope.state_mapping),
            [],
            self._state_sums(scope, examples, number),
            tf.constant(0.0),
        )
        return sums, after, batch

    def _local_metrics(self):
        """This replica's values of the metrics' variables; the value of each is the sum over replicas."""

        def counted_once(variable):
            value = tf.convert_to_tensor(local_value(variable))
            return tf.where(is_first_replica(), value, tf.zeros_like(value)) if is_shared(variable) else value

        return [counted_once(variable) for variable in self._metric_variables()]
