# SPDX-License-Identifier: Apache-2.0
"""Steps per second of the Controller, of Keras's fit and of Orbit, driving the same step of the same Keras 3 model.

    pip install --no-deps --target ORBIT tf-models-official==2.20.0 tf_keras==2.21.0
    PYTHONPATH=ORBIT python -m benchmarks.controller

Orbit needs Keras 2 (`tf_keras`), and its package 40 others, so it is in a folder of its own, without them. All run in
turn, in one process, for several rounds. Writes `benchmarks/results/controller.json`: steps per second of each round.
"""

import os

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbit
import tensorflow as tf
import tf_keras
from common.data.text_batches import EncodedTexts
from common.data.wordpiece import WordPieces
from common.run.controller import Controller
from common.run.step_log import RunLog

from common.data.labelled import Examples, LabelledTexts
from common.model.classifier import make_preprocessor
from common.training import CrossEntropy
from common.training import make_optimizer
from common.training import Scaled
from keras_replicas import distribute, make_strategy
from recipes.glue_controller import Config, GlueTrainer, build_model

ROOT = Path(__file__).parent.parent
ROUNDS, STEPS, STEPS_PER_LOOP = 9, 100, 50
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = WordPieces([*SPECIAL, *map(str, range(4091))], lowercase=True, strip_accents=True)
LENGTH = 64  # tokens of every example


class OrbitTrainer(orbit.StandardTrainer):
    """The step of `GlueTrainer`, in the form that Orbit wants."""

    def __init__(self, strategy, model, dataset):
        self.strategy, self.model = strategy, model
        self.global_step = tf.Variable(0, dtype=tf.int64)
        with strategy.scope():
            self.loss, self.accuracy = tf_keras.metrics.Mean("loss"), tf_keras.metrics.Mean("accuracy")
        super().__init__(dataset)

    def train_loop_begin(self):
        """See Orbit."""
        self.loss.reset_state()
        self.accuracy.reset_state()

    def train_step(self, iterator):
        """See Orbit."""

        def replica_step(batch):
            values = GlueTrainer._replica_step(self, *batch)
            self.loss.update_state(values["loss"])
            self.accuracy.update_state(values["accuracy"])

        self.strategy.run(replica_step, args=(next(iterator),))
        self.global_step.assign_add(1)

    def train_loop_end(self):
        """See Orbit."""
        return {"loss": self.loss.result(), "accuracy": self.accuracy.result()}


def main() -> None:
    """Measures, prints the medians, and writes the file."""
    strategy = make_strategy()
    with tempfile.TemporaryDirectory() as folder:
        contenders = make_contenders(strategy, Path(folder))
        rates = {name: [] for name in contenders}
        for train in contenders.values():
            train(STEPS_PER_LOOP)  # traces
        for _ in range(ROUNDS):
            for name, train in contenders.items():
                began = time.perf_counter()
                train(STEPS)
                rates[name].append(round(STEPS / (time.perf_counter() - began), 2))
    fit = np.median(rates["fit"])
    for name, measured in rates.items():
        print(f"{name:30} {np.median(measured):6.1f} steps/s  {np.median(measured) / fit:.2f} of fit's")
    (ROOT / "benchmarks/results/controller.json").write_text(json.dumps(rates, indent=2) + "\n")


def make_contenders(strategy: tf.distribute.Strategy, folder: Path) -> dict[str, Callable[[int], None]]:
    """Functions, by name, that train a given number of further steps."""
    draw = np.random.default_rng(0)
    ids = draw.integers(5, 4096, (4096, LENGTH)).astype(np.int32)
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    texts = LabelledTexts(["no", "yes"], {"train": Examples([], list(draw.integers(0, 2, 4096)), [])}, "")
    data = EncodedTexts(texts, make_preprocessor("", VOCABULARY, LENGTH), {"train": inputs}, few_lengths=False)

    def parts():
        with strategy.scope():
            model = build_model(Config(seq_length=LENGTH), data, 1e-4)
        batches = distribute(strategy, data.stream("train", Scaled(16, 32), 0))
        return model, batches

    def by_fit(steps_per_execution: int):
        model, dataset = parts()
        with strategy.scope():
            model.compile(
                make_optimizer("adamw", 1e-4, 0.01),
                CrossEntropy("mean_with_sample_weight"),
                steps_per_execution=steps_per_execution,
            )
        return lambda steps: model.fit(dataset, steps_per_epoch=steps, verbose=0)

    model, dataset = parts()
    log = RunLog(folder, 10**6)
    log.begin(first_step=0)
    controller = Controller(trainer=GlueTrainer(strategy, model, dataset, log), steps_per_loop=STEPS_PER_LOOP)
    model, dataset = parts()
    trainer = OrbitTrainer(strategy, model, dataset)
    orbits = orbit.Controller(
        trainer=trainer, global_step=trainer.global_step, steps_per_loop=STEPS_PER_LOOP, strategy=strategy
    )
    return {
        "fit": by_fit(1),
        f"fit, {STEPS_PER_LOOP} steps in a call": by_fit(STEPS_PER_LOOP),
        "Orbit": lambda steps: orbits.train(int(trainer.global_step) + steps),
        "Controller": lambda steps: controller.train(controller.global_step + steps),
    }


if __name__ == "__main__":
    main()
