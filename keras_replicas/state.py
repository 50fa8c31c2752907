# SPDX-License-Identifier: Apache-2.0
"""What layers keep and update themselves, beside weights: what its value is after a step of several replicas.

`add_weight(aggregation=...)` says it. "sum": changes are added up, as of a counter. "mean": the mean over examples, as
of a moving average. "only_first_replica": as the first one has it.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_replicas.errors import UserError
from keras_replicas.replicas import local_value

MOMENTS = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")
# State that is the same on all replicas: it comes of the whole batch's moments, or of weights alone.
SAME_EVERYWHERE = {
    keras.layers.BatchNormalization: MOMENTS,
    keras.layers.SpectralNormalization: ("vector_u", "kernel"),
}


class OwnState(keras.StatelessScope):
    """While it lasts, layers read and update this replica's own copies of their variables, and nothing reduces.

    Seeds and the variables of metrics have the values that are given, as in `keras.StatelessScope`.

    Args:
        mapping: values of variables, as of `keras.StatelessScope`.
        copies: of a model's variables, by `id`.
        before: values of copies that may be updated in a branch of a `tf.cond`, by `id`; others are added.
        origins: of this replica's examples, by which it is found what may differ; None where that is not known.

    Attributes:
        given: the values at the beginning, by `id`.
        copies, before: as given.
        changed: the variables that were updated, by `id`.
    """

    def __init__(self, mapping, copies, before=None, origins=None, **kwargs):
        super().__init__(mapping, **kwargs)
        self.given, self.copies = dict(self.state_mapping), copies
        self.before = {} if before is None else before
        self.changed: dict[int, keras.Variable] = {}
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._origins = origins
        self.differs: set[int] = set()  # of the variables that were updated, those whose copies may differ
        self._lost: dict[int, keras.Variable] = {}  # that were updated, and are none of the model's, by `id`

    def add_update(self, update):
        """Keeps an update in this replica's copy, as a `tf.cond` or a loop may do it; without a copy, in the scope."""
        variable, value = update
        copy = self.copies.get(id(variable))
        if copy is None:
            if id(variable) not in self.given:
                self._lost[id(variable)] = variable
            super().add_update(update)
            return
        if id(variable) not in self.before:
            if self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph:
                raise UserError(
                    f"{variable.path} is trained, and call updates it in a tf.cond or a loop: do it outside"
                )
            self.before[id(variable)] = tf.convert_to_tensor(copy)
        if self._may_differ(variable, value):
            self.differs.add(id(variable))
        copy.assign(value)
        self.changed[id(variable)] = variable

    def _may_differ(self, variable, value):
        """Whether replicas may give different values to a variable. What comes of weights alone is the same on all."""
        if variable.aggregation != "none" or self._origins is None:
            return True
        return bool(self._origins.of(value))

    def refuse_lost_updates(self) -> None:
        """Refuses updates of variables that are none of the model's: nothing would keep them.

        Raises:
            UserError: when there are some.
        """
        for variable in self._lost.values():
            if variable.name != "seed_generator_state":
                raise UserError(
                    f"{variable.path} is updated in each step, but is no variable of the model: make it by a layer's "
                    "add_weight"
                )

    def undo_metrics(self, unless: tf.Tensor) -> None:
        """Gives the variables of metrics their first values again, unless a condition holds.

        By selection: what layers have added to a metric may be NaN.
        """
        for key, before in self.given.items():
            if self.state_mapping[key] is not before:
                now = tf.convert_to_tensor(self.state_mapping[key])
                self.state_mapping[key] = tf.where(unless, now, tf.cast(before, now.dtype))

    def get_current_value(self, variable):
        """The value of this replica's copy; without a copy, the scope's."""
        copy = self.copies.get(id(variable))
        if copy is None:
            return super().get_current_value(variable)
        value = tf.convert_to_tensor(copy)
        if id(variable) in self.differs and self._origins is not None:
            self._origins.add_examples(value)
        return value


def aggregation_of(variable: keras.Variable, model: keras.Model) -> str:
    """What a layer's variable says of itself.

    Raises:
        ValueError: when it says nothing, and nothing is known of it.
    """
    if id(variable) in same_everywhere(model):
        return "only_first_replica"
    if variable.aggregation != "none":
        return variable.aggregation
    raise UserError(aggregation_needed(variable.path))


def aggregation_needed(name: str) -> str:
    """What to do where nobody knows how replicas combine a variable of that name."""
    return (
        f"{name} is updated in each step, from one replica's examples: say how replicas combine it, by "
        "add_weight(..., aggregation='sum') for a counter, 'mean' for a moving average, or 'only_first_replica', in a "
        "subclass if the layer is not your own; or use one replica"
    )


def same_everywhere(model: keras.Model) -> set[int]:
    """The variables, by `id`, to which all replicas give the same value: of the global moments, or of weights alone."""
    found = set()
    for layer in model._flatten_layers():
        for kind, names in SAME_EVERYWHERE.items():
            if isinstance(layer, kind):
                found |= {id(getattr(layer, name, None)) for name in names}
    return found


def part_of_state(aggregation: str, new: tf.Tensor, old: tf.Tensor, examples: tf.Tensor, is_first: tf.Tensor) -> Any:
    """What a replica has of a variable's new value, to be added up."""
    if aggregation == "sum":
        return new - old
    if aggregation == "mean":
        return _wide(new) * tf.cast(examples, _wide(new).dtype)
    new = tf.cast(new, tf.int32) if new.dtype == tf.bool else new
    return tf.where(is_first, new, tf.zeros_like(new))


def assign_state(aggregation: str, variable: keras.Variable, total: tf.Tensor, examples: tf.Tensor) -> None:
    """Gives this replica's copy of a variable what all replicas' parts add up to."""
    assign_copy(aggregation, local_value(variable), total, examples)


def assign_copy(aggregation: str, copy: tf.Variable, total: tf.Tensor, examples: tf.Tensor) -> None:
    """Gives a replica's copy of a variable what all replicas' parts add up to."""
    if aggregation == "sum":
        copy.assign_add(total)
    elif aggregation == "mean":
        mean = total / tf.cast(examples, total.dtype)
        copy.assign(tf.cast(mean if copy.dtype.is_floating else tf.round(mean), copy.dtype))
    else:
        copy.assign(tf.cast(total, copy.dtype))


def _wide(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.float32 if value.dtype in (tf.float32, tf.float16, tf.bfloat16) else tf.float64)
