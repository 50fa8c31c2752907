# SPDX-License-Identifier: Apache-2.0
"""Uploads a run's models to the Hugging Face Hub, while it trains and at its end; and their model cards."""

import atexit
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from huggingface_hub import ModelCard, ModelCardData

from keras_replicas import is_chief

OWN = ("*.json", "*.h5", "assets/*", "README.md")  # a preset's files, not one that the user has put there
TASKS = {"fill-mask": "MaskedLM", "text-generation": "CausalLM", "text-classification": "TextClassifier"}


class Publish(keras.callbacks.Callback):
    """Saves a snapshot at each epoch's end during `fit`, and uploads it in the background; then `finish` the model.

    An upload is a process of its own, `hf upload`: it ends with this one, even if it hangs. While one runs, no other
    snapshot is made. A failed upload is a line, and does not stop the run. Only the chief saves and uploads.

    Args:
        uri: `hf://user/name`; empty for no snapshots and no uploads.
        public: whether a new repository is public rather than private. An existing one keeps its visibility.
        folder: the run's; the last snapshot is in `snapshot/` in it, the finished model in `preset/`.
        save: `save(folder)` writes the model as a preset to a folder, which it creates; on the chief alone.
        patience: seconds for which `finish` waits.
    """

    def __init__(self, uri: str, public: bool, folder: Path, save: Callable[[Path], Any], patience: float = 1800):
        super().__init__()
        self.uri, self.folder, self.save, self.patience = uri if is_chief() else "", folder / "snapshot", save, patience
        self.preset = folder / "preset"
        self.visibility = "--no-private" if public else "--private"
        self.upload: subprocess.Popen[str] | None = None
        atexit.register(self._stop)

    def on_epoch_end(self, epoch, logs=None):
        """Saves a snapshot, and begins to upload it. A full disk is reported."""
        if not self.uri or (self.upload and self.upload.poll() is None):
            return
        if why := self._failure(self.patience):
            print(f"\nA snapshot was not uploaded ({why}); the next one is tried.", flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        told = f"A snapshot after epoch {epoch + 1} of a model that is still training: the finished one replaces it."
        try:
            self.save(self.folder)
            (self.folder / "README.md").write_text(card(self.uri, "", told, logs or {}), encoding="utf-8")
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            print(f"\nThe snapshot of epoch {epoch + 1} could not be written ({error}).", flush=True)
        else:
            self._start(self.folder)

    def finish(self, task: str, results: dict[str, Any]) -> None:
        """Saves the finished model with its card, uploads it, and waits for that. A failure is reported, not raised.

        Args:
            task, results: `task` and `values` of `card`.
        """
        self.save(self.preset)
        if is_chief():
            told = card(self.uri or str(self.preset), task, "", results)
            (self.preset / "README.md").write_text(told, encoding="utf-8")
        if not self.uri:
            return
        self._stop()
        print(f"\nuploading to {self.uri}", flush=True)
        words = self._start(self.preset)
        if why := self._failure(self.patience):
            print(f"The run is complete, but not uploaded ({why}). To try again:\n    hf {words}", flush=True)

    def _start(self, folder: Path) -> str:
        words = ["upload", self.uri.removeprefix("hf://"), str(folder), self.visibility]
        own = [word for pattern in OWN for word in ("--include", pattern)]
        hf = [sys.executable, "-m", "huggingface_hub.cli.hf", *words, *own, "--quiet"]
        quiet = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
        nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE
        self.upload = subprocess.Popen(hf, stdin=nowhere, stdout=nowhere, stderr=pipe, env=quiet, text=True)
        return shlex.join(words)

    def _failure(self, seconds: float) -> str:
        """Why the last upload failed, for which it waits so long; empty if it did not."""
        if not self.upload:
            return ""
        try:
            lines = self.upload.communicate(timeout=seconds)[1].splitlines()
        except subprocess.TimeoutExpired:
            self._stop()
            return f"no answer in {seconds:g} s"
        errors = [line for line in lines if "Error" in line and not line.startswith(" ")]
        return (errors or [f"exit status {self.upload.returncode}"])[-1] if self.upload.returncode else ""

    def _stop(self) -> None:
        if self.upload and self.upload.poll() is None:
            self.upload.kill()
            self.upload.wait()


def card(uri: str, task: str, summary: str, values: dict[str, Any]) -> str:
    """A model card, the `README.md` of a preset.

    Args:
        uri: where the model is: `hf://user/name`, or its folder in that of a run.
        task: the Hub's name for what it does: `fill-mask`, `text-generation`, `text-classification`; empty for none.
        summary: the first paragraph.
        values: what a table tells of it: losses and their baselines, steps, data, versions. Of a path, which is
            private, it has the last part only.
    """
    data = ModelCardData(library_name="keras-hub", pipeline_tag=task or None, tags=["keras"])
    name = Path(uri).name if uri.startswith("hf://") else Path(uri).absolute().parent.name
    table = "".join(f"| {name.replace('_', ' ')} | {_told(value)} |\n" for name, value in values.items())
    text = f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n{summary}\n\n| | |\n| --- | --- |\n{table}"
    if task:
        text += f"""
Losses are in nats per label. A model below a baseline has learned more from the context than it. It repeats the errors
and biases of its data: it is for learning and for comparing trainings, not for decisions, or texts of another kind.

```python
import keras_hub  # where the repository is private, after `hf auth login`

model = keras_hub.models.{TASKS[task]}.from_preset("{uri}")
```
"""
    return str(ModelCard(text))


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(each)}" for name, each in value.items())
    if isinstance(value, str) and not value.startswith("hf://"):
        return Path(value).name
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
