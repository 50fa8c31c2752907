# SPDX-License-Identifier: Apache-2.0
"""This project's `fit`, as in `recipes/bert_mlm.py`, some steps at a time."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.clock import WARM, Clock
from keras_replicas import Batches, distribute, make_strategy
from recipes.bert_mlm import Config, build_model, make_datasets, masked_batches

FOR_EVER = 10**6  # epochs
# What the other sides of a comparison do, where the recipe's own defaults differ.
AS_OTHERS = {"seq_length": 128, "mask_rate": 0.15, "optimizer": "adamw"}


def trainer(batch_size: int, rate: float = 1e-4, **options: Any) -> Callable[..., dict[str, Any]]:
    """A function that trains some steps and times them; see `benchmarks.workers`.

    Args:
        batch_size: sequences in a step, over all replicas and workers.
        rate: learning rate of every step.
        options: of `bert_mlm`.
    """
    config = configured(**options)
    strategy, model, train = set_up(config, batch_size, rate)
    reduced = sum(4 * np.prod(weight.shape) for weight in model.trainable_variables)

    def run(steps: int) -> dict[str, Any]:
        clock = Clock(lambda step: int(model.step_values["tokens"].sum()))
        fit(model, strategy, train, WARM + steps, [clock])
        return {"steps": steps, "seconds": clock.seconds, "tokens": clock.tokens, "bytes_reduced": int(reduced)}

    return run


def configured(**options: Any) -> Config:
    """The recipe's `Config` for an endless run with these options, and otherwise with those of the other sides."""
    return Config(**AS_OTHERS | {"epochs": FOR_EVER} | options)


def set_up(config: Config, batch_size: int, schedule) -> tuple[tf.distribute.Strategy, keras.Model, Batches]:
    """The recipe's strategy, model and training data.

    Args:
        config: of the recipe, with a `precision` that is not `auto`.
        batch_size: sequences in a step, over all replicas and workers.
        schedule: the learning rate's, or a number.

    Raises:
        ValueError: when the replicas cannot share the batch.
    """
    strategy = make_strategy(config.replicas)
    keras.utils.set_random_seed(config.seed)
    keras.config.set_dtype_policy(config.precision)
    vocabulary, sequences = make_datasets(config)
    replicas = strategy.num_replicas_in_sync
    if batch_size % replicas:
        raise ValueError(f"{replicas} replicas cannot share a batch of {batch_size}")
    with strategy.scope():
        model = build_model(config, vocabulary, schedule)
    return strategy, model, masked_batches(config, vocabulary, sequences, "train", batch_size)


def fit(model: keras.Model, strategy: tf.distribute.Strategy, data: Any, steps: int, callbacks: list) -> None:
    """Trains a given number of further steps, silently."""
    batches = distribute(strategy, data, int(model.optimizer.iterations.numpy()))
    model.fit(batches, steps_per_epoch=steps, callbacks=callbacks, verbose=0, shuffle=False)
