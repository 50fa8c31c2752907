# SPDX-License-Identifier: Apache-2.0
"""The sums and means of a batch, for an explicit loop."""

import tensorflow as tf

from common.run.step_log import MEANS
from common.training.losses import label_hits


def batch_sums(x: dict, y: tf.Tensor, weight: tf.Tensor, logits: tf.Tensor, loss: tf.Tensor) -> dict[str, tf.Tensor]:
    """One replica's part of a batch, as sums that can be added up over replicas; float32 scalars.

    Args:
        x: whose `padding_mask` is 1 for a token and 0 for padding.
        y: labels, integers of any shape; floats for regression.
        weight: of each label, in y's shape; 0 for padding.
        logits: of y's shape with a last axis of classes; not used for regression.
        loss: the weighted sum of the labels' losses.

    Returns:
        `loss`; `accuracy`, the sum of the weights of labels with the highest logit, but not for regression; `labels`,
        the sum of all weights; `tokens`, without padding; `slots`, token positions.
    """
    is_token = tf.cast(x["padding_mask"], tf.float32)
    accuracy = {"accuracy": tf.reduce_sum(label_hits(y, logits) * weight)} if y.dtype.is_integer else {}
    return accuracy | {
        "loss": loss,
        "labels": tf.reduce_sum(weight),
        "tokens": tf.reduce_sum(is_token),
        "slots": tf.cast(tf.size(is_token), tf.float32),
    }


def means_of(sums: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Loss and accuracy as means over the labels, the rest unchanged."""
    return {
        name: tf.math.divide_no_nan(total, sums["labels"]) if name in MEANS else total for name, total in sums.items()
    }
