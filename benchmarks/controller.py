# SPDX-License-Identifier: Apache-2.0
"""Steps per second of the Controller, of Keras's fit and of Orbit, driving the same step of the same Keras 3 model.

    pip install --no-deps --target ORBIT tf-models-official==2.20.0 tf_keras==2.21.0
    PYTHONPATH=ORBIT python -m benchmarks.controller

Orbit needs Keras 2 (`tf_keras`), and its package 40 others, so it is in a folder of its own, without them. All run in
turn, in one process, for several rounds. Writes `benchmarks/results/controller.json`: steps per second of each round.
"""

import os

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import keras_hub
import numpy as np
import orbit
import tensorflow as tf
import tf_keras

from common.controller import Controller, Evaluator
from common.data.examples import EncodedTexts
from common.data.labelled import Examples, LabelledTexts
from common.log import RunLog
from common.model.classifier import make_preprocessor
from common.training import CrossEntropy, adamw
from keras_replicas import Checkpoints, data_parallel, distribute, make_strategy
from recipes.glue_controller import Config, GlueTrainer, build_model

ROOT = Path(__file__).parent.parent
ROUNDS, STEPS, STEPS_PER_LOOP = 9, 100, 50
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(4091))]
LENGTH = 64  # tokens of every example


class OrbitTrainer(orbit.StandardTrainer):
    """The step of `GlueTrainer`, in the form that Orbit wants."""

    def __init__(self, strategy, model, optimizer, dataset):
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self.loss_sum = CrossEntropy(reduction="sum")
        self.global_step = tf.Variable(0, dtype=tf.int64)
        with strategy.scope():
            self.loss = tf_keras.metrics.Mean("loss")
        super().__init__(dataset)

    def train_loop_begin(self):
        """See Orbit."""
        self.loss.reset_state()

    def train_step(self, iterator):
        """See Orbit."""

        def replica_step(batch):
            values = GlueTrainer.train_step(self, *batch)
            self.loss.update_state(values["loss"])

        self.strategy.run(replica_step, args=(next(iterator),))
        self.global_step.assign_add(1)

    def train_loop_end(self):
        """See Orbit."""
        return {"loss": self.loss.result()}


class Unevaluated(Evaluator):
    """Takes no time."""

    def evaluate(self):
        """Does nothing."""
        return {}


class Unsaved(Checkpoints):
    """Takes no time."""

    def save(self, step):
        """Does nothing."""


def main() -> None:
    """Measures, prints the medians, and writes the file."""
    strategy = make_strategy()
    with tempfile.TemporaryDirectory() as folder:
        contenders = make_contenders(strategy, Path(folder))
        rates = {name: [] for name in contenders}
        for train in contenders.values():
            with contextlib.redirect_stdout(io.StringIO()):
                train(STEPS_PER_LOOP)  # traces
        for _ in range(ROUNDS):
            for name, train in contenders.items():
                began = time.perf_counter()
                with contextlib.redirect_stdout(io.StringIO()):
                    train(STEPS)
                rates[name].append(round(STEPS / (time.perf_counter() - began), 2))
    fit = np.median(rates["fit"])
    for name, measured in rates.items():
        print(f"{name:30} {np.median(measured):6.1f} steps/s  {np.median(measured) / fit:.2f} of fit's")
    (ROOT / "benchmarks/results/controller.json").write_text(json.dumps(rates, indent=2) + "\n")


def make_contenders(strategy: tf.distribute.Strategy, folder: Path) -> dict[str, Callable[[int], None]]:
    """Functions, by name, that train a given number of further steps."""
    draw = np.random.default_rng(0)
    texts = [(" ".join(map(str, draw.integers(0, 4091, LENGTH))),) for _ in range(4096)]  # cut to LENGTH
    labelled = LabelledTexts(["no", "yes"], {"train": Examples(texts, draw.integers(0, 2, 4096).tolist(), [])})
    words = keras_hub.models.BertTokenizer(PIECES)
    data = EncodedTexts(labelled, make_preprocessor("", words, LENGTH))
    train = data.batches("train", 32, 0)

    def parts():
        with strategy.scope():
            model, optimizer = build_model(Config(seq_length=LENGTH), data), adamw(1e-4)
            optimizer.build(model.trainable_variables)
        return model, optimizer

    def by_fit(steps_per_execution: int):
        with strategy.scope():
            model = data_parallel(build_model(Config(seq_length=LENGTH), data))
            loss = CrossEntropy(reduction="mean_with_sample_weight")
            model.compile(adamw(1e-4), loss, steps_per_execution=steps_per_execution)
        batches = distribute(strategy, train)
        return lambda steps: model.fit(batches, steps_per_epoch=steps, verbose=0)

    model, optimizer = parts()
    log = RunLog(folder, train)
    controller = Controller(
        GlueTrainer(strategy, train, model, optimizer, labelled.classes),
        Unevaluated(strategy, train),
        Unsaved(folder / "checkpoints", model=model, optimizer=optimizer),
        log,
        steps_per_loop=STEPS_PER_LOOP,
    )
    trainer = OrbitTrainer(strategy, *parts(), distribute(strategy, train))
    orbits = orbit.Controller(
        trainer=trainer, global_step=trainer.global_step, steps_per_loop=STEPS_PER_LOOP, strategy=strategy
    )
    return {
        "fit": by_fit(1),
        f"fit, {STEPS_PER_LOOP} steps in a call": by_fit(STEPS_PER_LOOP),
        "Orbit": lambda steps: orbits.train(int(trainer.global_step) + steps),
        "Controller": lambda steps: controller.train_and_evaluate(controller.global_step + steps, steps),
    }


if __name__ == "__main__":
    main()
