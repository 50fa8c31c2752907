# SPDX-License-Identifier: Apache-2.0
"""What is computed of the whole batch, where each replica has a part of it: losses, metrics, moments, gathered values.

Call all of it in a replica's step.
"""

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.losses.loss import apply_mask, reduce_weighted_values, squeeze_or_expand_to_same_rank

from common.training.replicas import gather_over_replicas, sum_over_replicas

# Losses of Keras that compare a batch's examples with each other, or sum over all of them before they divide.
BATCHWISE = ("circle", "dice", "tversky")


def loss_adds_up(loss: keras.losses.Loss) -> bool:
    """Whether a loss is a sum over examples, divided once: one of Keras's, or one whose `adds_up` is true."""
    code = getattr(loss, "fn", type(loss))
    return getattr(loss, "adds_up", False) or (
        code.__module__.startswith("keras.") and code.__name__.lower() not in BATCHWISE and loss.reduction is not None
    )


def metric_adds_up(metric: keras.metrics.Metric) -> bool:
    """Whether a metric's variables are sums over examples: one of Keras's, or one whose `adds_up` is true."""
    code = getattr(metric, "_fn", type(metric))
    return getattr(metric, "adds_up", False) or all(c.__module__.startswith("keras.") for c in (code, type(metric)))


def loss_parts(loss: keras.losses.Loss, y_true, y_pred, sample_weight) -> tuple[tf.Tensor, tf.Tensor | None]:
    """One replica's part of a loss: a sum, and what the sum of all replicas is to be divided by, or None.

    Divided by the number of values, of unmasked values, or by the sum of the weights, as the loss's `reduction` says.
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


def moments(inputs, mask, axes: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of the whole batch, for each channel; those of Keras's `BatchNormalization` on one device."""
    if mask is None:
        weights, epsilon = tf.ones_like(inputs), 0.0
    else:
        weights, epsilon = tf.cast(mask[..., None], inputs.dtype) * tf.ones_like(inputs), keras.config.epsilon()
        inputs = tf.where(weights > 0, inputs, 0.0)
    count = tf.reduce_sum(weights, axes, keepdims=True)
    total, count = sum_over_replicas((tf.reduce_sum(inputs, axes, keepdims=True), count))
    mean = total / (count + epsilon)
    squares = sum_over_replicas(tf.reduce_sum(weights * tf.square(inputs - mean), axes, keepdims=True))
    variance = squares / (count + epsilon)
    return tf.reshape(mean, [-1]), tf.reshape(variance, [-1])


def count_examples(x) -> tf.Tensor:
    """The number of examples in this replica's part of a batch, a float."""
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return tf.cast(first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0], tf.float32)


def gather(values: Any) -> Any:
    """The tensors of all replicas, one after another, with their masks; no gradient flows through."""

    def of_all(tensor):
        if tensor is None:
            return None
        tensor, mask = tf.convert_to_tensor(tensor), get_keras_mask(tensor)
        sent = tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else tensor  # which collectives do not gather
        whole = gather_over_replicas(tf.stop_gradient(sent))
        whole = tf.ensure_shape(tf.cast(whole, tensor.dtype), [None, *tensor.shape[1:]])
        if mask is not None:
            set_keras_mask(whole, of_all(mask))
        return whole

    return keras.tree.map_structure(of_all, values)


def gather_around(values: Any) -> Any:
    """As `gather`, but this replica's own part is the tensor itself, through which gradients flow."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    own = next(leaf for leaf in keras.tree.flatten(values) if leaf is not None)
    sizes = gather(tf.shape(own)[:1])
    start, end = tf.reduce_sum(sizes[:replica]), tf.reduce_sum(sizes[: replica + 1])

    def put(own, whole):
        if own is None:
            return None
        result = tf.concat([whole[:start], own, whole[end:]], axis=0)
        if (mask := get_keras_mask(whole)) is not None:
            set_keras_mask(result, mask)
        return result

    return keras.tree.map_structure(put, values, gather(values))


def pack(values: Any) -> tuple[list[tf.Tensor], Any]:
    """Makes one vector of the tensors in float32, of which there must be one, to be reduced at once.

    Returns:
        A list of tensors, and the function that gives the values of such a list again.
    """
    flat = tf.nest.flatten(values)
    small = [i for i, tensor in enumerate(flat) if tensor.dtype == tf.float32]
    vector = tf.concat([tf.reshape(flat[i], [-1]) for i in small], axis=0)
    packed = [vector, *[tensor for i, tensor in enumerate(flat) if i not in small]]

    def unpack(packed):
        parts = tf.split(packed[0], [flat[i].shape.num_elements() for i in small])
        large = iter(packed[1:])
        parts = {i: tf.reshape(part, flat[i].shape) for i, part in zip(small, parts, strict=True)}
        return tf.nest.pack_sequence_as(values, [parts[i] if i in parts else next(large) for i in range(len(flat))])

    return packed, unpack


@tf.custom_gradient
def with_share_of_gradient(value: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """The value; its gradient times the share."""
    return tf.identity(value), lambda gradient: (gradient * tf.cast(share, gradient.dtype), None)


def replicas() -> int:
    """The number of replicas."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def sum_of_all(values: Any) -> Any:
    """`sum_over_replicas`, of no replicas but one and no values too."""
    return sum_over_replicas(values) if replicas() > 1 and tf.nest.flatten(values) else values
