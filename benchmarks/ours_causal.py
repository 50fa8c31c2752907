# SPDX-License-Identifier: Apache-2.0
"""This project's side in training causal language models: `recipes/causal_lm.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common.data.stream import Stream

from benchmarks.clock import WARM, Clock
from benchmarks.machine import peak_memory_mb
from benchmarks.ours import fit
from common.model.saving import save_task
from common.training import Scaled
from keras_replicas import make_strategy
from recipes.causal_lm import Config, build_model, causal_batches, make_datasets


def writer(folder: str, **options: Any) -> Callable[[], dict[str, int]]:
    """A function that writes `preset/`, random weights of a size, and `sequences.npy` [sequences, seq_length + 1]."""
    config = Config(**options)

    def write() -> dict[str, int]:
        keras.utils.set_random_seed(config.seed)
        data = make_datasets(config)
        np.save(Path(folder, "sequences.npy"), data.sequences["train"].numpy())
        save_task(build_model(config, data), data.preprocessor, Path(folder, "preset"))
        return data.sizes()

    return write


def trainer(batch_size: int, **options: Any) -> Callable[..., dict[str, Any]]:
    """A function that trains some steps and times them; see `benchmarks.workers`.

    Args:
        batch_size: sequences in a step, over all replicas.
        options: of `causal_lm`.
    """
    strategy, model, train = set_up(batch_size, **options)

    def run(steps: int) -> dict[str, Any]:
        clock = Clock(lambda step: int(model.step_values["labels"].sum()))
        fit(model, strategy, train, WARM + steps, [clock])
        return {"steps": steps, "seconds": clock.seconds, "tokens": clock.tokens, "peak_memory_mb": peak_memory_mb()}

    return run


def set_up(batch_size: int, **options: Any) -> tuple[tf.distribute.Strategy, keras.Model, Stream]:
    """The recipe's strategy, model and training data."""
    config = Config(**{"optimizer": "adamw", "precision": "float32", "learning_rate": 1e-4} | options)
    strategy = make_strategy(config.replicas)
    keras.utils.set_random_seed(config.seed)
    keras.config.set_dtype_policy(config.precision)
    data = make_datasets(config)
    scaled = Scaled(batch_size // strategy.num_replicas_in_sync, batch_size)
    with strategy.scope():
        model = build_model(config, data, config.learning_rate)
    return strategy, model, causal_batches(config, data, "train", scaled)
