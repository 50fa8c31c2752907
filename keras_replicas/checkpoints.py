# SPDX-License-Identifier: Apache-2.0
"""Exact resume: a run that was killed goes on as if it had not been.

A checkpoint holds the values of all variables and, of a `fit`, what else the rest of the run depends on: see
`fit_state.py`.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_replicas import fit_state
from keras_replicas.batches import checksum
from keras_replicas.checkpoint_files import DAMAGE, CheckpointFiles
from keras_replicas.cluster import LAUNCH_ID, is_chief, num_workers
from keras_replicas.optimizers import variables_of_optimizer
from keras_replicas.workers import agree, exchange

log = logging.getLogger("keras_replicas")
_completed: dict[Path, list[int]] = {}  # by folder, the steps of each fit that this process has completed


class Checkpoints(keras.callbacks.Callback):
    """Saves a `fit` at regular steps, and resumes it to the bit where it was interrupted, even within an epoch.

    Run the same program again: `fit` restores the latest checkpoint when it begins, and goes on from there. Weights,
    optimizer and History are then those of a run that was never interrupted. A `fit` that was completed returns its
    History at once. A second `fit` of a program, with the same folder, has checkpoints of its own. Where the callback
    stands among others does not matter. It needs a model of `data_parallel`.

    Saved too is the state of Keras's `EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint` and `SwapEMAWeights`, and
    of any callback with the methods `state_dict()`, which returns a dict that JSON can hold, and
    `load_state_dict(state)`; and the counts of batches of `TensorBoard`. A `CSVLogger` goes on with its file.

    Resumed to the bit are arrays, `Batches` and any `batches.BeginsAnywhere`; a `PyDataset` whose batches are
    functions of their numbers; a `tf.data.Dataset` that is the same in each pass, or is shuffled by a seed; a generator
    that yields the same again. Of the last two, what came before is read again.

    A loop that you write names what is to be saved, and calls `restore`, `save_if_due` and `save_and_leave`, the
    last when `told_to_stop` is set, inside `with checkpoints:`, which listens for SIGTERM.

    Args:
        folder: of the checkpoints; of one run alone.
        every: steps between two checkpoints; None for one at the end of each epoch only.
        keep: how many checkpoints to keep.
        max_steps: the step after which `fit` ends, even in the middle of an epoch; None for the end of the last epoch.
        trained_only: whether to leave out the weights that are not trained, which are large where adapters are; they
            must be the same when the run is resumed.
        exit_on_sigterm: whether, on SIGTERM, which schedulers send some time before they kill, `fit` saves after the
            same step on all workers, and raises `SystemExit(143)`; None for: where `python -m keras_replicas launch`
            has started this process.
        **objects: in a loop that you write, what is saved, such as `model=model, optimizer=optimizer`.

    Raises:
        ValueError: when a number is below 1. By `fit` and `restore`: when the checkpoints are of another model or other
            callbacks, data or steps in an epoch, when none can be read, when workers start from different checkpoints
            or weights, when the folder cannot be written.
        TypeError: by `fit`, for a model that is not of `data_parallel`.

    Attributes:
        told_to_stop: whether SIGTERM was received.
        saved_step: the step of the latest checkpoint; 0 if there is none.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        every: int | None = None,
        keep: int = 3,
        max_steps: int | None = None,
        trained_only: bool = False,
        exit_on_sigterm: bool | None = None,
        **objects: Any,
    ):
        super().__init__()
        for name, value in {"every": every, "keep": keep, "max_steps": max_steps}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.folder = Path(folder).absolute()
        self._files, self._keep = CheckpointFiles(self.folder, keep), keep
        self.every, self.max_steps, self._trained_only = every, max_steps, trained_only
        self._exits = LAUNCH_ID in os.environ if exit_on_sigterm is None else exit_on_sigterm
        self._objects, self._checkpoint = objects, tf.train.Checkpoint(**objects)
        self.saved_step, self._asked_at, self.told_to_stop = 0, 0, False
        # Of the fit that runs: its callbacks; its end, its seeds, facts of its data; what is resumed.
        self._callbacks = keras.callbacks.CallbackList()
        self._given: dict[str, Any] = {}
        self._state_variable: tf.Variable | None = None
        self._state: dict[str, Any] | None = None
        self._handler: Any = None  # of SIGTERM, before ours

    def restore(self, init_fn: Callable[[], None] = lambda: None) -> int:
        """Restores the latest readable checkpoint, and returns its step; without one, calls `init_fn` and returns 0."""
        self.saved_step = self._asked_at = self._files.restore(self._checkpoint)
        if not self.saved_step:
            init_fn()
        if num_workers() > 1:  # presets of the same name may differ between hosts
            variables = [v for held in self._objects.values() for v in getattr(held, "variables", held)]
            facts = {"checkpoint of step": self.saved_step, "checksum of the weights": checksum(variables)}
            agree(facts, f"starts from different weights than the chief, with the checkpoints in {self.folder}")
        return self.saved_step

    def save(self, step: int) -> None:
        """Writes a checkpoint of `step` steps, atomically. A full disk is reported, and leaves the last good one."""
        if step == self._asked_at:  # and not `saved_step`, which the chief alone has: all workers save together
            return
        self._asked_at = step
        tf.summary.flush()  # the default writer's events: saved steps are not done again, and so not shown again
        if self._write(f"ckpt-{step}"):
            self.saved_step = step
            self._files.remove_old(step)

    def _write(self, name: str) -> bool:
        """Has the chief write a checkpoint; whether it did."""
        if self._state_variable is not None:
            self._state_variable.assign(self._state_of_fit())  # which takes all workers
        return is_chief() and self._files.write(name, self._checkpoint)

    def save_if_due(self, step: int, steps: int = 1) -> None:
        """Saves if a checkpoint is due at `step`; `steps` were done since the last call."""
        if self.every and step // self.every > (step - steps) // self.every:
            self.save(step)

    def save_and_leave(self, step: int) -> None:
        """Saves at `step`, and raises `SystemExit` with status 143, after all workers have called it."""
        self.save(step)
        exchange({})  # the others wait until the chief has saved
        log.warning("Stopped by a signal after step %d. The same command resumes from there.", step)
        raise SystemExit(128 + signal.SIGTERM)

    def __enter__(self):
        self._handler = None
        if threading.current_thread() is threading.main_thread():  # no other may listen for signals
            self._handler = signal.getsignal(signal.SIGTERM)
            if self._handler != signal.SIG_IGN:  # else the parent process wants it ignored
                signal.signal(signal.SIGTERM, lambda *_: setattr(self, "told_to_stop", True))
        return self

    def __exit__(self, *_):
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)

    def set_model(self, model):
        """Takes the model of `data_parallel`. Raises a `TypeError` for any other."""
        if not hasattr(model, "at_epoch_end"):
            raise TypeError("Checkpoints needs a model of data_parallel: model = keras_replicas.data_parallel(model)")
        super().set_model(model)

    def listening(self) -> contextlib.AbstractContextManager:
        """Where SIGTERM is listened for, if it is to be."""
        return self if self._exits else contextlib.nullcontext()

    def open_fit(self, callbacks: keras.callbacks.CallbackList) -> dict[str, Any]:
        """Finds the checkpoints of the program's next `fit`; returns the state of one of them, or {}."""
        fit_state.refuse_other_savers(callbacks.callbacks)
        callbacks.callbacks.remove(self)
        callbacks.callbacks.append(self)  # the others have their state, and the History, when it is saved
        number = len(self._steps_before()) if (self.folder / "end.index").exists() else 0
        self._files = CheckpointFiles(self.folder / f"fit-{number + 1}" if number else self.folder, self._keep)
        self._callbacks, self._state = callbacks, None
        for name in ["end", *(f"ckpt-{step}" for step in reversed(self._files.steps()))]:
            with contextlib.suppress(*DAMAGE):
                return self._files.read_state(name)
        return {}

    def begin_fit(self, found: dict, end: list, seeds: dict[str, int], facts: dict) -> tuple[int, bool]:
        """Restores the `fit`; returns the step from which it goes on, and whether nothing is left to do.

        Args:
            found: what `open_fit` returned.
            end: the epochs and `max_steps` at which it ends.
            seeds: of data and noise, to be saved.
            facts: of the data; they must be those that it began with.
        """
        model = self.model
        variables = fit_state.variables_of(model, self._trained_only)
        of_optimizers = [each for one in fit_state.optimizers_of(model) for each in variables_of_optimizer(one)]
        self._objects = {"fit": variables, "optimizer": of_optimizers}
        self._state_variable = tf.Variable(b"")
        self._checkpoint = tf.train.Checkpoint(**self._objects, state=self._state_variable)
        facts |= fit_state.facts_of(model, self._trained_only) | {"steps of fits before": self._steps_before()}
        self._given, self.has_ended = {"end": end, "seeds": seeds, "facts": facts}, False
        fit_state.refuse_other_facts(self._files.folder, found.get("facts", {}), facts)
        with contextlib.suppress(*DAMAGE):
            at_end = self._files.read_state("end")
            if at_end["end"] == end:
                self._files.read("end", self._checkpoint)
                self._state, self.has_ended = at_end, True
        step = at_end["step"] if self.has_ended else self.restore()
        if step and not self.has_ended:
            self._state = self._files.read_state(f"ckpt-{step}")
        if step:
            self._append_to_csv_files()
        if self.has_ended:
            log.warning("The fit in %s is complete: nothing is trained. Give another folder to train.", self.folder)
        return step, self.has_ended or bool(self._state and self._state["stopped"])

    def _append_to_csv_files(self) -> None:
        """Keeps the rows that a `CSVLogger` has written before the run was interrupted."""
        for callback in self._callbacks.callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True

    def end_fit(self) -> None:
        """Notes that the `fit` is complete, with the weights that it ends with."""
        if self.has_ended:
            self._files.read("end", self._checkpoint)
        else:
            self._write("end")
        exchange({})
        _completed[self.folder.resolve()] = [*self._steps_before(), self.model.steps_done]

    def _steps_before(self) -> list[int]:
        return _completed.get(self.folder.resolve(), [])

    def _state_of_fit(self) -> bytes:
        model = self.model
        metrics = [] if model.at_epoch_end else [variable.numpy() for variable in model._metric_variables()]
        state = {"step": model.steps_done, "metrics": metrics, "stopped": model.stop_training}
        state["callbacks"] = fit_state.state_of(self._callbacks.callbacks)
        return fit_state.to_bytes(self._given | state)

    def on_train_begin(self, logs=None):
        """Restores the callbacks, after their own beginning."""
        if self._state:
            fit_state.restore_callbacks(self._callbacks.callbacks, self._state["callbacks"])

    def on_epoch_begin(self, epoch, logs=None):
        """Restores the metrics of an epoch that was interrupted."""
        metrics, self._state = (self._state or {}).get("metrics"), None
        if metrics:
            fit_state.assign_sums(self.model.distribute_strategy, self.model._metric_variables(), metrics)

    def on_train_batch_begin(self, batch, logs=None):
        """Tells the model whether this worker was asked to stop."""
        self.model.told_to_stop = self.told_to_stop

    on_test_batch_begin = on_train_batch_begin  # all workers agree to stop in a validation, too

    def on_train_batch_end(self, batch, logs=None):
        """Saves if due, and leaves if asked to; after the last step of an epoch, that waits for the epoch's end."""
        if not self.model.at_epoch_end and not self.model.stop_training:
            self.save_if_due(self.model.steps_done, steps=self.model.steps_in_call)
            if self.model.all_told_to_stop:
                self.save_and_leave(self.model.steps_done)

    def on_epoch_end(self, epoch, logs=None):
        """Saves, and leaves if asked to."""
        self.save(self.model.steps_done)
        if self.model.all_told_to_stop:
            self.save_and_leave(self.model.steps_done)
