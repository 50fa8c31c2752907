# SPDX-License-Identifier: Apache-2.0
"""The whole batch's loss and metrics: sums of what each replica has, or computed from what all replicas gather."""

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses.loss import apply_mask, reduce_weighted_values, squeeze_or_expand_to_same_rank

from keras_replicas.gradients import Stateless
from keras_replicas.replicas import gather, gather_around, no_strategy, replicas, sum_over_replicas

# Keras's losses that compare a batch's examples with each other, or sum over all of them before dividing.
BATCHWISE = ("circle", "dice", "tversky")


class BatchLoss(TensorFlowTrainer):
    """A model's compiled losses, `add_loss`, regularisers and metrics, for `keras_replicas.step`.

    Keras's own losses and metrics add up over replicas. Others are computed on every replica, from the gathered batch.
    """

    def _loss_parts(self, y, y_pred, sample_weight):
        """The `loss_parts` and the weight of every compiled loss."""
        if self._compile_loss is None:
            return []
        parts, losses = [], self._compile_loss._flat_losses

        def noting(each):
            def note(*batch):
                total, count = loss_parts(each.loss, *batch)
                parts.append((total, count, 1.0 if each.loss_weights is None else each.loss_weights))
                return total

            return each._replace(loss=note)

        self._compile_loss._flat_losses = [noting(each) for each in losses]  # Keras finds each one's part of y
        try:
            self._compile_loss(y, y_pred, sample_weight)
        finally:
            self._compile_loss._flat_losses = losses
        return parts

    def _sum_of_losses(self, examples, parts, added):
        """This replica's part of the whole batch's loss, and of each compiled loss."""
        counts = [tf.constant(1.0) if count is None else count for _, count, _ in parts]
        all_examples, counts = sum_over_replicas((examples, counts))
        losses = [
            total if own is None else tf.math.divide_no_nan(total, count)
            for (total, own, _), count in zip(parts, counts, strict=True)
        ]
        share = tf.math.divide_no_nan(examples, all_examples)
        terms = [loss * weight for loss, (_, _, weight) in zip(losses, parts, strict=True)]
        terms += [tf.math.multiply_no_nan(loss, share) for loss in added]
        if not terms:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        return tf.add_n(terms), losses

    def _summed(self, share, added):
        """Terms of `add_loss` with the whole batch's value, and this replica's share of the gradient."""
        own = [tf.math.multiply_no_nan(loss, share) for loss in added]
        return [part + tf.stop_gradient(total - part) for part, total in zip(own, sum_over_replicas(own), strict=True)]

    def _own_loss(self, mapping, weights, state, data, y_pred, added, share, training):
        """The whole batch's loss, computed by any code, and what that updates. Every replica computes it all.

        Gradients flow through this replica's predictions. Those that reach weights in another way are multiplied by its
        share of the examples, so that the sum over replicas is the gradient of the whole batch.

        Returns:
            The loss; the values of the metrics' variables after it; and the new values of other variables, by `id`.
        """
        x, y, sample_weight = data

        @tf.custom_gradient
        def shared(weight):
            return tf.identity(weight), lambda gradient: tf.convert_to_tensor(gradient) * tf.cast(share, weight.dtype)

        metric_variables = self._metric_variables()
        weights_shared = zip(self.trainable_variables, map(shared, weights), strict=True)
        rest = mapping[len(weights) : len(mapping) - len(state)]
        if replicas() > 1:
            x = gather(x) if self._has_own("compute_loss") else x
            y, sample_weight, y_pred = gather(y), gather(sample_weight), gather_around(y_pred)
        scope = Stateless([*weights_shared, *rest, *zip(metric_variables, state, strict=True)])
        given = {id(variable): scope.get_current_value(variable) for variable, _ in rest}
        with no_strategy(), scope:
            self._losses_override = added
            try:
                loss = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
            finally:
                self._losses_override = []
        updates = {name: scope.state_mapping[name] for name in given if scope.state_mapping[name] is not given[name]}
        return loss, [scope.get_current_value(variable) for variable in metric_variables], updates

    def _added_losses(self, scope):
        """Terms of `add_loss`, `activity_regularizer`s (in Keras a mean over examples) and regularisers."""
        terms = [*scope.losses, *self._get_regularization_losses()]
        return [tf.cast(tf.reduce_sum(term), keras.config.floatx()) for term in terms]

    def _metric_sums(self, given, after):
        """What a part of a batch adds to the variables of metrics; nothing for those that track losses."""
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
                    raise ValueError(f"{metric.name} is updated in a layer, of which a replica sees a part")
            sums.append(value)
        return sums

    def _metric_variables(self):
        metrics = [self._loss_tracker, *self._loss_trackers(), *self.metrics]
        return list({id(v): v for metric in filter(None, metrics) for v in metric.variables}.values())

    def _loss_trackers(self):
        return self._compile_loss.metrics if self._compile_loss is not None else []

    def _has_own(self, method):
        return getattr(type(self), method) is not getattr(TensorFlowTrainer, method)

    def _loss_adds_up(self):
        losses = [] if self._compile_loss is None else self._compile_loss._flat_losses
        if not self._has_own("compute_loss") and any(each.loss.reduction in (None, "none") for each in losses):
            raise ValueError("a loss without a reduction is not a number to minimise: give it one, such as sum")
        return not self._has_own("compute_loss") and all(loss_adds_up(each.loss) for each in losses)

    def _metrics_add_up(self):
        metrics = [] if self._compile_metrics is None else self._compile_metrics.metrics
        return not self._has_own("compute_metrics") and all(map(metric_adds_up, metrics))

    def _refuse_if_pure(self, what):
        if self.accumulate > 1 or (self.jit_compile and replicas() > 1):
            way = "accumulate" if self.accumulate > 1 else "jit_compile"
            raise ValueError(
                f"{what} needs the whole batch, of which {way} gives each replica a part at a time: leave out {way}"
            )


