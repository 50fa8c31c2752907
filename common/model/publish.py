# SPDX-License-Identifier: Apache-2.0
"""Uploads a run's models to the Hugging Face Hub, in the background while it trains."""

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import keras
from huggingface_hub.utils import disable_progress_bars, logging

from common.files import PRESET
from common.model.model_card import Kind, snapshot_card
from keras_replicas import UserError, is_chief

KEEP = 3
GRACE = 10  # seconds that a process has for an orderly end while an upload hangs


class Publish(keras.callbacks.Callback):
    """Saves a snapshot at each epoch's end during `fit`, and uploads it in a thread while training continues.

    It needs a model of `data_parallel`, which counts its steps. One upload runs at a time; of the snapshots made
    meanwhile, the latest waits. A failed upload is reported in one line, and does not stop the run. Of several workers,
    only the chief saves and uploads.

    It is a context manager around `fit` and everything after it: at its exit it uploads the preset in `preset/`. After
    an error, the process exits soon, even if an upload hangs.

    Args:
        uri: `hf://user/name`; empty for no snapshots and no uploads.
        public: whether a new repository is public rather than private. An existing one keeps its visibility.
        workdir: the run's folder, which keeps the last three snapshots, in `snapshots/step-<n>/`.
        save: `save(folder, card=text)` writes the model as a preset, with a `README.md`, to a folder, which it creates.
        kind: the model's kind, for the snapshots' cards.
    """

    def __init__(self, uri: str, public: bool, workdir: Path, save: Callable[..., None], kind: Kind):
        super().__init__()
        self.kind = kind
        self.public = public
        self.uri = uri if is_chief() else ""
        self.folder, self.preset = workdir / "snapshots", workdir / "preset"
        self._save = save
        self._waiting: Path | None = None
        self._uploading: Path | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        if self.uri:  # progress bars and retry messages would mix with those of training
            disable_progress_bars()
            logging.set_verbosity_error()

    def on_train_batch_end(self, batch, logs=None):
        """Uploads the waiting snapshot, once the previous upload has ended."""
        self._upload_waiting()

    def on_epoch_end(self, epoch, logs=None):
        """Saves a snapshot, and uploads it now or later. A full disk is reported."""
        if not self.uri:
            return
        try:
            self._waiting = self._save_snapshot(logs or {})
        except OSError as error:
            print(f"\nThe snapshot of step {self.model.steps_done} could not be written ({error}).", flush=True)
        self._upload_waiting()
        self._remove_old()

    def finish(self, preset: Path) -> None:
        """Waits for the current upload, then uploads this folder's preset. A failure is reported, not raised."""
        if not self.uri:
            return
        print(f"\nuploading to {self.uri}", flush=True)
        self._waiting = preset  # in the place of a snapshot
        if self._thread:
            self._thread.join()
        self._upload_waiting()
        if self._thread:
            self._thread.join()
        if self._failure:
            private = "" if self.public else " --private"
            print(
                f"The run is complete, but not uploaded ({self._failure}). To try again:\n"
                f"    hf upload {self.uri.removeprefix('hf://')} {shlex.quote(str(preset))}{private}",
                flush=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            if error is None:
                self.finish(self.preset)
        except BaseException as late:
            self._leave_soon(late)
            raise
        if error:
            self._leave_soon(error)

    def _leave_soon(self, error: BaseException) -> None:
        if self._thread and self._thread.is_alive():
            # At its exit, Python waits for the threads of any pool, and huggingface_hub, if it does without Xet, sends
            # files from one: Python would wait for them as long as the Hub does not answer.
            status = error.code if isinstance(error, SystemExit) else 2 if isinstance(error, UserError) else 1
            threading.Thread(target=_leave_after_grace, args=(status,), daemon=True).start()

    def _save_snapshot(self, logs: dict[str, float]) -> Path:
        step = self.model.steps_done
        unfinished, whole = self.folder / "unfinished", self.folder / f"step-{step}"
        self.folder.mkdir(exist_ok=True)
        for folder in (unfinished, whole):  # left by a process that was killed
            shutil.rmtree(folder, ignore_errors=True)
        self._save(unfinished, card=snapshot_card(self.kind, self.uri, step, logs))
        return unfinished.rename(whole)

    def _remove_old(self) -> None:
        folders = [folder for folder in self.folder.glob("step-*") if folder.name.removeprefix("step-").isdecimal()]
        for folder in sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))[:-KEEP]:
            if folder != self._uploading:
                shutil.rmtree(folder)

    def _upload_waiting(self) -> None:
        if self._thread and not self._thread.is_alive():
            if self._failure:
                print(
                    f"\n{self._uploading} was not uploaded ({self._failure}); it is retried at the end of the run.",
                    flush=True,
                )
            self._thread = self._uploading = None
        if self._waiting and not self._thread:
            self._uploading, self._waiting = self._waiting, None
            self._failure = "stopped"
            self._thread = threading.Thread(target=self._upload, args=(self._uploading,), daemon=True)
            self._thread.start()

    def _upload(self, folder: Path) -> None:
        repository = self.uri.removeprefix("hf://")
        try:
            # Not by KerasHub's upload_preset, which makes a public repository, and overwrites our card with its own.
            huggingface_hub.create_repo(repository, private=not self.public, exist_ok=True)
            # Only our own files, not one that the user has put there.
            own = [*PRESET, "assets/*", "README.md"]
            huggingface_hub.upload_folder(repo_id=repository, folder_path=folder, allow_patterns=own)
            self._failure = None
        except Exception as error:  # whatever it is, training continues
            self._failure = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def _leave_after_grace(status: int) -> None:
    time.sleep(GRACE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
