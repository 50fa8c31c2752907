# SPDX-License-Identifier: Apache-2.0
"""A log line per step, from which a run's results are computed."""

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from common.run.speed import UNKNOWN, ModelFlops, peak_memory_mb
from common.training.explicit_step import COUNTS, MEANS
from keras_replicas import StepLog, UserError, is_chief


class RunLog(StepLog):
    """Writes each step's own values to `steps.jsonl`, the log of a run; see `keras_replicas.StepLog`.

    A line has `step` (from 1), `loss`, `accuracy` (but not for regression), `learning_rate` (the one that was used),
    `labels` (over which loss and accuracy are means), `tokens`, and `slots`, the token positions including padding;
    null for NaN and infinity.

    Args:
        workdir: the run's folder.
        steps_per_epoch: steps over which an epoch's means are taken.
        flops: what MFU is computed from.

    Attributes:
        first_step: steps done before this process; `step`: steps done.
        learning_rate: the `first`, `peak` and `last` rate that steps used.
        epoch: means of `loss` and `accuracy` over the labels of the epoch's steps so far; NaN if there are none.
        padding_fraction: fraction of token positions that were padding.
        seconds, tokens_per_second: time of this process's steps, except its first call, which includes compilation;
            throughput without padding.
        speed: the last call's `tokens_per_second`, `mfu` and `peak_memory_mb`.
    """

    def __init__(self, workdir: Path, steps_per_epoch: int, flops: ModelFlops = UNKNOWN):
        super().__init__(workdir)
        self.workdir, self.steps_per_epoch, self.flops, self.first_step = workdir, steps_per_epoch, flops, 0
        self.learning_rate: dict[str, float] = {}
        self.speed: dict[str, float] = {}
        self.seconds = self.tokens_per_second = 0.0
        self._is_compiled, self._timed_tokens, self._tokens, self._slots = False, 0, 0, 0
        self._epoch, self._epoch_labels, self._epoch_totals = -1, 0, {"loss": 0.0}

    def begin(self, first_step: int) -> list[dict[str, Any]]:
        """Opens the log, and counts what it holds. Raises a `UserError` if it has none of the steps before."""
        self.first_step, kept = first_step, super().begin(first_step)
        if first_step and is_chief() and not kept:
            raise UserError(
                f"{self.path} has no line of the {first_step} steps that this run has completed. "
                f"Restore it, or give another --workdir, or remove {self.workdir} to start afresh"
            )
        for line in kept:
            self._count(line)
        return kept

    def announce(self, model: keras.Model, last_step: int) -> None:
        """Prints what is about to be trained, and from which step to which."""
        steps = f"{last_step} steps, {self.steps_per_epoch} per epoch"
        print(f"{model.count_params():,} parameters in {keras.config.dtype_policy().name}; {steps}")
        where = f"resuming from step {self.step}" if self.step else f"monitor it: tensorboard --logdir {self.workdir}"
        print(where, flush=True)

    @property
    def epoch(self) -> dict[str, float]:
        """See the class."""
        return {name: total / (self._epoch_labels or math.nan) for name, total in self._epoch_totals.items()}

    @property
    def padding_fraction(self) -> float:
        """See the class."""
        return 1 - self._tokens / self._slots

    def record(self, values: dict[str, np.ndarray], seconds: float) -> dict[str, float]:
        """Writes the lines of the steps of one call.

        Args:
            values: a vector for each entry of a line but `step`, with one value per step.
            seconds: duration of the call.

        Returns:
            Means of `loss` and `accuracy` over the steps' labels, the last `learning_rate`, and `speed`.
        """
        tokens = int(values["tokens"].sum())
        self.speed = {
            "tokens_per_second": tokens / seconds,
            "mfu": self.flops.utilisation(tokens / seconds),
            "peak_memory_mb": peak_memory_mb(),
        }
        if self._is_compiled:
            self.seconds += seconds
            self._timed_tokens += tokens
            self.tokens_per_second = self._timed_tokens / self.seconds
        self._is_compiled = True
        means = {name: vector for name, vector in values.items() if name in (*MEANS, "learning_rate")}
        for line in self.write(means | {name: values[name].astype(int) for name in COUNTS}):
            self._count(line)
        labels = values["labels"] if values["labels"].any() else None
        averages = {name: float(np.average(values[name], weights=labels)) for name in MEANS if name in values}
        return averages | {"learning_rate": float(values["learning_rate"][-1])} | self.speed

    def _count(self, line: dict) -> None:
        epoch = (line["step"] - 1) // self.steps_per_epoch
        if epoch != self._epoch:
            self._epoch, self._epoch_labels = epoch, 0
            self._epoch_totals = {name: 0.0 for name in MEANS if name in line}
        self._epoch_labels += line["labels"]
        for name in self._epoch_totals:
            self._epoch_totals[name] += line[name] * line["labels"]
        rate = line["learning_rate"]
        first, peak = (self.learning_rate.get(name, rate) for name in ("first", "peak"))
        self.learning_rate = {"first": first, "peak": max(peak, rate), "last": rate}
        self._tokens += line["tokens"]
        self._slots += line["slots"]


def open_board(workdir: Path, config: dict, first_step: int) -> tf.summary.SummaryWriter:
    """TensorBoard's writer to the run's `tensorboard/`, with the configuration as text. Only the chief writes."""
    if not is_chief():
        return tf.summary.create_noop_writer()
    board = tf.summary.create_file_writer(str(workdir / "tensorboard"))
    with board.as_default(step=first_step):
        tf.summary.text("config", "\n".join(f"    {name} = {value!r}" for name, value in config.items()))
    return board
