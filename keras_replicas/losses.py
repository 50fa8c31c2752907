# SPDX-License-Identifier: Apache-2.0
"""A batch's loss: the sum of what each replica has, or computed from what all replicas gather; and what adds up."""

import inspect
import sys
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.errors import UserError
from keras_replicas.origins import SAME_ON_REPLICAS
from keras_replicas.outputs import gather_around
from keras_replicas.private import TensorFlowTrainer, get_keras_mask, reduce_weighted_values
from keras_replicas.replicas import gather, no_strategy, replicas, sum_over_replicas

# Keras's losses that compare a batch's examples with each other, or sum over all of them before they divide. Hinge
# losses look at all labels: where each is 0 or 1, they take 0 for -1.
BATCHWISE_NAMES = ("Circle", "Dice", "Tversky", "circle", "dice", "tversky", "Hinge", "SquaredHinge")
BATCHWISE = {getattr(keras.losses, name) for name in (*BATCHWISE_NAMES, "hinge", "squared_hinge")}
BATCHWISE |= {keras.metrics.Hinge, keras.metrics.SquaredHinge}
# Classes that compute what a function does which they are given.
WRAPPERS = {keras.losses.MeanSquaredError.__base__, keras.metrics.MeanMetricWrapper}
KERAS_OWN = WRAPPERS.union(
    each for module in (keras.losses, keras.metrics) for each in vars(module).values() if callable(each)
)
KERAS_OWN -= BATCHWISE | {keras.losses.Loss, keras.metrics.Metric}
# What a subclass may define and still compute what its base class does.
HARMLESS = {"__init__", "__doc__", "__module__", "__repr__", "get_config", "from_config"}
HARMLESS |= {"reset_state", "result"}  # of a metric, whose variables add up
HARMLESS |= {"__firstlineno__", "__static_attributes__"}  # which Python 3.13 gives every class


class BatchLoss(TensorFlowTrainer):
    """A model's compiled losses, `add_loss`, regularisers and metrics, for `keras_replicas.step`."""

    accumulate: int
    _call_findings: dict[str, Any]
    _has_outputs_of_one_axis: bool | None = None  # whose loss Keras's losses average over the examples themselves
    _compiling = False  # while XLA compiles a pass
    _compiled_without = ""

    def _compiled_losses(self) -> list[Any]:
        """Keras's records of the compiled losses, each with its `loss` and `loss_weights`."""
        return [] if self._compile_loss is None else self._compile_loss._flat_losses or []

    def _loss_by_sums(self, y, y_pred, sample_weight):
        """The sum of the only loss over this replica's examples, and this replica's part of its divisor."""
        (record,), found = self._compiled_losses(), list[tuple]()

        def note(*given):
            found.append(given)
            return 0.0

        self._compile_loss._flat_losses = [record._replace(loss=note)]
        try:  # Keras finds the loss's part of y
            self._compile_loss(y, y_pred, sample_weight)
        finally:
            self._compile_loss._flat_losses = [record]
        total, divisor = loss_sum(record.loss, *found[0])
        return total * (1.0 if record.loss_weights is None else record.loss_weights), divisor

    def _gathered_loss(self, scope, data, y_pred, added, examples, training):
        """The loss of all replicas' examples, computed by any code. Every replica computes it.

        Args:
            scope: `OwnState`, in which it is computed, with the metrics that it may update.
            data: this replica's (x, y, sample_weight).
            y_pred: its outputs, through which gradients flow.
            added: its terms of `add_loss` and regularisers: scalars, or values for each example.
            examples: their number.
            training: whether to train, not evaluate.

        Returns:
            The loss; and this replica's share of the examples.
        """
        x, y, sample_weight = data
        own, total = (tf.cast(each, tf.float64) for each in (examples, sum_over_replicas(examples)))
        share = tf.math.divide_no_nan(own, total)
        if replicas() > 1:
            x = gather(x) if self._overrides("compute_loss") else x
            y, sample_weight, y_pred = gather(y), gather(sample_weight), gather_around(y_pred)
        # Values of examples are added up. A number counts as a mean over examples, unless it was found to be a sum.
        found = self._call_findings.get("train_step" if training else "test_step")
        kinds = found.losses if found is not None and len(found.losses) == len(added) else ["mean"] * len(added)
        is_sum = [kind == "sum" or term.shape.rank for kind, term in zip(kinds, added, strict=True)]
        shares = [tf.sign(share) if each else share for each in is_sum]
        mine = [
            tf.math.multiply_no_nan(tf.reduce_sum(term), tf.cast(share_of_term, term.dtype))
            for term, share_of_term in zip(added, shares, strict=True)
        ]
        totals = sum_over_replicas(mine)
        with tf.name_scope(SAME_ON_REPLICAS):
            added = [term + tf.stop_gradient(total - term) for term, total in zip(mine, totals, strict=True)]
        with no_strategy(), scope:
            self._losses_override = added
            try:
                loss = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
            finally:
                self._losses_override = []
        return loss, share

    def _metric_sums(self, given, after):
        """What this replica's examples add to the variables of metrics; nothing for those that track losses."""
        trackers = filter(None, [self._loss_tracker, *self._loss_trackers()])
        of_losses = {id(variable) for tracker in trackers for variable in tracker.variables}
        owner = {id(variable): metric for metric in self.metrics for variable in metric.variables}
        sums = []
        for variable in self._metric_variables():
            value = after[id(variable)]
            if id(variable) in of_losses:
                value = given[id(variable)]
            elif value is not given[id(variable)]:
                metric = owner[id(variable)]
                if not all(map(metric_adds_up, getattr(metric, "metrics", None) or [metric])):
                    raise UserError(f"a layer updates the metric {metric.name}: update it in compute_metrics instead")
            sums.append(value)
        return sums

    def _metric_variables(self):
        metrics = [self._loss_tracker, *self._loss_trackers(), *self.metrics]
        return list({id(v): v for metric in filter(None, metrics) for v in metric.variables}.values())

    def _loss_trackers(self):
        return self._compile_loss.metrics if self._compile_loss is not None else []

    def _overrides(self, method, base=TensorFlowTrainer):
        return getattr(type(self), method) is not getattr(base, method)

    def _one_loss_adds_up(self):
        losses = [each.loss for each in self._compiled_losses()]
        if not self._overrides("compute_loss") and any(loss.reduction in (None, "none") for loss in losses):
            raise UserError("a loss without a reduction is no single number: give it a reduction, such as 'sum'")
        is_own = self._overrides("compute_loss") or self._has_outputs_of_one_axis
        return not is_own and len(losses) == 1 and loss_adds_up(losses[0])

    def _metrics_add_up(self):
        metrics = [] if self._compile_metrics is None else self._compile_metrics.metrics
        is_own = self._overrides("compute_metrics") or self._has_outputs_of_one_axis
        return not is_own and all(map(metric_adds_up, metrics))

    def _needs_all_replicas(self, what):
        """Called where a pass needs the other replicas' examples; `what` it would need to do without.

        Raises:
            ValueError: when the pass computes a slice of a replica's examples.
            NotCompilable: when XLA compiles the pass.
        """
        if self.accumulate > 1:
            raise UserError(f"accumulate needs {what}: set accumulate = 1")
        if self._compiling and replicas() > 1:
            self._compiled_without = what  # not in the error, to which Keras adds words
            raise NotCompilable


