# SPDX-License-Identifier: Apache-2.0
"""What a step log needs from a model: accuracy, and counts of labels and tokens."""

from typing import Any

import keras
import tensorflow as tf

from common.training.explicit_step import COUNTS
from common.training.fused import make_fast
from common.training.losses import CrossEntropy, LabelAccuracy
from keras_replicas import data_parallel


class CountsTokens:
    """For a `data_parallel` class: metrics `accuracy`, `labels`, `tokens` and `slots`, and means over all labels.

    `labels` is the sum of the weights; `tokens` counts tokens without padding, where `x["padding_mask"]` is 0; `slots`
    counts token positions, including padding.
    """

    mean_over = "values"
    distribute_strategy: Any

    def compile(self, optimizer, loss, **kwargs):
        """As Keras's, but with these metrics only; `accuracy` is among them if the loss is a cross-entropy.

        On a CPU, dropout and GELU are then those of `common.training.fused`.
        """
        with self.distribute_strategy.scope():
            self.counts = [keras.metrics.Sum(name=name) for name in COUNTS]
        make_fast(self)
        accuracy = [LabelAccuracy()] if isinstance(loss, CrossEntropy) else []
        super().compile(optimizer, loss, metrics=[], weighted_metrics=accuracy, **kwargs)  # type: ignore[misc]

    def update_counts(self, x, y, sample_weight):
        """See `data_parallel`."""
        is_token = tf.cast(x["padding_mask"], tf.float32)
        for metric, values in zip(self.counts, (sample_weight, is_token, tf.ones_like(is_token)), strict=True):
            metric.update_state(values)


def counting(task: type[keras.Model]) -> type[keras.Model]:
    """A data-parallel class like `task`, whose models count tokens; what is saved is of `task`."""
    names = {name: getattr(task, name) for name in ("__module__", "__qualname__", "__doc__")}
    return data_parallel(type(task.__name__, (CountsTokens, task), names | {"plain_class": task}))
