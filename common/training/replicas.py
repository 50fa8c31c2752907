# SPDX-License-Identifier: Apache-2.0
"""Reductions over replicas, and several steps per call."""

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from common.training.losses import label_hits

MEANS = ("loss", "accuracy")  # over labels
COUNTS = ("labels", "tokens", "slots")


def batch_sums(x: dict, y: tf.Tensor, weight: tf.Tensor, logits: tf.Tensor, loss: tf.Tensor) -> dict[str, tf.Tensor]:
    """One replica's part of a batch, as sums that can be added up over replicas; float32 scalars.

    Args:
        x: whose `padding_mask` is 1 for a token and 0 for padding.
        y: labels, integers of any shape.
        weight: of each label, in y's shape; 0 for padding.
        logits: y's shape and classes.
        loss: the sum of the labels' losses, by weight.

    Returns:
        `loss`; `accuracy`, the number of labels with the highest logit; `labels`,
        the sum of weights; `tokens`, without padding; `slots`, token positions.
    """
    is_token = tf.cast(x["padding_mask"], tf.float32)
    return {
        "loss": loss,
        "accuracy": tf.reduce_sum(label_hits(y, logits) * weight),
        "labels": tf.reduce_sum(weight),
        "tokens": tf.reduce_sum(is_token),
        "slots": tf.cast(tf.size(is_token), tf.float32),
    }


def means_of(sums: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Loss and accuracy as means over the labels, the rest as it is."""
    return {
        name: tf.math.divide_no_nan(total, sums["labels"]) if name in MEANS else total for name, total in sums.items()
    }


def sum_over_replicas(values):
    """Sums tensors over all replicas of all workers, in a single all-reduce. Call it in a replica's step."""
    # Dense, and on this replica's device, which collectives ask for.
    values = tf.nest.map_structure(lambda value: tf.identity(tf.convert_to_tensor(value)), values)
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)


def gather_over_replicas(values):
    """All-gathers tensors over all replicas of all workers, along the first axis. Call it in a replica's step.

    Those in bfloat16 become float32: TensorFlow's collectives, which workers and NCCL use, gather none.
    """

    def gatherable(value):
        return tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else tf.identity(value)

    return tf.distribute.get_replica_context().all_gather(tf.nest.map_structure(gatherable, values), axis=0)


def first_replica(strategy: tf.distribute.Strategy, values):
    """Of what `strategy.run` returned, that of this worker's first replica: for values that are the same on all."""
    return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)


def steps_in_one_call(step: Callable) -> Callable[..., dict[str, np.ndarray]]:
    """A function of (iterator, count, stop) that does `count` steps in one call, and gives each step's values.

    Keras's own loop of several steps fails where replicas are reduced by collectives (`You must feed a value for
    placeholder`).

    Args:
        step: of (iterator, stop); returns a dict of scalars, or of tensors of known shapes. `stop` is a float that the
            step may reduce, so that all workers know when one was asked to stop.

    Returns:
        The function; it returns a dict of float32 arrays [count, ...], with one more entry, `waited`: seconds that this
        worker waited for its batches.
    """
    shapes: dict[str, tf.TensorShape] = {}

    @tf.function(reduce_retracing=True, autograph=False)
    def many_steps(iterator, count, stop):
        def one_step(stop):
            timed = _TimedIterator(iterator)
            values = step(timed, stop) | {"waited": timed.seconds}
            values = {name: tf.cast(value, tf.float32) for name, value in values.items()}
            shapes.clear()
            shapes.update(
                {name: value.shape if value.shape.rank else tf.TensorShape([]) for name, value in values.items()}
            )
            return tf.concat([tf.reshape(value, [-1]) for value in values.values()], axis=0)

        # The flag is an element of the loop: captured by it, on its way to another device, it never arrives.
        stops = tf.fill([count], stop)
        return tf.map_fn(one_step, stops, fn_output_signature=tf.float32, parallel_iterations=1)

    def run_steps(iterator, count, stop=0.0):
        rows = many_steps(iterator, tf.constant(count), tf.constant(float(stop))).numpy()
        ends = np.cumsum([shape.num_elements() for shape in shapes.values()])[:-1]
        columns = np.split(rows, ends, axis=1)
        return {
            name: column.reshape(count, *shape) for (name, shape), column in zip(shapes.items(), columns, strict=True)
        }

    return run_steps


class _TimedIterator:
    """An iterator, in a graph, and the seconds that its batches were waited for."""

    def __init__(self, iterator):
        self._iterator = iterator
        self.seconds = tf.constant(0.0, tf.float64)

    def __next__(self):
        began = _now()
        with tf.control_dependencies([began]):
            batch = next(self._iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            ended = _now()
        self.seconds += ended - began
        with tf.control_dependencies([ended]):  # else the clock may be read after what the batch sets off
            return tf.nest.map_structure(_on_its_device, batch, expand_composites=True)


def _now() -> tf.Tensor:
    from tensorflow.python.framework.config import is_op_determinism_enabled  # it has no public name

    if is_op_determinism_enabled():  # in which TensorFlow's own clock raises
        return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), [])
    return tf.timestamp()


def _on_its_device(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device):
        return tf.identity(tensor)