def variables_of_losses(model: Any) -> list[keras.Variable]:
    """The variables that compiled losses keep, as a moving average; Keras does not count them among the model's."""
    compiled = model._compile_loss
    records = [] if compiled is None else compiled._flat_losses or []
    values = [value for record in records for value in vars(record.loss).values()]
    return list({id(value): value for value in values if isinstance(value, keras.Variable)}.values())


class NotCompilable(Exception):
    """XLA would compile one replica's pass, but this pass needs the other replicas."""


def loss_adds_up(loss: keras.losses.Loss) -> bool:
    """Whether a loss is a sum over examples, divided once: one of Keras's, or one whose `adds_up` is true."""
    return getattr(loss, "adds_up", False) or _is_keras_own(loss, getattr(loss, "fn", None))


def metric_adds_up(metric: keras.metrics.Metric) -> bool:
    """Whether a metric's variables are sums over examples: one of Keras's, or one whose `adds_up` is true."""
    return getattr(metric, "adds_up", False) or _is_keras_own(metric, getattr(metric, "_fn", None))


def _is_keras_own(thing, function) -> bool:
    """Whether it computes what one of Keras's classes does that compare no examples with each other.

    It may be of a subclass that overrides nothing but `HARMLESS` names. What others compute, nobody can know.
    """
    bases = type(thing).__mro__
    hub = sys.modules.get("keras_hub")
    of_keras = KERAS_OWN | ({hub.metrics.Perplexity} if hub else set())
    known = next((base for base in bases if base in of_keras), None)
    if known is None or (known in WRAPPERS and not (inspect.isfunction(function) and function in KERAS_OWN)):
        return False
    defined = {name for base in bases[: bases.index(known)] for name in vars(base)}
    if any(hasattr(known, name) for name in defined - HARMLESS):
        return False
    return (getattr(thing, "_fn_kwargs", None) or {}).get("axis", -1) == -1  # another may be that of the examples


def loss_sum(loss: keras.losses.Loss, y_true, y_pred, sample_weight) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of a loss's values, and what this replica adds to the divisor of all replicas' sum; two scalars.

    The divisor is the number of values, of unmasked values, or the sum of the weights, as the loss's `reduction` says;
    0 where it divides by nothing.
    """
    in_mask = get_keras_mask(y_pred)
    y_true, y_pred = keras.tree.map_structure(
        lambda t: keras.ops.convert_to_tensor(t, dtype=loss.dtype), (y_true, y_pred)
    )
    values = loss.call(y_true, y_pred)
    masks = [mask for mask in (in_mask, get_keras_mask(values)) if mask is not None]
    mask = tf.cast(masks[0] & masks[-1], loss.dtype) if masks else None
    total = tf.reduce_sum(reduce_weighted_values(values, sample_weight, mask, "sum", loss.dtype))
    divisor = tf.cast(tf.size(values), total.dtype)
    if loss.reduction == "sum":
        divisor *= 0
    elif loss.reduction == "mean_with_sample_weight":
        weights = mask if sample_weight is None else tf.convert_to_tensor(sample_weight)
        if weights is not None:  # each weight as Keras merges it with the mask
            divisor = reduce_weighted_values(tf.ones_like(weights), sample_weight, mask, "sum", loss.dtype)
    elif mask is not None:
        divisor *= tf.math.divide_no_nan(tf.reduce_sum(mask), tf.cast(tf.size(mask), mask.dtype))
    return total, tf.cast(divisor, total.dtype)
