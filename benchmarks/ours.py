# SPDX-License-Identifier: Apache-2.0
"""This project's side: a recipe's own data, model and `fit`, some steps at a time."""

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.clock import WARM, Clock
from benchmarks.machine import peak_memory_mb
from common.training import adamw
from keras_replicas import Batches, distribute, make_strategy

ONE_PART = tf.distribute.InputContext(1, 0, 1)  # whole batches


def trainer(recipe: str, batch_size: int, **options: Any) -> Callable[..., dict[str, Any]]:
    """A function that trains some steps and times them; see `benchmarks.workers`, and `set_up` for the arguments.

    It returns the `steps`, their `seconds`, what `count` counts, the bytes of the gradients, `bytes_reduced`, and
    `peak_memory_mb`.
    """
    strategy, model, train = set_up(recipe, batch_size, **options)
    reduced = sum(4 * int(np.prod(weight.shape)) for weight in model.trainable_variables)

    def run(steps: int) -> dict[str, Any]:
        clock, first = Clock(), int(model.optimizer.iterations.numpy()) + WARM
        fit(model, strategy, train, WARM + steps, [clock])
        found = {"steps": steps, "seconds": clock.seconds, "bytes_reduced": reduced, "peak_memory_mb": peak_memory_mb()}
        return found | count(train, first, steps)

    return run


def set_up(
    recipe: str, batch_size: int, rate: Any = 1e-4, optimizer: str = "adamw", **options: Any
) -> tuple[tf.distribute.Strategy, keras.Model, Batches]:
    """A recipe's strategy, compiled model and training data.

    Args:
        recipe: one that trains by `fit`.
        batch_size: examples in a step, over all replicas and workers.
        rate: learning rate, or its schedule.
        optimizer: `adamw`, which the peers have, or `muon`, which the recipe has for language models.
        options: of the recipe, without `batch_size` and `learning_rate`.
    """
    page, config, strategy = begin(recipe, **options)
    if optimizer == "adamw":
        page.muon = adamw
    if recipe == "text_classifier":
        made = page.make_datasets(config)
        train = made.batches("train", batch_size, config.seed)
    else:
        made, batches = page.make_datasets(config, batch_size)
        train = batches["train"]
    with strategy.scope():
        return strategy, page.build_model(config, made, rate), train


def begin(recipe: str, **options: Any) -> tuple[Any, Any, tf.distribute.Strategy]:
    """A recipe's module, its `Config` and strategy, with seed and precision set."""
    page: Any = importlib.import_module(f"recipes.{recipe}")
    config = page.Config(**options)
    strategy = make_strategy(config.replicas)
    keras.utils.set_random_seed(config.seed)
    keras.config.set_dtype_policy(config.precision)
    return page, config, strategy


def fit(model: keras.Model, strategy: tf.distribute.Strategy, data: Batches, steps: int, callbacks: list) -> None:
    """Trains a given number of further steps, silently."""
    batches = distribute(strategy, data, int(model.optimizer.iterations.numpy()))
    model.fit(batches, steps_per_epoch=steps, callbacks=callbacks, verbose=0, shuffle=False)


def count(data: Batches, first: int, steps: int) -> dict[str, int]:
    """The `examples`, `tokens` and `slots`, which are tokens or padding, of some steps."""
    masks = [x["padding_mask"].numpy() for x, *_ in data.iter_from_step(first, ONE_PART).take(steps)]
    counts = {"examples": sum(mask.any(axis=1).sum() for mask in masks), "tokens": sum(mask.sum() for mask in masks)}
    return {name: int(number) for name, number in counts.items()} | {"slots": sum(mask.size for mask in masks)}
