# SPDX-License-Identifier: Apache-2.0
"""The forward pass of one replica, with its own copies of what layers update, and its own noise."""

import tensorflow as tf

from keras_replicas.empty import forward_pass
from keras_replicas.errors import UserError
from keras_replicas.losses import BatchLoss
from keras_replicas.noise import noise_seeds, use_global_seed
from keras_replicas.origins import EXAMPLES, first_local, origins_of
from keras_replicas.replicas import is_first_replica, is_shared, local_value, replicas
from keras_replicas.state import OwnState, aggregation_of, part_of_state, same_everywhere


class Forward(BatchLoss):
    """For the passes in `passes.py`, and for predictions."""

    def _predicted(self, x, has_examples, training):
        """The model's outputs for `x`, which may be another replica's example: `has_examples` is then a tensor."""
        before, options = dict(vars(self)), {"training": training} if self._call_has_training_arg else {}
        try:
            with forward_pass(has_examples):
                y_pred = self(x, **options)
        except RuntimeError as error:
            if "Mixing different tf.distribute" not in str(error):
                raise
            raise UserError(
                "call updates a tf.Variable, which replicas do not know how to combine: make it with "
                "add_weight(..., aggregation='sum'), 'mean' or 'only_first_replica', or use one replica"
            ) from None
        noted = [n for n, value in vars(self).items() if isinstance(value, tf.Tensor) and value is not before.get(n)]
        # In a graph, `_refuse_local` finds what is used.
        if noted and tf.executing_eagerly() and self._overrides("compute_loss") and replicas() > 1:
            raise self.refused(_of_one_replica(f"{self.name}.{noted[0]}", "the loss"))
        return y_pred

    def _refuse_local(self, results, what, data, operations):
        """Refuses a result for all examples that is computed from what `call` has kept of one replica's.

        Its value would be that of one replica, and its gradient would be lost.

        Args:
            results: tensors that are to be the same on all replicas.
            what: they are, for the message.
            data: this replica's examples.
            operations: of `operations_so_far`, before the results were computed.

        Raises:
            UserError: when a result depends on this replica's examples, but for what was gathered or summed.
        """
        origins = origins_of(data)
        if origins is None or replicas() == 1:
            return
        for result in results:
            if isinstance(result, tf.Tensor) and EXAMPLES in origins.of(result):
                kept = first_local(result, origins, operations)
                raise self.refused(_of_one_replica(_name_of(kept, self), what))

    def _copies(self):
        return {id(variable): local_value(variable) for variable in self._model_variables()}

    def _own_state(self, copies, number, metrics, data):
        """The scope of a pass, with the seeds of its noise; `data` are this replica's examples."""
        use_global_seed(self)
        for variable, seed in noise_seeds(self, number):
            if is_shared(variable):
                copies = {each: copy for each, copy in copies.items() if each != id(variable)}
                metrics = [*metrics, (variable, seed)]
            else:
                copies[id(variable)].assign(seed)
        left_out = {id(variable) for variable in self.trainable_variables} | self._same_everywhere()
        before = {each: tf.convert_to_tensor(copy) for each, copy in copies.items() if each not in left_out}
        return OwnState(metrics, copies, before, origins_of(data), collect_losses=True)

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
            is_seed = variable.name == "seed_generator_state"  # whose old value counts calls
            if key in same or not (is_seed or key in scope.differs):
                continue
            copy, old = scope.copies[key], scope.before[key]
            if not alone and not is_seed:
                new, aggregation = tf.convert_to_tensor(copy), aggregation_of(variable, self)
                state[indices[key]] = part_of_state(aggregation, new, old, examples, is_first)
            if not alone or is_seed:
                copy.assign(old)
        return state

    def _model_variables(self):
        return [*self.trainable_variables, *self.non_trainable_variables, self.global_seed_generator.state]

    def _number_of_slice(self, slice_number, training):
        """A number for each slice of each step, of which its random draws are a function."""
        counter = self.step_counter
        step = counter.training_step() if training else counter.evaluation_step()
        return step * self.accumulate + tf.cast(slice_number, tf.int64)


def _of_one_replica(name: str, what: str) -> str:
    return (
        f"call keeps {name}, which is about one replica's examples, but {what} is about those of all replicas. Return "
        "it from call: outputs are gathered; or use add_loss in call"
    )


def _name_of(tensor, model) -> str:
    """Where a layer keeps a tensor or, if none does, the layer that computes it."""
    for layer in model._flatten_layers():
        for attribute, value in sorted(vars(layer).items(), key=lambda item: isinstance(item[1], dict | list | tuple)):
            if any(each is tensor for each in _tensors_in(value)):
                return f"{layer.name}.{attribute}"
    scopes = [part for part in tensor.op.name.split("/")[:-1] if not part.startswith("replica_")]
    return f"a tensor of {'/'.join(scopes) or tensor.op.name}"


def _tensors_in(value):
    """The tensors of an attribute, and of lists, tuples and dicts in it."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors_in(each)]
    return [value] if isinstance(value, tf.Tensor) else []
