# SPDX-License-Identifier: Apache-2.0
"""A run's log: a line for each step, TensorBoard, and what `results.json` says of the training."""

import importlib.metadata
import math
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_replicas import StepLog, is_chief, num_workers

from .run_folder import PACKAGES

LOOKED_AT = 100  # batches, of which tokens and padding are counted


class RunLog(StepLog):
    """A `StepLog` that shows each step's own values in TensorBoard, too, and measures throughput.

    `tensorboard/` holds each step's `loss`, metrics and `learning_rate` under `train/`. Keras's own `TensorBoard` would
    show the epoch's means so far.

    Args:
        folder: of the run.
        data: what is trained on: data that begins at any step, with `padding_mask` in x.

    Attributes:
        board: the writer to `tensorboard/`; only the chief's writes.
    """

    def __init__(self, folder: Path, data: Any):
        super().__init__(folder)
        batches = [x["padding_mask"].numpy() for x, *_ in one_epoch(data).take(LOOKED_AT)]
        self._tokens_in_a_step = float(np.mean([mask.sum() for mask in batches]))
        self._padding = 1 - self._tokens_in_a_step / float(np.mean([mask.size for mask in batches]))
        self._steps_in_an_epoch, self._first_step = len(data), 0
        self._lines: list[dict[str, Any]] = []
        self._seconds, self._timed_steps, self._is_compiled = 0.0, 0, False
        path = str(folder / "tensorboard")
        self.board = tf.summary.create_file_writer(path) if is_chief() else tf.summary.create_noop_writer()

    def begin(self, first_step: int) -> list[dict[str, Any]]:
        """Opens the file, and returns the lines of the steps up to `first_step`, which are kept."""
        self._first_step, self._lines = first_step, super().begin(first_step)
        self.start_clock()
        return self._lines

    def start_clock(self) -> None:
        """Begins to measure: what was done since the last step does not count."""
        self._began = time.perf_counter()

    def write(self, values: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """Writes the lines of the steps of one call, and returns them; see `StepLog`."""
        lines = super().write(values)
        if self._is_compiled:
            self._seconds += time.perf_counter() - self._began
            self._timed_steps += len(lines)
        self._is_compiled = True
        self._lines += lines
        with self.board.as_default():
            for line in lines:
                for name, value in line.items():
                    if name != "step":
                        tf.summary.scalar(f"train/{name}", value, step=line["step"])
        self.start_clock()
        return lines

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        self.start_clock()

    def on_train_end(self, logs=None):
        """Closes the files."""
        super().on_train_end(logs)
        self.board.flush()

    def results(self, replicas: int) -> dict[str, Any]:
        """The part of `results.json` that every recipe has; see docs/what-a-run-leaves.md for what each entry means."""
        lines = self._lines or [{"learning_rate": math.nan, "loss": math.nan}]  # a power cut took them
        rates = [line["learning_rate"] for line in lines]
        losses = [line["loss"] for line in lines[-((self.step - 1) % self._steps_in_an_epoch + 1) :]]
        return {
            "replicas": replicas,
            "workers": num_workers(),
            "steps": self.step,
            "resumed_from_step": self._first_step or None,
            "seconds": round(self._seconds, 3),
            "tokens_per_second": round(self._timed_steps * self._tokens_in_a_step / (self._seconds or math.inf), 1),
            "padding_fraction": self._padding,
            "learning_rate": {"first": rates[0], "peak": max(rates), "last": rates[-1]},
            "train_loss": float(np.mean(losses)),
            "peak_memory_mb": round(peak_memory_mb()),
            "versions": {"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in PACKAGES},
            "hardware": hardware(),
        }


def one_epoch(data: Any) -> tf.data.Dataset:
    """The batches of an epoch of data that begins at any step, whole, as for one replica."""
    return data.iter_from_step(0, tf.distribute.InputContext(1, 0, 1)).take(len(data))


def peak_memory_mb() -> float:
    """Peak host memory of this process, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def hardware() -> dict[str, Any]:
    """The CPU's model, from Linux's `/proc/cpuinfo`, its cores, and the GPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    return {"cpu": cpu, "cores": os.cpu_count(), "gpus": [gpu.get("device_name") for gpu in gpus]}
