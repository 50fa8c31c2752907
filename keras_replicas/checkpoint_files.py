# SPDX-License-Identifier: Apache-2.0
"""The files of checkpoints: a kill at any moment leaves the last whole one.

A checkpoint of step n is `ckpt-n.index` and `ckpt-n.data-*`, by `tf.train.Checkpoint`. What is written last, the index,
makes it one.
"""

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_replicas.cluster import is_chief
from keras_replicas.errors import UserError
from keras_replicas.fit_state import from_bytes

DAMAGE = (tf.errors.OpError, IndexError, OSError)  # what reading a damaged file raises
STATE = "state/.ATTRIBUTES/VARIABLE_VALUE"  # TensorFlow's name in a checkpoint for its variable `state`

log = logging.getLogger("keras_replicas")


class CheckpointFiles:
    """The checkpoints in a folder.

    Args:
        folder: created if missing.
        keep: how many to keep.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self._keep, self._damaged = folder, keep, list[int]()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, from the files themselves: a list of them could be lost."""
        names = [path.stem.removeprefix("ckpt-") for path in self.folder.glob("ckpt-*.index")]
        return sorted(int(name) for name in names if name.isdecimal())

    def read_state(self, name: str) -> dict[str, Any]:
        """The state of a `fit` in a checkpoint. Raises one of `DAMAGE` when it is damaged or missing.

        Raises:
            UserError: when it is something else.
        """
        content = tf.train.load_checkpoint(str(self.folder / name)).get_tensor(STATE)
        try:
            return from_bytes(content)
        except ValueError as error:
            raise UserError(f"{self.folder / name} is no checkpoint of this library ({error}): remove it") from error

    def restore(self, checkpoint: tf.train.Checkpoint) -> int:
        """Restores the latest readable checkpoint, and returns its step; 0 if there is none.

        Raises:
            UserError: when there are some, and none can be read; or they are of another model.
        """
        if is_chief():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot write to {self.folder} ({error.strerror}): give another folder") from error
            self._remove_unfinished()
        self._damaged = []
        for step in reversed(self.steps()):
            try:
                self.read(f"ckpt-{step}", checkpoint)
                return step
            except DAMAGE as error:
                self._damaged.append(step)
                log.warning("The checkpoint of step %d in %s is damaged (%s).", step, self.folder, type(error).__name__)
        if self._damaged:
            raise UserError(f"all checkpoints in {self.folder} are damaged: remove that folder to start afresh")
        return 0

    def read(self, name: str, checkpoint: tf.train.Checkpoint) -> None:
        """Restores the variables of a checkpoint.

        Raises:
            ValueError: when they are of another model. One of `DAMAGE`, when the files are damaged or missing.
        """
        try:
            checkpoint.read(str(self.folder / name)).assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.InvalidArgumentError) as error:
            reason = str(error).splitlines()[0]
            if isinstance(error, tf.errors.InvalidArgumentError) and not re.search("shape|dtype", reason):
                raise  # damage; the others never come of it, for all that is read has a checksum
            raise UserError(
                f"the model does not match the checkpoint {self.folder / name} ({reason}). "
                "Give the model that the run was started with, or another folder"
            ) from error

    def write(self, name: str, checkpoint: tf.train.Checkpoint) -> bool:
        """Writes a checkpoint, or nothing; whether it is on the disk. A full disk is reported."""
        try:
            checkpoint.write(str(self.folder / name))
            for path in self.folder.glob(f"{name}.*"):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        except (tf.errors.OpError, OSError) as error:
            self._remove(name)
            self._remove_unfinished()
            why = str(error).splitlines()[0].rsplit("; ", 1)[-1].split(" [Op:")[0]  # without the path and the operation
            message = "The checkpoint %s could not be written (%s). The last good one is of step %d."
            log.error(message, name, why, max(self.steps(), default=0))
            return False
        return True

    def remove_old(self, saved_step: int) -> None:
        """Keeps the latest readable checkpoints, now that one more is complete, and removes the others."""
        self._damaged = [step for step in self._damaged if step != saved_step]
        readable = [step for step in self.steps() if step not in self._damaged]
        for step in {*self._damaged, *readable[: -self._keep]} - {saved_step}:
            self._remove(f"ckpt-{step}")

    def _remove_unfinished(self) -> None:
        """Removes what killed processes have left. Call it only while no other process writes there."""
        for folder in (*self.folder.glob("ckpt-*_temp"), *self.folder.glob("end_temp")):
            shutil.rmtree(folder)
        for path in self.folder.glob("*.data-*"):
            if not (self.folder / f"{path.stem}.index").exists():
                path.unlink()

    def _remove(self, name: str) -> None:
        for pattern in ("index", "data-*"):  # in this order: a checkpoint with an index has the rest
            for path in self.folder.glob(f"{name}.{pattern}"):
                path.unlink()
