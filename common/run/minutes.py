# SPDX-License-Identifier: Apache-2.0
"""Runs of a given time, `--minutes`: the model's size, and the number of steps."""

import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from common.data.wordpiece import load_wordpieces
from common.model.sizes import SIZES, dimensions
from common.run.runs import Run
from common.run.speed import device_peak, flops_per_token
from keras_replicas.cluster import num_workers
from keras_replicas.errors import UserError
from keras_replicas.strategy import distribute
from keras_replicas.workers import exchange

TOKENS_PER_WEIGHT = 20  # of the layers: the best use of compute, by Hoffmann et al. 2022, arXiv:2203.15556
UTILISATION = 0.35  # MFU, before it is measured
WARM = 2  # calls that are not timed; the first compiles
SECONDS = 3.0  # for which steps are timed
VALIDATION = 1 / 3  # time of a step of validation, in training steps: it has no backward pass


def choose_size(config: Any, run: Run, strategy: tf.distribute.Strategy) -> Any:
    """The options, with a `model` chosen for `config.minutes` if they name none; a resumed run keeps it.

    It is the largest one that sees `TOKENS_PER_WEIGHT`, at the speed to expect from the devices' peak; at least tiny.
    """
    if not config.minutes or config.model or getattr(config, "preset", ""):
        return config
    file = getattr(config, "vocabulary", "")
    pieces = len(load_wordpieces(file).pieces) if file else config.vocabulary_size
    gpus = min(len(tf.config.list_physical_devices("GPU")), strategy.num_replicas_in_sync // num_workers())
    flops = UTILISATION * device_peak("float32") * max(gpus, 1) * num_workers() * 60 * config.minutes
    ratios = {}  # tokens for each weight
    for size in [size for size in SIZES if size != "nano"]:
        layers, _, width, inner = dimensions(size).values()
        labels = getattr(config, "mask_rate", 1.0)  # per token: 1 in a causal model
        per_token = flops_per_token(width, inner, layers, pieces, config.seq_length, labels)
        ratios[size] = flops / per_token / (layers * (4 * width**2 + 2 * width * inner))
    enough = [size for size, ratio in ratios.items() if ratio >= TOKENS_PER_WEIGHT]
    size = run.keep("chosen_model", exchange({"size": (enough or ["tiny"])[-1]})[0]["size"])
    seen = f"about {ratios[size]:.1f} tokens for each weight of its layers"
    print(f"--minutes {config.minutes:g}: --model {size}, which sees {seen}", flush=True)
    return dataclasses.replace(config, model=size)


def count_steps(
    config: Any,
    run: Run,
    strategy: tf.distribute.Strategy,
    steps: dict[str, int],
    build: Callable[[], keras.Model],
    batches: Callable[..., tf.data.Dataset],
) -> int:
    """The run's number of steps: by `epochs`, or `max_steps` if fewer; or by `minutes`, which a resumed run keeps.

    For `minutes`, a model built for this purpose trains for some seconds, even in a dry run, and is thrown away. The
    run's time then goes into compiling once more, the steps, and a validation after each epoch.

    Args:
        config: the options, of a language model.
        run: records the steps for `minutes`.
        strategy: the model is built in its scope.
        steps: the steps of an epoch, by split.
        build: makes a compiled model.
        batches: takes a split; for `distribute`.

    Raises:
        UserError: when there is no time for a step.
    """
    if not config.minutes:
        return min(steps["train"] * config.epochs, config.max_steps or sys.maxsize)
    if "chosen_steps" not in run.saved:
        with strategy.scope():
            clock = _Clock(build())
        clock.run(distribute(strategy, batches, "train"))
        measured = exchange({"compiling": clock.compiling, "step": clock.step})[0]  # the chief's
        del clock
        gc.collect()  # else the model would share memory with the one that is trained
        keras.utils.set_random_seed(config.seed)
        chosen = steps_in(60 * config.minutes, **measured, **steps)
        told = "{step:.3f} s each, after {compiling:.1f} s for compiling".format_map(measured)
        if not chosen:
            raise UserError(f"--minutes {config.minutes:g} has no time for a step and a validation: {told}. Give more")
        print(f"--minutes {config.minutes:g}: {chosen:,} steps, {told}", flush=True)
        run.keep("chosen_steps", chosen)
    return run.saved["chosen_steps"]


def steps_in(seconds: float, compiling: float, step: float, train: int, validation: int, **_: int) -> int:
    """How many steps fit into a time, with a whole validation after each epoch and after the last step.

    Args:
        seconds: the time.
        compiling, step: seconds for compiling, and for a step.
        train, validation: steps of an epoch, and of a validation.
    """
    validating = VALIDATION * step * validation
    epochs, rest = divmod(max(0.0, seconds - compiling), train * step + validating)
    return int(epochs) * train + max(0, int((rest - validating) / step))


class _Clock(keras.callbacks.Callback):
    """Trains a model until its steps have been timed for `SECONDS`."""

    def __init__(self, model: keras.Model):
        super().__init__()
        self.trained, self.ends, self.done = model, [time.perf_counter()], [0]

    def run(self, batches: tf.distribute.DistributedDataset) -> None:
        """Measures `compiling` and `step`, the seconds for compiling and for a step."""
        self.trained.fit(batches, steps_per_epoch=sys.maxsize, callbacks=[self], verbose=0)
        self.step = (self.ends[-1] - self.ends[WARM]) / (self.done[-1] - self.done[WARM])
        self.compiling = max(0.0, self.ends[1] - self.ends[0] - self.step)

    def on_train_batch_begin(self, batch, logs=None):
        timed = self.ends[-1] - self.ends[min(WARM, len(self.ends) - 1)]
        self.model.told_to_stop = timed >= SECONDS  # in the step's reduction, so that all workers stop together

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())
        self.done.append(self.model.steps_done)
        self.model.stop_training = self.model.all_told_to_stop
