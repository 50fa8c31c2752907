# SPDX-License-Identifier: Apache-2.0
"""What a run tells: a line for each step, TensorBoard, the results of training, a report, and a plan beforehand."""

import importlib.metadata
import math
import os
import platform
import resource
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas import StepLog, is_chief, num_workers

from .files import MALFORMED, one_line, plain
from .run_folder import PACKAGES

LOOKED_AT = 100  # batches whose tokens and padding are counted
BAR = 40  # columns of the highest learning rate
TRAINED = 3  # steps whose memory is measured
MOST_WEIGHTS = 50_000  # for a token of a step; above this, two replicas of a CPU were slower than one (docs/tried.md)
FASTER = "on SST-2, a CPU was 1.1 times as fast with --replicas 1 and the same global batch"
FEW_STEPS = 300  # in which little is learned from random weights


class RunLog(StepLog):
    """A `StepLog` that measures throughput, and shows each step's own values in TensorBoard, under `train/`.

    Keras's own `TensorBoard` would show the epoch's means so far. `board` writes to `tensorboard/` in the run's folder,
    for the chief alone. The data begins at any step, has `padding_mask` in x, and perhaps `not_seen`.
    """

    def __init__(self, folder: Path, data: Any):
        super().__init__(folder)
        if not (sys.stdout.isatty() or "ipykernel" in sys.modules):  # `fit` then prints a line for each epoch, no bar
            keras.config.disable_interactive_logging()
        self._not_seen = getattr(data, "not_seen", {})
        masks = [x["padding_mask"].numpy() for x, *_ in one_epoch(data).take(LOOKED_AT)]
        self._tokens_in_a_step = float(np.mean([mask.sum() for mask in masks]))
        self._padding = 1 - self._tokens_in_a_step / float(np.mean([mask.size for mask in masks]))
        self._steps_in_an_epoch, self._first_step = len(data), 0
        self._lines: list[dict[str, Any]] = []
        self._seconds, self._timed_steps, self._has_compiled = 0.0, 0, False
        path = str(folder / "tensorboard")
        self.board = tf.summary.create_file_writer(path) if is_chief() else tf.summary.create_noop_writer()

    def begin(self, first_step: int) -> list[dict[str, Any]]:
        """Opens the file, and returns the lines of the steps up to `first_step`, which are kept."""
        self._first_step, self._lines = first_step, super().begin(first_step)
        return self._lines

    def start_clock(self) -> None:
        """A step begins: what was done since the last one does not count."""
        self._began = time.perf_counter()

    def write(self, values: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """Writes the lines of the steps of one call, also to TensorBoard, and returns them."""
        lines = super().write(values)
        if self._has_compiled:
            self._seconds += time.perf_counter() - self._began
            self._timed_steps += len(lines)
        self._has_compiled = True
        self._lines += lines
        with self.board.as_default():
            for line in lines:
                for name in line.keys() - {"step"}:
                    tf.summary.scalar(f"train/{name}", line[name], step=line["step"])
        return lines

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        self.start_clock()

    def on_train_end(self, logs=None):
        """Closes the files."""
        super().on_train_end(logs)
        self.board.flush()

    def results(self, replicas: int) -> dict[str, Any]:
        """The part of `results.json` that every recipe has; see docs/recipes.md for what each entry means."""
        lines = {line["step"]: line for line in self._lines}  # of which a power cut may have taken some

        def of(name: str, first: int = 1) -> list[float]:
            return [lines.get(step, {}).get(name, math.nan) for step in range(first, self.step + 1)]

        rates, losses = of("learning_rate"), of("loss", self.step - (self.step - 1) % self._steps_in_an_epoch)
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        return {
            "replicas": replicas,
            "workers": num_workers(),
            "steps": self.step,
            "resumed_from_step": self._first_step or None,
            "seconds": round(self._seconds, 3),
            "tokens_per_second": round(self._timed_steps * self._tokens_in_a_step / (self._seconds or math.inf), 1),
            "padding_fraction": self._padding,
            **self._not_seen,
            "learning_rate": {"first": rates[0], "peak": float(np.max(rates)), "last": rates[-1]},
            "train_loss": float(np.mean(losses)),
            "peak_memory_mb": peak_memory_mb(),
            "peak_gpu_memory_mb": peak_gpu_memory_mb(),
            "versions": {"python": platform.python_version()} | versions,
            "hardware": hardware(),
        }


def one_epoch(data: Any) -> tf.data.Dataset:
    """The batches of an epoch of data that begins at any step, whole, as for one replica."""
    return data.iter_from_step(0, tf.distribute.InputContext(1, 0, 1)).take(len(data))


def peak_memory_mb() -> int:
    """Peak host memory of this process, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


def peak_gpu_memory_mb() -> list[int]:
    """Peak memory of each GPU that is used, in MiB."""
    gpus = [gpu.name for gpu in tf.config.list_logical_devices("GPU")]
    return [tf.config.experimental.get_memory_info(gpu)["peak"] // 2**20 for gpu in gpus]


def hardware() -> dict[str, Any]:
    """The CPU's model, from Linux's `/proc/cpuinfo`, its cores, and the GPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    return {"cpu": cpu, "cores": os.cpu_count(), "gpus": [gpu.get("device_name") for gpu in gpus]}


Scores = dict[str, float]  # of a split, such as `loss` and `accuracy`
# What is told of a split's scores: lines, each with a title; and whether the model beats its baseline.
Told = tuple[list[tuple[str, str]], bool]


@one_line("the results cannot be shown", ": remove the run's results.json, and give the same command again", MALFORMED)
def report(results: dict[str, Any], told_of: Callable[[str, Scores], Told]) -> str:
    """The results of a run, as lines of text; those of `results.json` may have null for NaN and infinity."""
    results, rate = _numbers(results), _numbers(results["learning_rate"])
    of_gpus = [f"{max(peaks):,} MiB of a GPU's" for peaks in [results.get("peak_gpu_memory_mb")] if peaks]
    batch = f"global batch {results['global_batch_size']}, on {results['replicas']} replica(s)"
    lines = [
        ("steps", f"{results['steps']}, {batch}"),
        ("time", f"{results['seconds']:.0f} s, {results['tokens_per_second']:,.0f} tokens/s"),
        ("peak memory", ", ".join([f"{results['peak_memory_mb']:,} MiB of host memory", *of_gpus])),
        ("padding", f"{results['padding_fraction']:.2%}"),
        ("learning rate", f"first {rate['first']:.2e}, peak {rate['peak']:.2e}, last {rate['last']:.2e}"),
        ("training loss", f"{results['train_loss']:.3f}, mean over the last epoch"),
    ]
    if "unknown_fraction" in results:
        lines.append(("unknown tokens", f"{results['unknown_fraction']:.2%}"))
    if "cut_texts" in results:
        lines.append(("texts", results["cut_texts"]))
    for prefix, split in (("val_", "validation"), ("test_", "test")):
        if scores := {key.removeprefix(prefix): results[key] for key in results if key.startswith(prefix)}:
            of_split, learned = told_of(split, scores)
            lines += of_split
            if split == "validation" and not learned:
                advice = "try a third of the learning rate, or more epochs"
                advice = "show it longer sequences" if "cut_texts" in results else advice
                few = f"{results['steps']} steps are few: give more epochs"
                advice = few if results["steps"] < FEW_STEPS else advice
                lines.append(("warning", f"the model does not beat its baseline on the validation split: {advice}"))
    lines.append(("work directory", results["config"]["workdir"]))
    width = max(20, *(len(title) for title, _ in lines))
    return plain("\n".join(f"{title:{width}} {text}" for title, text in lines))


def _numbers(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in entries.items()}


def print_plan(model: keras.Model, train: Any, schedule: Callable, total_steps: int, tokenizer: Any) -> dict:
    """Prints a run's size, its learning rates, an example as the model sees it, and the memory of a few steps.

    A compiled model is trained for `TRAINED` steps, on all workers, with data that begins at any step, of (x, y,
    sample_weight). The schedule gives the learning rate of a step, counted from 0. Returns {}: there are no results.
    """
    x, y, weight = next(iter(one_epoch(train)))
    counts = [int(tf.reduce_sum(x["padding_mask"])) for x, *_ in one_epoch(train).take(LOOKED_AT)]
    print(f"{model.count_params():,} parameters in {keras.config.dtype_policy().name}")
    print(f"{total_steps:,} steps, {len(train):,} in an epoch; in the first, {counts[0]:,} tokens")
    weights = sum(math.prod(each.shape) for each in model.trainable_weights)
    if len(tf.config.list_logical_devices("CPU")) > 1 and weights > MOST_WEIGHTS * np.mean(counts):
        print(f"each replica updates all {weights:,} weights: {FASTER}")
    rates = {step: float(schedule(step)) for step in sorted({round(i / 10 * (total_steps - 1)) for i in range(11)})}
    print("learning rate by step:")
    for step, rate in rates.items():
        print(f"{step + 1:>10,} {rate:9.2e} {'#' * round(rate / (max(rates.values()) or 1) * BAR)}")
    shown = {"input": x["token_ids"][0][x["padding_mask"][0] > 0]}
    if y.shape.rank == 2:
        shown["labels"] = y[0][weight[0] > 0]
    for name, ids in shown.items():
        tokens = " ".join(tokenizer.id_to_token(number) for number in ids.numpy().tolist())
        print(f"the first sequence's {name}:\n{textwrap.indent(textwrap.fill(tokens, 110), '    ')}", flush=True)
    if model.compiled:
        steps = min(TRAINED, total_steps)
        model.fit(train, steps_per_epoch=steps, verbose=0)
        print(f"peak memory in the first {steps} step(s): {peak_memory_mb():,} MiB of host memory")
    return {}
