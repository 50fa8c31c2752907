# SPDX-License-Identifier: Apache-2.0
"""A line for each step of a run."""

import contextlib
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_replicas.cluster import is_chief

LONGEST = 2**16  # characters of a line; a longer one is none of ours


class StepLog(keras.callbacks.Callback):
    """Writes each step's own values to `steps.jsonl`, where the logs that callbacks get hold the epoch's means so far.

    A line is an object with `step`, counted from 1, and the values of `step_values`: `loss`, metrics (Keras's own) and
    `learning_rate`, as it was used; null for NaN and infinity, and for the loss of a `train_step` of your own that
    does not call `compute_loss`. A `fit` that `Checkpoints` resumes from step n keeps the lines up to n; any other
    begins a new file. Of several workers, the chief alone writes. It needs a model of `data_parallel`.

    Args:
        folder: where `steps.jsonl` is; created if missing.

    Attributes:
        step: steps that have a line.
    """

    def __init__(self, folder: str | os.PathLike):
        super().__init__()
        self.path, self.step = Path(folder) / "steps.jsonl", 0
        self._file: Any = None

    def begin(self, first_step: int) -> list[dict[str, Any]]:
        """Opens the file, and returns the lines of the steps up to `first_step`, which are kept."""
        lines = _whole_lines(self.path, first_step) if first_step else {}
        kept = dict(sorted(lines.items()))
        if len(kept) < first_step:  # after a power cut
            lost = first_step - len(kept)
            logging.getLogger(__package__).warning("%s lacks the lines of %d of %d steps.", self.path, lost, first_step)
        self.step = first_step
        if is_chief():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # In one step, so that a kill never loses the lines of saved steps.
            _write_whole(self.path, "".join(f"{line}\n" for line in kept.values()))
        self._file = (self.path if is_chief() else Path(os.devnull)).open("a", encoding="utf-8", buffering=1)
        return [read_line(line) for line in kept.values()]

    def write(self, values: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """Writes the lines of the steps of one call, and returns them.

        Args:
            values: for each entry of a line but `step` a vector [steps].
        """
        lines = []
        for i in range(len(next(iter(values.values())))):
            self.step += 1
            lines.append(
                {"step": self.step} | {name: np.asarray(vector[i]).tolist() for name, vector in values.items()}
            )
            finite = {name: value if math.isfinite(value) else None for name, value in lines[-1].items()}
            self._file.write(json.dumps(finite) + "\n")
        return lines

    def on_train_begin(self, logs=None):
        """Opens the file."""
        self.begin(self.model.steps_done)

    def on_train_batch_end(self, batch, logs=None):
        """Writes the lines of the steps since the last call."""
        self.write(self.model.step_values or {"loss": np.full(self.model.steps_in_call, np.nan)})

    def on_train_end(self, logs=None):
        """Closes the file."""
        self._file.close()


def read_line(line: str) -> dict[str, Any]:
    """A line's entries, with NaN for null."""
    return {name: math.nan if value is None else value for name, value in json.loads(line).items()}


def _whole_lines(path: Path, last: int) -> dict[int, str]:
    """The complete lines up to step `last`; a power cut may have lost some, or a part of one."""
    lines = {}
    with path.open(encoding="utf-8", errors="replace") if path.exists() else contextlib.nullcontext() as file:
        for line in iter(lambda: file.readline(LONGEST), "") if file else ():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                entries = json.loads(line)
                is_number = all(isinstance(value, int | float | None) for value in entries.values())
                if is_number and isinstance(entries["step"], int) and 1 <= entries["step"] <= last:
                    lines[entries["step"]] = line.rstrip("\n")
    return lines


def _write_whole(path: Path, text: str) -> None:
    """Writes atomically: a reader never finds half a file, not even after a power cut."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or the new name could be on the disk before the text
    os.replace(unfinished, path)
