# SPDX-License-Identifier: Apache-2.0
"""Checkpointing a run, and resuming it as if it had never been interrupted.

A checkpoint holds the model and the optimizer. It needs no more: the optimizer's step count is the position in the data
and in the learning-rate schedule; data order, masks and dropout are functions of it; `steps.jsonl` records the steps.
"""

import shutil
import signal
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from common.files import flush
from common.run import command_line
from common.run.run_folder import afresh, discard_replaced
from keras_replicas.cluster import is_chief, num_workers
from keras_replicas.errors import UserError, first_line
from keras_replicas.workers import agree, exchange

KEEP = 3


class Checkpoints:
    """Saves a run at regular intervals, and on SIGTERM.

    Schedulers send SIGTERM some time before they kill a job. In a block `with checkpoints:`, it sets `told_to_stop`; a
    loop then finishes its step and calls `save_and_leave`, after the same step on all workers.

    Args:
        workdir: the run's folder; its last three checkpoints are kept.
        every: steps between two checkpoints.
        objects: what is saved, by name: the model, and the optimizer once it is built.

    Attributes:
        told_to_stop: whether SIGTERM was received.
        saved_step: the step of the latest checkpoint; 0 if there is none.
    """

    def __init__(self, workdir: Path, every: int, **objects):
        super().__init__()
        self.workdir, self.folder, self.every = workdir, workdir / "checkpoints", every
        self.saved_step, self.told_to_stop = 0, False
        self._objects, self._checkpoint = objects, tf.train.Checkpoint(**objects)
        self._damaged: list[int] = []

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, from the files themselves: a list of them could be lost."""
        names = [path.stem.removeprefix("ckpt-") for path in self.folder.glob("ckpt-*.index")]
        return sorted(int(name) for name in names if name.isdecimal())

    def restore(self, init_fn: Callable[[], None] = lambda: None) -> int:
        """Restores the latest readable checkpoint, and returns its step; without one, calls `init_fn` and returns 0.

        Raises:
            UserError: when there are checkpoints, but none is readable or they are of a different model; when a
                worker's checkpoint or weights differ from the chief's.
        """
        self._remove_unfinished()
        self._damaged = []
        for step in reversed(self.steps()):
            try:
                self._checkpoint.read(self._prefix(step)).assert_existing_objects_matched()
                self.saved_step = step
                break
            except (AssertionError, ValueError) as error:  # never from damage: all that is read has a checksum
                raise UserError(
                    f"the model does not match the checkpoint {self._prefix(step)} ({first_line(error)}). "
                    f"Give the --model or the --preset that the run was started with, or {afresh(self.workdir)}"
                ) from error
            except (tf.errors.OpError, IndexError) as error:
                self._damaged.append(step)
                damage = f"is damaged ({type(error).__name__}): falling back to the previous one."
                print(f"The checkpoint {self._prefix(step)} {damage}")
        else:
            if self._damaged:
                raise UserError(f"no checkpoint in {self.folder} can be read: {afresh(self.workdir)}")
            init_fn()
        if num_workers() > 1:  # presets of the same name may differ between hosts
            variables = [v for held in self._objects.values() for v in getattr(held, "variables", [held])]
            own = {"checkpoint of step": self.saved_step, "checksum of the weights": checksum(variables)}
            agree(own, f"starts from different weights than the chief: {self.folder} or the preset differs")
        return self.saved_step

    def save(self, step: int) -> None:
        """Writes a checkpoint atomically, and deletes the run that `--overwrite` moved aside.

        A full disk is reported, and leaves the last good checkpoint.
        """
        if step == self.saved_step or not is_chief():
            return
        tf.summary.flush()  # the default writer's events: saved steps are not done again, and so not shown again
        try:
            if (record := self.workdir / "steps.jsonl").exists():
                flush(record)  # once a checkpoint is on the disk, so are the lines of its steps
            self._checkpoint.write(self._prefix(step))
            for path in self.folder.glob(f"ckpt-{step}.*"):
                flush(path)
        except (tf.errors.OpError, OSError) as error:
            self._remove(step)
            self._remove_unfinished()
            why = str(error).splitlines()[0].rsplit("; ", 1)[-1].split(" [Op:")[0]  # without the path and the operation
            print(
                f"\nThe checkpoint of step {step} could not be written ({why}). "
                f"The last good one is of step {self.saved_step}.",
                flush=True,
            )
        else:
            self.saved_step = step
            self._remove_old()
            discard_replaced(self.workdir)

    def save_if_due(self, step: int, steps: int = 1) -> None:
        """Saves if a checkpoint is due; `steps` were done since the last call."""
        if step // self.every > (step - steps) // self.every:
            self.save(step)

    def save_and_leave(self, step: int) -> None:
        """Saves, and raises `SystemExit` with status 143."""
        self.save(step)
        exchange({})  # the others wait until the chief has saved
        by = "Ctrl-C" if command_line.ctrl_c_pressed else "SIGTERM"
        print(f"\nStopped by {by} after step {step}. The same command resumes from there.")
        raise SystemExit(128 + signal.SIGTERM)

    def __enter__(self):
        self._handler = signal.getsignal(signal.SIGTERM)
        if self._handler != signal.SIG_IGN:  # else the parent process wants it ignored
            signal.signal(signal.SIGTERM, lambda *_: setattr(self, "told_to_stop", True))
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGTERM, self._handler)

    def _prefix(self, step: int) -> str:
        return str(self.folder / f"ckpt-{step}")

    def _remove_old(self) -> None:
        """Deletes all but the latest readable checkpoints, now that one more is complete."""
        self._damaged = [step for step in self._damaged if step != self.saved_step]
        readable = [step for step in self.steps() if step not in self._damaged]
        for step in {*self._damaged, *readable[:-KEEP]} - {self.saved_step}:
            self._remove(step)

    def _remove(self, step: int) -> None:
        for pattern in ("index", "data-*"):  # in this order: a checkpoint with an index has its data
            for path in self.folder.glob(f"ckpt-{step}.{pattern}"):
                path.unlink()

    def _remove_unfinished(self) -> None:
        if is_chief():
            for folder in self.folder.glob("ckpt-*_temp"):
                shutil.rmtree(folder)
            for path in self.folder.glob("ckpt-*.data-*"):
                if not (self.folder / f"{path.stem}.index").exists():
                    path.unlink()


def checksum(variables: Iterable[Any]) -> int:
    """The CRC-32 of all values, one variable after the other."""
    crc32 = 0
    for variable in variables:
        crc32 = zlib.crc32(np.ascontiguousarray(variable.numpy()).tobytes(), crc32)
    return crc32
