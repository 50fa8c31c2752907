# SPDX-License-Identifier: Apache-2.0
"""A run of a given time, `--minutes`: how large a model, and how many steps."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from common.devices.cluster import num_workers
from common.devices.rendezvous import exchange
from common.devices.strategy import distribute
from common.model.sizes import SIZES, dimensions
from common.run.runs import Run
from common.run.speed import device_peak, flops_per_token

TOKENS_PER_WEIGHT = 20  # of the layers: at which compute is best spent, by Hoffmann et al. 2022, arXiv:2203.15556
UTILISATION = 0.35  # MFU, before it is measured
SECONDS = 3.0  # for which steps are measured, about
FEW_STEPS = 3  # from which it is told how many these are
VALIDATION = 1 / 3  # time of a step of validation, in training steps: it has no backward pass


def choose_size(config: Any, run: Run) -> Any:
    """The options, with the `model` for `config.minutes` where they name none; a resumed run keeps it.

    It is the largest one that sees `TOKENS_PER_WEIGHT`, at the speed that the device's peak lets expect; at least tiny.
    """
    if not config.minutes or config.model or getattr(config, "preset", ""):
        return config
    gpus = len(tf.config.list_physical_devices("GPU"))
    flops = UTILISATION * device_peak("float32") * max(gpus, 1) * num_workers() * 60 * config.minutes
    ratios = {}  # tokens for each weight
    for size in [size for size in SIZES if size != "nano"]:
        layers, _, width, inner = dimensions(size).values()
        shape = (width, inner, layers, config.vocabulary_size, config.seq_length, config.mask_rate)
        ratios[size] = flops / flops_per_token(*shape) / (layers * (4 * width**2 + 2 * width * inner))
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
    """The steps of the run: those of `epochs`, or `max_steps` if fewer; or for `minutes`, which a resumed run keeps.

    For these, a model that is built for it trains for some seconds, and is thrown away. The time to come is that of
    compiling once more, of the steps, and of a validation after each epoch.

    Args:
        config: the options, of a language model.
        run: in which the steps for `minutes` are recorded.
        strategy: in whose scope the model is built.
        steps: of an epoch of each split.
        build: makes a compiled model.
        batches: as for `distribute`, of each split.
    """
    if not config.minutes:
        return min(steps["train"] * config.epochs, config.max_steps or sys.maxsize)
    if "chosen_steps" not in run.saved:
        with strategy.scope():
            model = build()
        compiling, step = _seconds(model, distribute(strategy, batches, "train"))
        keras.utils.set_random_seed(config.seed)
        with_validation = step * (1 + VALIDATION * steps["validation"] / steps["train"])
        chosen = max(1, int((60 * config.minutes - compiling) / with_validation))
        run.keep("chosen_steps", exchange({"steps": chosen})[0]["steps"])
        print(f"--minutes {config.minutes:g}: {chosen:,} steps, each of which takes {step:.3f} s here", flush=True)
    return run.saved["chosen_steps"]


def _seconds(model: keras.Model, batches: tf.distribute.DistributedDataset) -> tuple[float, float]:
    """How many seconds the compilation takes, and a step."""

    def fit(steps: int) -> float:
        began = time.perf_counter()
        model.fit(batches, steps_per_epoch=steps, verbose=0)
        return time.perf_counter() - began

    first, few = fit(1), fit(FEW_STEPS)
    wanted = max(FEW_STEPS, math.ceil(SECONDS * FEW_STEPS / few))
    more = exchange({"steps": wanted})[0]["steps"]  # the same on all workers
    step = (fit(FEW_STEPS + more) - few) / more  # without the time that `fit` takes to begin
    return first - few + (FEW_STEPS - 1) * step, step
