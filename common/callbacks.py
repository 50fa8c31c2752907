# SPDX-License-Identifier: Apache-2.0
"""Keras callbacks that every recipe's `fit` uses."""

import json
import time
from pathlib import Path

import keras
import tensorflow as tf


class StepLog(keras.callbacks.Callback):
    """Writes each step's own values to `steps.jsonl` and TensorBoard, and shows tokens per second in the progress bar.

    It needs a model whose `fit` gives a batch's own `loss`, `accuracy` and `tokens` (`keras_fixes.data_parallel`).

    - `steps.jsonl`: a line a step with `step` (from 1), `loss`, `learning_rate` (that the step used), `tokens`.
    - `tensorboard/`: `loss`, `accuracy`, `learning_rate` and `tokens_per_second` of each step under `train/`, `loss`
      and `accuracy` of each epoch under `validation/`, and the configuration as text.

    Args:
        workdir: the run's folder.
        config: shown as text in TensorBoard; a dict.
        first_step: steps that the run had done before.
        last_step: `fit` ends after this step, in the middle of an epoch too.

    Attributes:
        step: steps done.
        learning_rates: those used, by step of this process.
        tokens_per_second, seconds: of the steps of this process but the first, which holds the compilation.
        padding_fraction: share of the places for tokens that held none.
    """

    def __init__(self, workdir: Path, config: dict, last_step: int, first_step: int = 0):
        super().__init__()
        self.step = first_step
        self.last_step = last_step
        self.learning_rates = []
        self.seconds = 0.0
        self._tokens = self._all_tokens = self._slots = 0
        self._lines = (workdir / "steps.jsonl").open("a", encoding="utf-8")
        self._board = tf.summary.create_file_writer(str(workdir / "tensorboard"))
        with self._board.as_default(step=first_step):
            tf.summary.text("config", "\n".join(f"    {name} = {value!r}" for name, value in config.items()))

    @property
    def tokens_per_second(self) -> float:
        """Padding not counted; 0 after a single step."""
        return self._tokens / self.seconds if self.seconds else 0.0

    @property
    def padding_fraction(self) -> float:
        """Between 0 and 1."""
        return 1 - self._all_tokens / self._slots

    def on_train_batch_begin(self, batch, logs=None):
        """Notes the rate that the step will use."""
        self._began = time.perf_counter()
        self.learning_rates.append(float(self.model.optimizer.learning_rate))

    def on_train_batch_end(self, batch, logs=None):
        """Writes the step's values, and puts tokens per second into the progress bar in place of tokens."""
        seconds = time.perf_counter() - self._began
        self.step += 1
        tokens = int(logs.pop("tokens"))
        self._all_tokens += tokens
        self._slots += int(logs.pop("slots"))
        if len(self.learning_rates) > 1:
            self._tokens += tokens
            self.seconds += seconds
        logs["tokens_per_second"] = tokens / seconds
        rate = self.learning_rates[-1]
        line = {"step": self.step, "loss": float(logs["loss"]), "learning_rate": rate, "tokens": tokens}
        self._lines.write(json.dumps(line) + "\n")
        with self._board.as_default(step=self.step):
            for name, value in (logs | {"learning_rate": rate}).items():
                tf.summary.scalar(f"train/{name}", value)
        self.model.stop_training = self.step >= self.last_step

    def on_epoch_end(self, epoch, logs=None):
        """Writes the validation's values."""
        for name in ("tokens", "slots", "val_tokens", "val_slots"):
            logs.pop(name, None)
        with self._board.as_default(step=self.step):
            for name in ("loss", "accuracy"):
                if f"val_{name}" in logs:
                    tf.summary.scalar(f"validation/{name}", logs[f"val_{name}"])
        self._lines.flush()
        self._board.flush()

    def on_train_end(self, logs=None):
        """Flushes both files."""
        self._lines.flush()
        self._board.flush()
