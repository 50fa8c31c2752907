# SPDX-License-Identifier: Apache-2.0
"""Reductions alone, over workers, by the strategy that trains."""

import time
from collections.abc import Callable

import tensorflow as tf

from keras_replicas.strategy import make_strategy


def reducer() -> Callable[..., dict[str, float]]:
    """A function that adds up `count` float32 numbers over the workers, `steps` times; see `benchmarks.workers`."""
    strategy = make_strategy()

    def add(numbers: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, numbers)

    @tf.function(reduce_retracing=True)
    def reduce(count: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(lambda: add(tf.ones([count]))[0]))[0]

    def run(steps: int, count: int) -> dict[str, float]:
        reduce(tf.constant(count)).numpy()
        began = time.perf_counter()
        for _ in range(steps):
            reduce(tf.constant(count)).numpy()
        return {"steps": steps, "seconds": time.perf_counter() - began}

    return run
