# SPDX-License-Identifier: Apache-2.0
"""Steps on all replicas, several in one call, for `trainer.py`."""

import types

import keras
import numpy as np
import tensorflow as tf

from common.training.replica_step import ReplicaStep
from common.training.replicas import first_replica, steps_in_one_call, sum_over_replicas


class StepLoop(ReplicaStep):
    """Training and evaluation steps, of a class's own `train_step` and `test_step` too."""

    told_to_stop = all_told_to_stop = False

    def train_step(self, data):
        """One replica's part of a training step; returns a dict of what all steps of the epoch come to so far."""
        return _split(self._step(data, training=True))[0]

    def test_step(self, data):
        """One replica's part of an evaluation step."""
        return _split(self._step(data, training=False))[0]

    def _on_replicas(self, training):
        """A function of (iterator, left) that does the steps of one call, at most `left`, unless that is None.

        It returns how many they were; what all steps come to so far, and each step's own values, both dicts. A worker
        that is told to stop says so in the step's reduction, so that all stop after the same step.
        """
        strategy = self.distribute_strategy
        name = "train_step" if training else "test_step"
        step = getattr(self, name) if getattr(type(self), name) is not getattr(StepLoop, name) else None

        def replica_step(data, stop):
            data = _own(data)
            if step is None:
                return self._step(data, stop, training)
            logs = keras.tree.map_structure(lambda t: tf.cast(t, tf.float32), step(data))
            logs, stop = sum_over_replicas((logs, stop))
            return {name: value / strategy.num_replicas_in_sync for name, value in logs.items()} | {"stop": stop}

        def step_on_data(data, stop):
            return first_replica(strategy, strategy.run(replica_step, args=(data, stop)))

        def one_step(iterator, stop):
            return step_on_data(next(iterator), stop)

        do_steps = steps_in_one_call(one_step)
        in_graph = tf.function(step_on_data, autograph=False, reduce_retracing=True)
        step_on_batch = step_on_data if self.run_eagerly else in_graph

        def run_steps(iterator, left):
            count = self.steps_per_execution if left is None else min(self.steps_per_execution, left)
            stop = tf.constant(float(self.told_to_stop))
            if left is not None and not self.run_eagerly:
                values = do_steps(iterator, count, self.told_to_stop)
            else:
                rows = []
                for _ in range(count):
                    try:
                        if isinstance(iterator, types.GeneratorType):
                            rows.append(_as_row(step_on_batch(self._divided(next(iterator)), stop)))
                        elif self.run_eagerly:
                            rows.append(_as_row(one_step(iterator, stop)))
                        else:
                            rows.append(do_steps(iterator, 1, self.told_to_stop))
                    except (StopIteration, tf.errors.OutOfRangeError):
                        if not rows:
                            raise
                        break
                values = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            self.all_told_to_stop = bool(values.pop("stop")[-1])
            logs, own = _split(values)
            return len(next(iter(values.values()))), {name: value[-1] for name, value in logs.items()}, own

        return run_steps

    def _divided(self, batch):
        """Each replica's part of a batch, in their order; the last ones may have fewer examples, or none."""
        strategy = self.distribute_strategy
        replicas = strategy.num_replicas_in_sync

        def part(leaf, context):
            size = -(-leaf.shape[0] // replicas)
            return leaf[context.replica_id_in_sync_group * size :][:size]

        def distributed(leaf):
            if leaf is None:
                return None
            leaf = tf.convert_to_tensor(leaf)
            return strategy.experimental_distribute_values_from_function(lambda context: part(leaf, context))

        return batch if replicas == 1 else keras.tree.map_structure(distributed, batch)


def _own(data):
    """A replica's part of the data, with None for what is left out, and in memory of its own.

    Of a batch that a Python generator gives, a part is still the generator's own array, into which TensorFlow 2.21
    writes what it computes from it.
    """
    strategy = tf.distribute.get_strategy()
    may_be_shared = strategy.num_replicas_in_sync > 1 and "CPU" in strategy.extended.worker_devices[0]

    def own(leaf):
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        if not may_be_shared:
            return leaf
        return tf.nest.map_structure(lambda tensor: tf.raw_ops.DeepCopy(x=tensor), leaf, expand_composites=True)

    return keras.tree.map_structure(own, data)


def _split(values: dict) -> tuple[dict, dict]:
    """What all steps come to so far, and each step's own values."""
    own = {name.removeprefix("step/"): value for name, value in values.items() if name.startswith("step/")}
    if "waited" in values:
        own["waited"] = values["waited"]
    others = {f"step/{name}" for name in own} | {"stop", "waited"}
    return {name: value for name, value in values.items() if name not in others}, own


def _as_row(values: dict) -> dict:
    return {name: np.asarray(value)[None] for name, value in values.items()}
