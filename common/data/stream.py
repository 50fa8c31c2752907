# SPDX-License-Identifier: Apache-2.0
"""A split's batches, as `fit` takes them: data that begins at any step."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Stream:
    """Batches that a function makes from any step on; see `keras_replicas.Batches`.

    Args:
        make: `make(first_step, num_shards, shard)` returns one shard's batches, each of one replica's size. There is a
            shard for each replica, or for each worker, whose replicas take batches in turn.
        steps: in an epoch.
    """

    def __init__(self, make: Callable[[int, int, int], tf.data.Dataset], steps: int):
        self._make, self._steps = make, steps

    def __len__(self):
        return self._steps

    def iter_from_step(self, step: int, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """The batches of an input pipeline from that step on."""
        return self._make(step, context.num_input_pipelines, context.input_pipeline_id)


def one_epoch(data: Any, replicas: int) -> tf.data.Dataset:
    """The batches of an epoch's steps, without a strategy: each replica's, one after the other."""
    return data.iter_from_step(0, tf.distribute.InputContext(1, 0, replicas)).take(len(data) * replicas)
