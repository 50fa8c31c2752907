# SPDX-License-Identifier: Apache-2.0
"""Keras callbacks that every recipe's `fit` uses. They need a model of `keras_replicas.model`."""

import importlib.util
import time
from pathlib import Path

import keras
import tensorflow as tf
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from common.run.options import step_range
from common.run.speed import UNKNOWN, ModelFlops
from common.run.step_log import RunLog, open_board
from common.training.explicit_step import COUNTS, MEANS
from keras_replicas import is_chief


class FitLog(RunLog):
    """A `RunLog` of `fit`, in TensorBoard too; the progress bar shows tokens per second.

    `tensorboard/` holds each step's `loss`, `accuracy`, `learning_rate` and entries of `RunLog.speed` under `train/`,
    each epoch's `loss` and `accuracy` under `validation/`, and `config` as text; `board` is its writer.

    Args:
        workdir, steps_per_epoch, flops: see `RunLog`.
        total_steps: steps of the whole run.
        config: shown as text.
    """

    def __init__(
        self, workdir: Path, steps_per_epoch: int, total_steps: int, config: dict, flops: ModelFlops = UNKNOWN
    ):
        super().__init__(workdir, steps_per_epoch, flops)
        self._total_steps, self._config = total_steps, config

    def on_train_begin(self, logs=None):
        """Opens the log, and prints what is about to be trained."""
        super().on_train_begin(logs)
        self.board = open_board(self.workdir, self._config, self.step)
        self.announce(self.model, self._total_steps)

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Writes the steps' values; in the progress bar, tokens per second replace the counts."""
        seconds = time.perf_counter() - self._began
        values = self.model.step_values
        self.record(values, seconds)
        for name in COUNTS:
            del logs[name]
        logs["tokens_per_second"] = self.speed["tokens_per_second"]
        shown = {name: values[name] for name in (*MEANS, "learning_rate") if name in values}
        shown |= {name: [value] * len(values["loss"]) for name, value in self.speed.items()}
        for i in range(len(values["loss"])):
            # One event for all scalars, as one for each takes longer: Protobuf messages in a row are one message.
            scalars = [scalar_pb(f"train/{name}", vector[i]) for name, vector in shown.items()]
            event = b"".join(scalar.SerializeToString() for scalar in scalars)
            with self.board.as_default(step=self.step - len(values["loss"]) + i + 1):
                tf.summary.experimental.write_raw_pb(event)

    def on_epoch_end(self, epoch, logs=None):
        """Writes the validation's values, if any; the epoch's means include its steps before a restart."""
        for name in COUNTS:
            del logs[name]
            logs.pop(f"val_{name}", None)
        logs |= self.epoch
        with self.board.as_default(step=self.step):
            for name in self.epoch:
                if f"val_{name}" in logs:
                    tf.summary.scalar(f"validation/{name}", logs[f"val_{name}"])

    def on_train_end(self, logs=None):
        """Flushes TensorBoard's file."""
        super().on_train_end(logs)
        self.board.flush()


class Profile(keras.callbacks.Callback):
    """Traces steps of `fit`, counted from 1, for TensorBoard's profile tab; the steps of one call are traced together.

    Args:
        workdir: the run's folder.
        steps: a range such as `10-20`; empty for none.
    """

    def __init__(self, workdir: Path, steps: str):
        super().__init__()
        self.logdir, self.steps = str(workdir / "tensorboard"), step_range(steps)
        self._tracing = self._traced = False

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the trace, and marks the step in it."""
        first = self.model.steps_done + 1
        last = self.model.steps_done + self.model.steps_per_execution
        if is_chief() and not self._tracing and first < self.steps.stop and last >= self.steps.start:
            tf.profiler.experimental.start(self.logdir)
            self._tracing = self._traced = True
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
        """Ends the trace if `fit` ends before the trace's last step; says so if none of the steps was run."""
        if self.steps and not self._traced and is_chief():
            print(
                f"\nNone of the steps {self.steps.start}-{self.steps.stop - 1} was run: there is no trace.", flush=True
            )
        if self._tracing:
            tf.profiler.experimental.stop()
            self._tracing = False
            plugin = importlib.util.find_spec("tensorboard_plugin_profile")
            missing = "" if plugin else ", which needs a package: pip install tensorboard-plugin-profile"
            print(f"\nA trace is in {self.logdir}, for TensorBoard's profile tab{missing}.", flush=True)
