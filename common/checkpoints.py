# SPDX-License-Identifier: Apache-2.0
"""Saving a run so that nothing is lost, and going on with it as if it had never stopped.

A checkpoint holds the model and the optimizer. It needs no more: the optimizer's step count is the position in the data
and in the schedule, order, masks and dropout are functions of it, and `steps.jsonl` is the record of the steps.
"""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

from common.cluster import is_chief
from common.command_line import UserError
from common.rendezvous import exchange

KEEP = 3


class Checkpoints(keras.callbacks.Callback):
    """Saves during `fit`: every so many steps, at each epoch's end, and when SIGTERM asks the process to stop.

    Schedulers send SIGTERM some time before they kill. The step at hand is then finished and saved, and the process
    ends with status 143; with several workers, all do, after the same step. Only the chief writes.

    Args:
        workdir: the run's folder; checkpoints go to `checkpoints/` there, the last three are kept.
        model: of `keras_fixes.data_parallel`, which counts its steps; compiled, so that its optimizer has variables.
        every: steps between two checkpoints; where several are done in one call, the first call's end after them.
    """

    def __init__(self, workdir: Path, model: keras.Model, every: int):
        super().__init__()
        self.set_model(model)
        self.every = every
        self.saved_step = 0
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        self.manager = tf.train.CheckpointManager(checkpoint, str(workdir / "checkpoints"), KEEP)

    def restore(self) -> int:
        """Takes up the newest checkpoint that can be read, and returns its step; 0 where there is none.

        Raises:
            UserError: when there are checkpoints, and none can be read.
        """
        self._remove_unfinished()
        for path in reversed(self.manager.checkpoints):
            try:
                self.manager.checkpoint.restore(path).assert_existing_objects_matched()
                self.model.steps_done = self.saved_step = int(path.rsplit("-", 1)[1])
                break
            except (tf.errors.OpError, AssertionError, ValueError, IndexError) as error:
                print(f"The checkpoint {path} is damaged ({type(error).__name__}): going back to the one before it.")
        else:
            if self.manager.checkpoints:
                raise UserError(f"no checkpoint in {self.manager.directory} can be read; --overwrite starts afresh")
        steps = [theirs["step"] for theirs in exchange({"step": self.saved_step})]
        if len(set(steps)) > 1:
            raise UserError(f"the workers have found different checkpoints in {self.manager.directory}: steps {steps}")
        return self.saved_step

    def save(self) -> None:
        """Writes a checkpoint, whole or not at all. A full disk is told of, and leaves the last good one."""
        step = self.model.steps_done
        if step == self.saved_step or not is_chief():
            return
        try:
            self.manager.save(checkpoint_number=step)
            self.saved_step = step
        except (tf.errors.OpError, OSError) as error:
            self._remove_unfinished()
            why = str(error).splitlines()[0].rsplit("; ", 1)[-1].split(" [Op:")[0]  # without TensorFlow's own places
            print(
                f"\nNo checkpoint of step {step} ({why}). The last good one is of step {self.saved_step}.",
                flush=True,
            )

    def on_train_begin(self, logs=None):
        """Listens for SIGTERM while `fit` runs."""
        self._handler = signal.signal(signal.SIGTERM, lambda *_: setattr(self.model, "told_to_stop", True))

    def on_train_batch_end(self, batch, logs=None):
        """Saves where it is time to."""
        last_call = self.model.steps_done - len(self.model.step_values["loss"])
        if self.model.steps_done // self.every > last_call // self.every:
            self.save()
        self._stop_if_told()

    def on_test_batch_end(self, batch, logs=None):
        """Stops where asked to, in a validation too."""
        self._stop_if_told()

    def on_epoch_end(self, epoch, logs=None):
        """Saves."""
        self.save()

    def on_train_end(self, logs=None):
        """Gives SIGTERM back its meaning."""
        signal.signal(signal.SIGTERM, self._handler)

    def _remove_unfinished(self) -> None:
        if is_chief():
            for folder in Path(self.manager.directory).glob("*_temp"):
                shutil.rmtree(folder)

    def _stop_if_told(self) -> None:
        if self.model.all_told_to_stop:
            self.save()
            exchange({})  # the others wait until the chief has saved
            print(f"\nStopped by SIGTERM after step {self.model.steps_done}. The same command goes on from there.")
            raise SystemExit(128 + signal.SIGTERM)


def epochs_left(step: int, steps_per_epoch: int, last_step: int) -> Iterator[dict[str, int]]:
    """Arguments of the calls of `fit` that are left: the rest of an epoch, all whole ones, and the last one's part.

    Keras's `fit` cannot shorten its first or last epoch alone.

    Args:
        step: steps done.
        steps_per_epoch: steps in a whole epoch.
        last_step: where the run ends.
    """
    while step < last_step:
        epoch, done = divmod(step, steps_per_epoch)
        steps = min(steps_per_epoch - done, last_step - step)
        epochs = (last_step - step) // steps_per_epoch if steps == steps_per_epoch else 1
        yield {"initial_epoch": epoch, "epochs": epoch + epochs, "steps_per_epoch": steps}
        step += epochs * steps
