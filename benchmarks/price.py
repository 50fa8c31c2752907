# SPDX-License-Identifier: Apache-2.0
"""What `fit` by the library costs: plain Keras models, beside Keras's own `fit` on one device, in time a step."""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, write_results
from benchmarks.rounds import Timed, take_rounds

BATCH, BATCHES = 64, 100
MODELS = ("dense", "convolutions", "LSTM", "transformer")
KERAS = "Keras's fit"
WAYS = (KERAS, "ours", "ours, with StepLog and Checkpoints", "ours, on 2 replicas")


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    rounds, seconds = (1, 0.2) if arguments.quick else (7, 4.0)
    results: dict[str, Any] = {"machine": machine(arguments.quick), "milliseconds": {}}
    for model in MODELS[:1] if arguments.quick else MODELS:
        contenders = {way: Timed("benchmarks.price:contender", {"name": model, "way": way}, seconds) for way in WAYS}
        take_rounds([*contenders.values()], rounds, model)
        results["milliseconds"][model] = {
            way: [round(1000 * answer["seconds"] / answer["steps"], 3) for answer in timed.answers]
            for way, timed in contenders.items()
        }
    if not arguments.quick:
        write_results("price", results)
    print(table(results))


def contender(name: str, way: str) -> Callable[..., dict[str, float]]:
    """A function that trains some steps, and tells how many and how long they took, without the first epoch."""
    import contextlib

    import keras
    import numpy as np

    import keras_replicas as kr

    keras.utils.set_random_seed(0)
    folder = tempfile.TemporaryDirectory()  # until the process ends
    scope = contextlib.nullcontext() if way == KERAS else kr.make_strategy(2 if "replicas" in way else 1).scope()
    with scope:
        model, shape, most = made(name)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
        if way != KERAS:
            model = kr.data_parallel(model)
    random = np.random.default_rng(0)
    examples = BATCH * BATCHES
    x = random.integers(0, most, (examples, *shape)) if most else random.normal(size=(examples, *shape)).astype("f")
    y = random.integers(0, 10, examples)

    def train(steps: int) -> dict[str, float]:
        epochs, ends = math.ceil(steps / BATCHES), list[float]()
        clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends.append(time.perf_counter()))
        callbacks: list[keras.callbacks.Callback] = [clock]
        if "StepLog" in way:
            run = Path(tempfile.mkdtemp(dir=folder.name))
            callbacks += [kr.StepLog(run), kr.Checkpoints(run / "checkpoints", every=100)]
        model.fit(x, y, batch_size=BATCH, epochs=1 + epochs, callbacks=callbacks, verbose=0)
        return {"steps": epochs * BATCHES, "seconds": ends[-1] - ends[0]}

    return train


def made(name: str) -> tuple[Any, tuple[int, ...], int]:
    """A model for ten classes, the shape of an example, and one more than its largest id, or 0 if it is of numbers."""
    import keras
    from keras import layers

    if name == "dense":
        hidden = [layers.Dense(1024, activation="relu") for _ in range(3)]
        return keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(10)]), (512,), 0
    if name == "convolutions":
        parts = [keras.Input((32, 32, 3))]
        for filters in (16, 32):
            parts += [layers.Conv2D(filters, 3, strides=2), layers.BatchNormalization(), layers.ReLU()]
        return keras.Sequential([*parts, layers.GlobalAveragePooling2D(), layers.Dense(10)]), (32, 32, 3), 0
    if name == "LSTM":
        parts = [keras.Input((24,)), layers.Embedding(1000, 64), layers.LSTM(64), layers.Dense(10)]
        return keras.Sequential(parts), (24,), 1000
    ids = keras.Input((24,))
    x = layers.Embedding(1000, 64)(ids)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(256, activation="gelu")(x)))
    return keras.Model(ids, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))), (24,), 1000


def table(results: dict[str, Any]) -> str:
    """The results in Markdown: a step's time, its range over the rounds, and how much more than by Keras it takes."""
    lines = [f"| model | {' | '.join(WAYS)} |", "| --- " * (len(WAYS) + 1) + "|"]
    for model, measured in results["milliseconds"].items():
        medians = {way: statistics.median(rounds) for way, rounds in measured.items()}
        cells = [f"{medians[way]:.2f} ms, {min(measured[way]):.2f} to {max(measured[way]):.2f}" for way in WAYS]
        for column, way in enumerate(WAYS[1:], 1):
            more = medians[way] - medians[KERAS]
            cells[column] += f" ({1000 * more:+,.0f} µs, {more / medians[KERAS]:+.0%})"
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)
