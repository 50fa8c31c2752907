# SPDX-License-Identifier: Apache-2.0
"""One replica's part of a step of any Keras model: its passes, one reduction, the optimizer, metrics and state.

The passes change no variable, so that XLA can compile them, and the parts of a batch can come one after another.
"""

import contextlib
import warnings

import keras
import tensorflow as tf

from keras_replicas.empty import (
    count_examples,
    first_input,
    forward_pass,
    outputs_of_examples,
    with_an_example,
    zeros_without_examples,
)
from keras_replicas.fused import fuse_gelu
from keras_replicas.gradients import Uses, add_rows, sum_gradients
from keras_replicas.losses import BatchLoss
from keras_replicas.noise import noise_seeds, use_global_seed
from keras_replicas.replicas import (
    gather,
    is_first_replica,
    is_shared,
    local_value,
    no_strategy,
    on_local_copies,
    pack,
    replicas,
    sum_over_replicas,
)


class ReplicaStep(BatchLoss):
    """The step that `trainer.py` runs."""

    accumulate: int
    _jitted = None
    mean_over = "examples"  # a step's weight in the epoch's loss; with "values", it is the divisor of the step's loss

    def update_counts(self, x, y, sample_weight):
        """Override this to update a class's own metrics that add up, from a replica's part of a batch."""

    def _step(self, data, stop=0.0, training=False):
        """One replica's part of a step: a dict of running values, the step's own values as `step/...`, and `stop`.

        All are the same on every replica: sums are added up over replicas, in a single reduction, and divided once.
        """
        data = keras.utils.unpack_x_y_sample_weight(data)
        metric_variables = self._metric_variables()
        is_first = is_first_replica()
        state = [tf.convert_to_tensor(local_value(variable)) for variable in metric_variables]
        state = [  # so that the sum over replicas is the value
            tf.where(is_first, value, tf.zeros_like(value)) if is_shared(variable) else value
            for variable, value in zip(metric_variables, state, strict=True)
        ]
        gathers = not (self._loss_adds_up() and self._metrics_add_up())
        if gathers:
            self._refuse_if_pure("a loss, metric, compute_loss or compute_metrics of your own")
            state = sum_over_replicas(state)
        scale, factor = tf.constant(1.0), tf.constant(1.0)
        if training and self.optimizer is not None:
            scale = tf.convert_to_tensor(self.optimizer.scale_loss(1.0), tf.float32)
            if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
                factor = 1.0 / sum_over_replicas(count_examples(data[0]))  # keeps numbers small in float16
        weights = [tf.convert_to_tensor(variable.value) for variable in self.trainable_variables]
        gradients, rows, sums, whole = self._in_parts(weights, state if gathers else [], data, scale, factor, training)

        sums["stop"] = tf.cast(stop, tf.float32)
        if not gathers:
            sums["metrics before"] = state
        packed, unpack = pack(sums)
        leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
        with tf.control_dependencies(leaves):  # at the end of the data, nothing is to be counted
            gradients, reduced = sum_gradients(gradients, rows, packed, weights)
        sums = unpack(reduced)
        count = sums.get("count", 1.0)
        loss = (whole | sums)["loss"] if "total" not in sums else tf.math.divide_no_nan(sums["total"], count)
        step_values = {"loss": loss}
        if training:
            step_values["learning_rate"] = tf.cast(self.optimizer.learning_rate, tf.float32)
            self._assign_state(sums)
            share = tf.math.divide_no_nan(1.0, count * factor) if "total" in sums else None
            self._apply(gradients, share)

        def track_losses():
            if self._loss_tracker is not None:
                over = count if self.mean_over == "values" and "count" in sums else sums["examples"]
                self._loss_tracker.update_state(loss, sample_weight=over)
            for tracker, value in zip(self._loss_trackers(), sums.get("losses", []), strict=False):
                # In a graph Keras does not know how many examples a batch has, and weighs all batches alike.
                tracker.update_state(value, sample_weight=sums["examples"] if self.run_eagerly else None)

        before = whole.get("metrics") or (state if gathers else sums["metrics before"])
        now = [old + new for old, new in zip(before, sums["metrics"], strict=True)]
        with no_strategy(), keras.StatelessScope(list(zip(metric_variables, now, strict=True))) as scope:
            track_losses()
            logs = self.get_metrics_result() if self._metrics_add_up() else self.compute_metrics(*whole["batch"])
            logs = flat(logs)
        for variable in metric_variables:  # reading one gives the sum over replicas, so the first holds it all
            value = scope.get_current_value(variable)
            keeps = is_first | is_shared(variable)
            local_value(variable).assign(tf.where(keeps, value, tf.zeros_like(value)))
        if not gathers:
            with no_strategy(), keras.StatelessScope(list(zip(metric_variables, sums["metrics"], strict=True))):
                track_losses()
                step_values |= {name: value for name, value in self.get_metrics_result().items() if name != "loss"}
        return logs | {f"step/{name}": value for name, value in step_values.items()} | {"stop": sums["stop"]}

    def _apply(self, gradients, share):
        """The optimizer's step, with gradients of the whole batch."""
        if not self.trainable_variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        if share is not None:
            gradients = {index: gradient * tf.cast(share, gradient.dtype) for index, gradient in gradients.items()}
        with on_local_copies(self.optimizer, self.trainable_variables):
            variables = self.trainable_variables
            whole = [gradients.get(str(index)) for index in range(len(variables))]
            self.optimizer.apply_gradients(zip(whole, variables, strict=True))

    def _assign_state(self, sums):
        """Updates this replica's copies of what layers have changed, by the mean change over the batch's examples."""
        variables = self.trainable_variables + self.non_trainable_variables
        for index, total in sums["state"].items():
            change = tf.math.divide_no_nan(total, sums["examples"])
            variable = local_value(variables[int(index)])
            value = _wide(tf.convert_to_tensor(variable))
            change = change if variable.dtype.is_floating else tf.round(change)
            variable.assign(tf.cast(value + tf.cast(change, value.dtype), variable.dtype))

    def _in_parts(self, weights, state, data, scale, factor, training):
        """See `_part`; gradients and sums are added up over the `accumulate` parts of this replica's batch."""
        compute = self._part
        if self.jit_compile:
            if self._jitted is None:
                self._jitted = tf.function(self._part, autograph=False, jit_compile=True)
            compute = self._jitted

        def part(number, own):
            at_least_one = with_an_example(own[0])
            found = compute(weights, self._untrained_values(number), state, own, at_least_one, scale, factor, training)
            gradients, rows, sums, whole = found
            if at_least_one is not own[0]:
                changes = gradients, rows, sums["state"]
                gradients, rows, sums["state"] = zeros_without_examples(count_examples(own[0]), changes)
            return gradients, rows, sums, whole

        if self.accumulate == 1 or not training:
            return part(0, data)
        told = f"accumulate = {self.accumulate} does not divide a replica's part of a batch"
        size = tf.cast(count_examples(data[0]), tf.int32)
        if (first_input(data[0]).shape[0] or 0) % self.accumulate:
            raise ValueError(told)
        with tf.control_dependencies([tf.debugging.assert_equal(size % self.accumulate, 0, told)]):
            parts = keras.tree.map_structure(
                lambda t: None if t is None else tf.reshape(t, [self.accumulate, -1, *tf.unstack(tf.shape(t))[1:]]),
                data,
            )

        @tf.function(autograph=False)
        def numbered_part(number):
            own = keras.tree.map_structure(lambda t: None if t is None else t[number], parts)
            gradients, rows, *rest = part(number, own)
            return add_rows(gradients, rows, weights), {}, *rest

        def add(totals, number):
            with tf.control_dependencies(tf.nest.flatten(totals)):  # else the parts are computed at the same time
                number = tf.identity(number)
            return tf.nest.map_structure(tf.add, totals, numbered_part(number))

        first, rest = numbered_part(tf.constant(0)), tf.range(1, self.accumulate)
        return tf.foldl(add, rest, initializer=first, parallel_iterations=1)

    def _part(self, weights, others, state, data, at_least_one, scale, factor, training):
        """Computes a part of a batch, without changing any variable.

        Args:
            weights, others, state: values of the model's trained and other variables, and of its metrics'.
            data: (x, y, sample_weight).
            at_least_one: x or, if it is empty, one example; see `with_an_example`.
            scale, factor: multiply the loss whose gradient is taken, `factor` only a single loss.
            training: whether to train, not evaluate.

        Returns:
            Four dicts: dense gradients and rows, as `Uses.gradients` returns; what adds up over replicas; and, where
            needed, what is the same on all of them: `loss`, `batch`, and `metrics`, values of their variables.
        """
        x, y, sample_weight = data
        use_global_seed(self)
        variables = [*self.trainable_variables, *self.non_trainable_variables, self.global_seed_generator.state]
        metric_variables = self._metric_variables()
        mapping = list(zip(variables, [*weights, *others], strict=True))
        mapping += [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metric_variables]
        examples = count_examples(x)
        sums, whole = {"examples": examples}, {}
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            with Uses(mapping, self.trainable_variables if training else [], tape, collect_losses=True) as scope:
                given = dict(scope.state_mapping)
                y_pred = self._predicted(x, at_least_one, training)
                self.update_counts(x, y, sample_weight)
                if self._compile_metrics is not None and self._metrics_add_up():
                    self._compile_metrics.update_state(y, y_pred, sample_weight)
                added = self._added_losses(scope)
                parts = self._loss_parts(y, y_pred, sample_weight) if self._loss_adds_up() else []
                if len(parts) == 1 and not added:
                    ((total, count, weight),) = parts
                    total *= weight
                    sums |= {"total": total} | ({} if count is None else {"count": count})
                    objective = total * tf.cast(scale * factor, total.dtype)
            if "total" not in sums:
                self._refuse_if_pure("several losses, or with add_loss or a regulariser")
                if self._loss_adds_up():
                    sums["loss"], sums["losses"] = self._sum_of_losses(examples, parts, added)
                    objective = sums["loss"]
                else:
                    share = tf.math.divide_no_nan(examples, sum_over_replicas(examples))
                    added = self._summed(share, added)
                    whole["loss"], whole["metrics"], updates = self._own_loss(
                        mapping, weights, state, data, y_pred, added, share, training
                    )
                    scope.state_mapping |= updates
                    objective = whole["loss"]
                objective *= tf.cast(scale, objective.dtype)
        gradients, rows = scope.gradients(objective) if training else ({}, {})
        after = scope.state_mapping
        sums["state"] = {
            str(index): tf.cast(_wide(after[id(variable)]) - _wide(given[id(variable)]), tf.float32) * examples
            for index, variable in enumerate(variables)
            if after[id(variable)] is not given[id(variable)] and variable.name != "seed_generator_state"
        }
        sums["metrics"] = self._metric_sums(given, after)
        if not self._metrics_add_up():
            whole["batch"] = (gather(x) if self._has_own("compute_metrics") else x, *gather((y, y_pred, sample_weight)))
        return gradients, rows, sums, whole

    def _untrained_values(self, part):
        """Values of the variables that are not trained, and of Keras's seed, for one part of one replica's batch."""
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        # This counts every step: `iterations` counts updates, of which `gradient_accumulation_steps` steps share one.
        steps = 0 if optimizer is None else optimizer._iterations
        count = tf.cast(steps, tf.int64) * self.accumulate + tf.cast(part, tf.int64)
        seeds = {id(variable): seed for variable, seed in noise_seeds(self, count)}
        return [
            seeds[id(variable)] if id(variable) in seeds else tf.convert_to_tensor(variable.value)
            for variable in [*self.non_trainable_variables, self.global_seed_generator.state]
        ]

    def _predicted(self, x, at_least_one, training):
        """The outputs for this replica's examples, computed from `at_least_one`."""
        examples, known, before = count_examples(x), at_least_one is x, dict(vars(self))
        fused = contextlib.nullcontext() if self.jit_compile else fuse_gelu()  # XLA fuses all of it there
        with forward_pass(None if known else examples > 0), fused:
            y_pred = self(at_least_one, training=training) if self._call_has_training_arg else self(at_least_one)
        noted = [n for n, value in vars(self).items() if isinstance(value, tf.Tensor) and value is not before.get(n)]
        if noted and self._has_own("compute_loss") and replicas() > 1:
            raise ValueError(
                f"call notes {noted[0]}, of one replica's examples, and compute_loss is of the whole batch: return it "
                "from call, for the replicas to gather, or use add_loss in call"
            )
        return y_pred if known else outputs_of_examples(y_pred, examples)


def flat(logs: dict) -> dict:
    """Logs as Keras's callbacks see them: dicts in them, as from metrics with several results, are flattened."""
    pairs = [flat(value).items() if isinstance(value, dict) else [(name, value)] for name, value in logs.items()]
    return {name: value for part in pairs for name, value in part}


def _wide(value):
    """A number from which another can be subtracted; float32 may not tell a large count from the next."""
    return value if value.dtype.is_floating else tf.cast(value, tf.int64)
