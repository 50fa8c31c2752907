# SPDX-License-Identifier: Apache-2.0
"""Uploads a run's models with their cards to the Hugging Face Hub, while it trains and at its end."""

import atexit
import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
from huggingface_hub import ModelCardData

from keras_replicas import is_chief

from .presets import save_task

OWN = [f"--include={name}" for name in ("*.json", "*.h5", "assets/*", "README.md")]  # nothing of the user's


class Publish(keras.callbacks.Callback):
    """Uploads a snapshot at each epoch's end, in the background, by `hf upload`; at the end, `save` and `finish`.

    An upload is a process that ends with this one, the chief's. While one runs, no other snapshot is made. If it fails,
    a line says so, its output is in `upload.log`, and the run goes on. It goes to the `uri`, `hf://user/name`, or
    nowhere if that is empty; a new repository is private unless `public`. Of the run's `folder`, `snapshot/` holds a
    snapshot, and `preset/` the finished model.
    """

    def __init__(self, uri: str, public: bool, folder: Path, preprocessor: Any):
        super().__init__()
        self.uri, self.folder, self.preprocessor = uri if is_chief() else "", folder, preprocessor
        self.words = ["upload", uri.removeprefix("hf://"), "--no-private" if public else "--private"]
        self.log, self.patience = folder / "upload.log", 1800  # seconds that the last upload may take
        self.upload: Any = None

    def on_epoch_end(self, epoch, logs=None):
        """Saves a snapshot, and begins to upload it. A full disk is reported."""
        if not self.uri or (self.upload and self.upload.poll() is None):
            return
        if self.upload and self.upload.returncode:
            print(f"\nA snapshot was not uploaded, see {self.log}.", flush=True)
        shutil.rmtree(snapshot := self.folder / "snapshot", ignore_errors=True)
        try:
            self.save(snapshot, None, {"in training, after epoch": epoch + 1} | (logs or {}))
            self._start(snapshot)
        except OSError as error:
            shutil.rmtree(snapshot, ignore_errors=True)
            print(f"\nThe snapshot of epoch {epoch + 1} could not be written ({error}).", flush=True)

    def save(self, folder: Path, task: str | None, values: dict[str, Any]) -> None:
        """Saves the model with a card of values; `task`: what it does, as the Hub calls it; None: it is in training."""
        save_task(self.model, self.preprocessor, folder)
        if is_chief():
            head = ModelCardData(library_name="keras-hub", pipeline_tag=task, tags=["keras"]).to_yaml()
            # Of a path, its last part, which tells nothing of whose machine it was.
            shown = re.sub(r'"[/~][^"\n]*?([^"/\n]*)/?"', r'"\1"', json.dumps(values, indent=4))
            card = f"---\n{head}\n---\n\n# {self.folder.name}\n\nLosses are in nats.\n\n```json\n{shown}\n```\n"
            (folder / "README.md").write_text(card, encoding="utf-8")

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Uploads the saved model, and waits; returns the results of the complete run."""
        if self.upload:
            self.upload.kill()
        if self.uri:
            self._start(self.folder / "preset")
            print(f"\nuploading to {self.uri}", flush=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.upload.wait(self.patience)
            if self.upload.returncode != 0:  # None: it hangs
                again = shlex.join(["hf", *self.upload.args[3:]])
                print(f"The run is complete, but not uploaded (see {self.log}). To try again:\n    {again}", flush=True)
        return results

    def _start(self, folder: Path) -> None:
        hf = [sys.executable, "-m", "huggingface_hub.cli.hf", *self.words, str(folder), *OWN, "--quiet"]
        with self.log.open("w") as log:
            self.upload = subprocess.Popen(hf, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        atexit.register(self.upload.kill)
