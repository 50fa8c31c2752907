# SPDX-License-Identifier: Apache-2.0
"""Saving a run so that nothing is lost, and going on with it as if it had never stopped.

A checkpoint holds the model and the optimizer. It needs no more: the optimizer's step count is the position in the data
and in the schedule, order, masks and dropout are functions of it, and `steps.jsonl` is the record of the steps.
"""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

from common.cluster import is_chief
from common.command_line import UserError
from common.rendezvous import exchange

KEEP = 3


class Checkpoints:
    """Saves a run every so many steps, and when SIGTERM asks the process to stop.

    Schedulers send SIGTERM some time before they kill. As a context, it listens: `with checkpoints:`. A loop that finds
    `told_to_stop` finishes its step and calls `save_and_leave`; with several workers, all must, after the same step.

    Args:
        workdir: the run's folder; checkpoints go to `checkpoints/` there, the last three are kept.
        every: steps between two checkpoints.
        objects: by name, what is saved: the model, and the optimizer once it is built.

    Attributes:
        told_to_stop: whether SIGTERM has come.
        saved_step: of the newest checkpoint; 0 where there is none.
    """

    def __init__(self, workdir: Path, every: int, **objects):
        super().__init__()
        self.every = every
        self.saved_step = 0
        self.told_to_stop = False
        checkpoint = tf.train.Checkpoint(**objects)
        self.manager = tf.train.CheckpointManager(checkpoint, str(workdir / "checkpoints"), KEEP)

    def restore(self, init_fn: Callable[[], None] = lambda: None) -> int:
        """Takes up the newest checkpoint that can be read, and returns its step; 0 where there is none.

        Args:
            init_fn: called where there is none, such as to load the weights that the run starts from.

        Raises:
            UserError: when there are checkpoints, and none can be read.
        """
        self._remove_unfinished()
        for path in reversed(self.manager.checkpoints):
            try:
                self.manager.checkpoint.restore(path).assert_existing_objects_matched()
                self.saved_step = int(path.rsplit("-", 1)[1])
                break
            except (tf.errors.OpError, AssertionError, ValueError, IndexError) as error:
                print(f"The checkpoint {path} is damaged ({type(error).__name__}): going back to the one before it.")
        else:
            if self.manager.checkpoints:
                raise UserError(f"no checkpoint in {self.manager.directory} can be read; --overwrite starts afresh")
            init_fn()
        steps = [theirs["step"] for theirs in exchange({"step": self.saved_step})]
        if len(set(steps)) > 1:
            raise UserError(f"the workers have found different checkpoints in {self.manager.directory}: steps {steps}")
        return self.saved_step

    def save(self, step: int) -> None:
        """Writes a checkpoint, whole or not at all. A full disk is told of, and leaves the last good one."""
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

    def save_if_due(self, step: int, steps: int = 1) -> None:
        """Saves if it is time to after the step; `steps` have been done since it was last asked."""
        if step // self.every > (step - steps) // self.every:
            self.save(step)

    def save_and_leave(self, step: int) -> None:
        """Saves, and ends the process with status 143.

        Raises:
            SystemExit: 143.
        """
        self.save(step)
        exchange({})  # the others wait until the chief has saved
        print(f"\nStopped by SIGTERM after step {step}. The same command goes on from there.")
        raise SystemExit(128 + signal.SIGTERM)

    def __enter__(self):
        self._handler = signal.getsignal(signal.SIGTERM)
        if self._handler != signal.SIG_IGN:  # who started this process wants it to go on
            signal.signal(signal.SIGTERM, lambda *_: setattr(self, "told_to_stop", True))
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGTERM, self._handler)

    def _remove_unfinished(self) -> None:
        if is_chief():
            for folder in Path(self.manager.directory).glob("*_temp"):
                shutil.rmtree(folder)


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