def loss_adds_up(loss: keras.losses.Loss) -> bool:
    """Whether a loss is a sum over examples, divided once: one of Keras's, or one whose `adds_up` is true."""
    return getattr(loss, "adds_up", False) or _is_keras_sum(loss, getattr(loss, "fn", type(loss)))


def metric_adds_up(metric: keras.metrics.Metric) -> bool:
    """Whether a metric's variables are sums over examples: one of Keras's, or one whose `adds_up` is true."""
    return getattr(metric, "adds_up", False) or _is_keras_sum(metric, getattr(metric, "_fn", type(metric)))


def _is_keras_sum(thing, code) -> bool:
    """Whether class and code are Keras's own, and the code neither takes a mean nor compares a batch's examples."""
    own = all(each.__module__.startswith("keras.") for each in (code, type(thing)))
    if (getattr(thing, "_fn_kwargs", None) or {}).get("axis", -1) != -1:  # maybe that of the examples
        return False
    return own and not isinstance(code, keras.losses.Loss) and code.__name__.lower() not in BATCHWISE


def loss_parts(loss: keras.losses.Loss, y_true, y_pred, sample_weight) -> tuple[tf.Tensor, tf.Tensor | None]:
    """One replica's part of a loss: its sum, and its part of the divisor of the sum over replicas, or None.

    The divisor is the number of values, of unmasked values, or the sum of the weights, as the loss's `reduction` says.
    """
    in_mask = get_keras_mask(y_pred)
    y_true, y_pred = keras.tree.map_structure(
        lambda t: keras.ops.convert_to_tensor(t, dtype=loss.dtype), (y_true, y_pred)
    )
    values = loss.call(y_true, y_pred)
    masks = [mask for mask in (in_mask, get_keras_mask(values)) if mask is not None]
    mask = tf.cast(masks[0] & masks[-1], loss.dtype) if masks else None
    total = tf.reduce_sum(reduce_weighted_values(values, sample_weight, mask, "sum", loss.dtype))
    count = tf.cast(tf.size(values), total.dtype)
    if loss.reduction == "sum":
        return total, None
    if loss.reduction == "mean_with_sample_weight":
        if sample_weight is not None:
            sample_weight = tf.cast(sample_weight, loss.dtype)
        weights = apply_mask(sample_weight, mask, values.dtype, loss.reduction)
        if weights is not None:
            count = tf.reduce_sum(squeeze_or_expand_to_same_rank(values, weights)[1])
    elif mask is not None:
        count *= tf.math.divide_no_nan(tf.reduce_sum(mask), tf.cast(tf.size(mask), mask.dtype))
    return total, tf.cast(count, total.dtype)
