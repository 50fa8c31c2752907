# SPDX-License-Identifier: Apache-2.0
"""The forward pass of one replica, with its own copies of what layers update, and its own noise."""

import tensorflow as tf

from keras_replicas.empty import count_examples, forward_pass, without_added_example
from keras_replicas.losses import BatchLoss
from keras_replicas.noise import noise_seeds, use_global_seed
from keras_replicas.replicas import is_first_replica, is_shared, local_value, replicas
from keras_replicas.state import OwnState, aggregation_of, part_of_state, same_everywhere


class Forward(BatchLoss):
    """For the passes in `passes.py`, and for predictions."""

    def _predicted(self, x, filled, training):
        """The model's outputs for this replica's examples, computed from `filled`, if that is not None."""
        has_examples, before = None if filled is None else count_examples(x) > 0, dict(vars(self))
        inputs, options = x if filled is None else filled, {"training": training} if self._call_has_training_arg else {}
        try:
            with forward_pass(has_examples):
                y_pred = self(inputs, **options)
        except RuntimeError as error:
            if "Mixing different tf.distribute" not in str(error):
                raise
            raise ValueError(
                "call updates a tf.Variable, which replicas do not know how to combine: make it with "
                "add_weight(..., aggregation='sum'), 'mean' or 'only_first_replica', or use one replica"
            ) from None
        noted = [n for n, value in vars(self).items() if isinstance(value, tf.Tensor) and value is not before.get(n)]
        if noted and self._overrides("compute_loss") and replicas() > 1:
            raise ValueError(
                f"call stores {noted[0]}, which is about one replica's examples, but compute_loss gets all examples. "
                f"Return {noted[0]} from call, which is gathered; or use add_loss in call"
            )
        return y_pred if filled is None else without_added_example(y_pred, has_examples)

    def _copies(self):
        return {id(variable): local_value(variable) for variable in self._model_variables()}

    def _own_state(self, copies, number, metrics):
        """The scope of a pass, with the seeds of its noise."""
        use_global_seed(self)
        for variable, seed in noise_seeds(self, number):
            if is_shared(variable):
                copies = {each: copy for each, copy in copies.items() if each != id(variable)}
                metrics = [*metrics, (variable, seed)]
            else:
                copies[id(variable)].assign(seed)
        left_out = {id(variable) for variable in self.trainable_variables} | self._same_everywhere()
        before = {each: tf.convert_to_tensor(copy) for each, copy in copies.items() if each not in left_out}
        return OwnState(metrics, copies, before, collect_losses=True)

    def _same_everywhere(self):
        """The variables, by `id`, whose new value on each replica stays as it is."""
        return same_everywhere(self) if self.accumulate == 1 else set()

    def _state_sums(self, scope, examples, number):
        """What this replica has of the variables that layers have updated, whose old values it puts back."""
        alone = replicas() == self.accumulate == 1  # then the new values are right
        indices = {id(variable): index for index, variable in enumerate(self._model_variables())}
        is_first, state = is_first_replica() & tf.equal(number % self.accumulate, 0), {}
        same = self._same_everywhere()
        for key, variable in scope.changed.items():
            if key in same:
                continue
            copy, old = scope.copies[key], scope.before[key]
            is_seed = variable.name == "seed_generator_state"  # whose old value counts calls
            if not alone and not is_seed:
                new, aggregation = tf.convert_to_tensor(copy), aggregation_of(variable, self)
                state[indices[key]] = part_of_state(aggregation, new, old, examples, is_first)
            if not alone or is_seed:
                copy.assign(old)
        return state

    def _model_variables(self):
        return [*self.trainable_variables, *self.non_trainable_variables, self.global_seed_generator.state]

    def _step_number(self, slice_number):
        """A number for each slice of each step."""
        optimizer = getattr(self, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        # This counts every step; `iterations` counts updates, one for `gradient_accumulation_steps` steps.
        steps = 0 if optimizer is None else optimizer._iterations
        return tf.cast(steps, tf.int64) * self.accumulate + tf.cast(slice_number, tf.int64)
