# SPDX-License-Identifier: Apache-2.0
"""Counts of a model's steps, of which its random draws are a function."""

import functools
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.replicas import local_value

EVALUATION = 2**44  # numbers of evaluation steps lie from here to twice this; those of training steps below
BATCHES = 2**32  # more than an evaluation has


class StepCounter:
    """Numbers a model's steps, for the seeds of their random draws.

    The number of a training step is a function of the steps before, and larger than theirs. That of a batch in an
    evaluation is a pseudo-random function of the training steps so far, of the evaluations since the last of them, and
    of the batches before. So a resumed run draws what an uninterrupted one does, wherever checkpoints hold the
    `variables`.

    Args:
        model: of `data_parallel`. Its optimizer counts the steps of Keras's own `train_step`.

    Attributes:
        variables: the counts, each the same on all replicas.
    """

    def __init__(self, model: Any):
        self._model = model
        with model.distribute_strategy.scope():
            make_count = functools.partial(keras.Variable, dtype="int64", trainable=False)
            self._steps = make_count(0, name="steps")
            self._evaluated_at = make_count(-1, name="evaluated_at")
            self._evaluations = make_count(0, name="evaluations")
            self._batches = make_count(0, name="batches")
        self.variables = [self._steps, self._evaluated_at, self._evaluations, self._batches]

    def training_step(self) -> tf.Tensor:
        """The number of the next training step, an int64 scalar. Call it in a replica's step, or outside."""
        optimizer = getattr(self._model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        steps = self._value(self._steps)
        # `_iterations` counts every step; `iterations` one for `gradient_accumulation_steps` steps.
        return steps if optimizer is None else steps + tf.cast(self._value(optimizer._iterations), tf.int64)

    def evaluation_step(self) -> tf.Tensor:
        """The number of an evaluation's next batch, an int64 scalar. Call it in a replica's step."""
        in_evaluation = self._value(self._evaluations) * BATCHES + self._value(self._batches)
        seed = tf.stack([self.training_step(), in_evaluation])
        return EVALUATION + tf.random.stateless_uniform(shape=[], seed=seed, maxval=EVALUATION, dtype=tf.int64)

    def end_training_step(self) -> None:
        """Advances the number of the next training step, for a custom step, which may call no optimizer.

        Where the step also calls the model's optimizer, the number grows by more than 1. Call it in a replica's step.
        """
        copy = local_value(self._steps)
        copy.assign_add(tf.ones_like(copy))

    def end_evaluation_step(self) -> None:
        """Counts a batch of an evaluation. Call it in a replica's step."""
        copy = local_value(self._batches)
        copy.assign_add(tf.ones_like(copy))

    def begin_evaluation(self) -> None:
        """Counts an evaluation. Call it outside a replica's step."""
        step = int(self.training_step())
        is_first = step != int(self._evaluated_at.numpy())
        self._evaluations.assign(0 if is_first else self._evaluations.numpy() + 1)
        self._evaluated_at.assign(step)
        self._batches.assign(0)

    def _value(self, variable: keras.Variable) -> tf.Tensor:
        return tf.convert_to_tensor(local_value(variable))
