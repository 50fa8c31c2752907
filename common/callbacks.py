# SPDX-License-Identifier: Apache-2.0
"""Keras callbacks that every recipe's `fit` uses."""

import importlib.util
import json
import os
import time
from pathlib import Path

import keras
import tensorflow as tf

from common.cluster import is_chief

COUNTS = ("labels", "tokens", "slots")


class StepLog(keras.callbacks.Callback):
    """Writes each step's own values to `steps.jsonl` and TensorBoard, and shows tokens per second in the progress bar.

    It needs a model of `keras_fixes.data_parallel`, which keeps each step's own values. Of several workers, only the
    chief writes.

    - `steps.jsonl`: a line a step with `step` (from 1), `loss`, `accuracy`, `learning_rate` (that the step used),
      `labels` (over which the loss is the mean), `tokens`, and `slots`, the places for tokens. It is the record that
      results are computed from: a run that goes on from step n keeps n lines of it.
    - `tensorboard/`: `loss`, `accuracy`, `learning_rate` and `tokens_per_second` of each step under `train/`, `loss`
      and `accuracy` of each epoch under `validation/`, and the configuration as text.

    Args:
        workdir: the run's folder.
        config: shown as text in TensorBoard; a dict.
        steps_per_epoch: steps over which an epoch's means are taken.
        first_step: steps that the run has done before.

    Attributes:
        first_step: see above.
        step: steps done.
        learning_rate: the `first`, `peak` and `last` that steps used.
        epoch: means of `loss` and `accuracy` over the labels of the epoch's steps so far.
        padding_fraction: share of the places for tokens that held none.
        seconds, tokens_per_second: of this process's steps but its first call, which holds the compilation; padding not
            counted.
    """

    def __init__(self, workdir: Path, config: dict, steps_per_epoch: int, first_step: int = 0):
        super().__init__()
        self.first_step = self.step = first_step
        self.steps_per_epoch = steps_per_epoch
        self.learning_rate = {}
        self.seconds = self.tokens_per_second = 0.0
        self._calls = self._timed_tokens = self._tokens = self._slots = 0
        self._epoch_labels, self._epoch_totals = 0, {"loss": 0.0, "accuracy": 0.0}
        if not is_chief():
            self._lines = Path(os.devnull).open("w")  # noqa: SIM115
            self._board = tf.summary.create_noop_writer()
            return
        path = workdir / "steps.jsonl"
        kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[:first_step] if first_step else []
        for line in kept:
            self._count(json.loads(line))
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(kept), encoding="utf-8")
        os.replace(unfinished, path)  # at once, so that a kill never takes lines of steps that are saved
        self._lines = path.open("a", encoding="utf-8", buffering=1)
        self._board = tf.summary.create_file_writer(str(workdir / "tensorboard"))
        with self._board.as_default(step=first_step):
            tf.summary.text("config", "\n".join(f"    {name} = {value!r}" for name, value in config.items()))

    @property
    def epoch(self) -> dict[str, float]:
        """See the class."""
        return {name: total / self._epoch_labels for name, total in self._epoch_totals.items()}

    @property
    def padding_fraction(self) -> float:
        """See the class."""
        return 1 - self._tokens / self._slots

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Writes the steps' values; in the progress bar, tokens per second take the place of the counts."""
        seconds = time.perf_counter() - self._began
        values = self.model.step_values
        tokens = int(values["tokens"].sum())
        self._calls += 1
        if self._calls > 1:
            self.seconds += seconds
            self._timed_tokens += tokens
            self.tokens_per_second = self._timed_tokens / self.seconds
        for name in COUNTS:
            del logs[name]
        logs["tokens_per_second"] = tokens / seconds
        for i in range(len(values["loss"])):
            self.step += 1
            means = {name: float(values[name][i]) for name in ("accuracy", "loss", "learning_rate")}
            line = {"step": self.step, **means, **{name: int(values[name][i]) for name in COUNTS}}
            self._lines.write(json.dumps(line) + "\n")
            self._count(line)
            with self._board.as_default(step=self.step):
                for name, value in (means | {"tokens_per_second": tokens / seconds}).items():
                    tf.summary.scalar(f"train/{name}", value)

    def on_epoch_end(self, epoch, logs=None):
        """Writes the validation's values; the epoch's means are of all its steps, those before a restart too."""
        for name in COUNTS:
            del logs[name], logs[f"val_{name}"]
        logs |= self.epoch
        with self._board.as_default(step=self.step):
            for name in self.epoch:
                tf.summary.scalar(f"validation/{name}", logs[f"val_{name}"])

    def on_train_end(self, logs=None):
        """Flushes TensorBoard's file."""
        self._board.flush()

    def _count(self, line: dict) -> None:
        if (line["step"] - 1) % self.steps_per_epoch == 0:
            self._epoch_labels = 0
            self._epoch_totals = {"loss": 0.0, "accuracy": 0.0}
        self._epoch_labels += line["labels"]
        for name in self._epoch_totals:
            self._epoch_totals[name] += line[name] * line["labels"]
        rate = line["learning_rate"]
        past = self.learning_rate
        self.learning_rate = {"first": past.get("first", rate), "peak": max(past.get("peak", rate), rate), "last": rate}
        self._tokens += line["tokens"]
        self._slots += line["slots"]


class Profile(keras.callbacks.Callback):
    """Traces some steps of `fit` for TensorBoard's profile tab.

    It needs a model of `keras_fixes.data_parallel`, which counts its steps. Steps that are done in one call are traced
    together.

    Args:
        workdir: the run's folder; the trace goes to `tensorboard/` there.
        steps: to be traced, counted from 1.
    """

    def __init__(self, workdir: Path, steps: range):
        super().__init__()
        self.logdir = str(workdir / "tensorboard")
        self.steps = steps
        self._tracing = False

    def on_train_batch_begin(self, batch, logs=None):
        """Begins the trace, and marks the step in it."""
        first = self.model.steps_done + 1
        last = self.model.steps_done + self.model.steps_per_execution
        if is_chief() and not self._tracing and first < self.steps.stop and last >= self.steps.start:
            tf.profiler.experimental.start(self.logdir)
            self._tracing = True
        if self._tracing:
            self._marked = tf.profiler.experimental.Trace("train", step_num=first, _r=1)
            self._marked.__enter__()

    def on_train_batch_end(self, batch, logs=None):
        """Ends the trace."""
        if self._tracing:
            self._marked.__exit__(None, None, None)
            if self.model.steps_done + 1 not in self.steps:
                self.on_train_end()

    def on_train_end(self, logs=None):
        """Ends the trace where `fit` ends before its last step."""
        if self._tracing:
            tf.profiler.experimental.stop()
            self._tracing = False
            plugin = importlib.util.find_spec("tensorboard_plugin_profile")
            missing = "" if plugin else ", which needs a package: pip install tensorboard-plugin-profile"
            print(f"\nA trace is in {self.logdir}, for TensorBoard's profile tab{missing}.", flush=True)
