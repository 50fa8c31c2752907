# SPDX-License-Identifier: Apache-2.0
"""Keras callbacks that every recipe's `fit` uses. They need a model of `keras_replicas.model`."""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from common.run.checkpoints import Checkpoints, checksum
from common.run.options import step_range
from common.run.run_folder import afresh
from common.run.speed import UNKNOWN, ModelFlops
from common.run.step_log import StepLog, open_board
from common.training.explicit_step import COUNTS, MEANS
from keras_replicas.cluster import is_chief
from keras_replicas.errors import UserError


class FitLog(StepLog, keras.callbacks.Callback):
    """A `StepLog` of `fit`, in TensorBoard too; the progress bar shows tokens per second.

    `tensorboard/` holds each step's `loss`, `accuracy`, `learning_rate` and entries of `StepLog.speed` under `train/`,
    each epoch's `loss` and `accuracy` under `validation/`, and `config` as text; `board` is its writer.
    """

    def __init__(
        self, workdir: Path, config: dict, steps_per_epoch: int, first_step: int = 0, flops: ModelFlops = UNKNOWN
    ):
        super().__init__(workdir, steps_per_epoch, first_step, flops)
        self.board = open_board(workdir, config, first_step)

    def on_train_begin(self, logs=None):
        """Prints what is about to be trained."""
        self.announce(self.model, self.model.last_step or self.params["epochs"] * self.steps_per_epoch)

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
        self.board.flush()


class FitCheckpoints(Checkpoints, keras.callbacks.Callback):
    """`Checkpoints` during `fit`: at regular intervals, at each epoch's end, and on SIGTERM.

    After an epoch's last step, saving and stopping wait for the validation and for the callbacks before this one: pass
    it to `fit` last. A run that is killed meanwhile repeats some steps, and then the validation and callbacks too.

    Args:
        workdir: the run's folder.
        model: compiled, so that its optimizer has variables.
        every: steps between two checkpoints; with several steps per call, it saves at the end of the call.
        only_trained: leave out the weights that are not trained, which are large where adapters are trained: they are
            read from the preset again. A checkpoint holds their checksum.
    """

    def __init__(self, workdir: Path, model: keras.Model, every: int, only_trained: bool = False):
        super().__init__(workdir, every, model=model, optimizer=model.optimizer)
        self._others = checksum(weight for weight in model.weights if not weight.trainable) if only_trained else 0
        self._saved_with = tf.Variable(self._others, dtype=tf.int64, trainable=False)
        if only_trained:
            parts = {"trained": model.trainable_variables, "others": self._saved_with}
            self._checkpoint = tf.train.Checkpoint(optimizer=model.optimizer, **parts)
        self.set_model(model)

    def restore(self, init_fn: Callable[[], None] = lambda: None) -> int:
        """As `Checkpoints.restore`; the model then counts its steps from there.

        Raises:
            UserError: also when the weights that a checkpoint leaves out differ from those it was saved with.
        """
        self.model.first_step = super().restore(init_fn)
        if self._saved_with.numpy() != self._others:
            told = "the preset's weights are not those that the checkpoint's adapters are of: give that --preset, or"
            raise UserError(f"{told} {afresh(self.workdir)}")
        return self.model.first_step

    def on_train_begin(self, logs=None):
        """Listens for SIGTERM while `fit` runs."""
        self.__enter__()

    def on_train_batch_begin(self, batch, logs=None):
        """Tells the model whether this worker was asked to stop."""
        self.model.told_to_stop = self.told_to_stop

    on_test_batch_begin = on_train_batch_begin

    def on_train_batch_end(self, batch, logs=None):
        """Saves if due, and stops if asked to, but not after an epoch's last step."""
        if not self.model.at_epoch_end:
            self.save_if_due(self.model.steps_done, steps=len(self.model.step_values["loss"]))
            self._leave_if_told()

    def on_epoch_end(self, epoch, logs=None):
        """Saves, and stops if asked to."""
        self.save(self.model.steps_done)
        self._leave_if_told()

    def _leave_if_told(self) -> None:
        if self.model.all_told_to_stop:
            self.save_and_leave(self.model.steps_done)

    def on_train_end(self, logs=None):
        """Restores the previous handler of SIGTERM."""
        self.__exit__()


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
