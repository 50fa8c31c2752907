# SPDX-License-Identifier: Apache-2.0
"""Fine-tune BERT on labelled sentences or pairs of them, data-parallel, with a Controller.

    python -m recipes run glue_controller                          # generated pairs, no network needed
    python -m recipes run glue_controller --task mrpc --preset bert_base_en_uncased --batch-size 16

Time: 1 to 2 min on 2 cores. Metric: GLUE's for the task, on the validation split, against a bag-of-words baseline.

A Trainer says what a step is, an Evaluator how to evaluate, and the Controller does the rest, as in Orbit: many steps
in a call, checkpoints, summaries, an action on the best score. The recipe `glue_custom_loop` is the same in one loop.
"""

import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Annotated

from common.command_line import FIRST, FREE, Count, parse, quiet_stderr, run
from common.model.classifier_options import ClassifierOptions


@dataclass(frozen=True)
class Config(ClassifierOptions):
    """The options of `glue_controller`, in addition to those of every recipe."""

    workdir: Annotated[str, FIRST, FREE] = "runs/glue_controller"  # work directory; best/ has the best model
    steps_per_loop: Annotated[Count, FREE] = 100  # steps in one call, at most


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import numpy as np
    import tensorflow as tf

import keras_replicas as kr
from common.classification_scores import classifier_results, scores_of, told_of, write_predictions
from common.controller import Controller, Evaluator, Trainer, when_best
from common.data.examples import EncodedTexts
from common.data.labelled import open_examples
from common.data.vocabulary import train_wordpieces
from common.log import RunLog, print_plan, report
from common.model.classifier import make_classifier, make_preprocessor, save_classifier
from common.run_folder import open_run
from common.training import WarmUpPolynomialDecay, adamw, scale


def make_datasets(config: Config) -> EncodedTexts:
    """The texts of each split, and the model's inputs for them."""
    texts = open_examples(config.task, config.data, config.text_columns, config.label_column, config.regression)
    words = None if config.preset else train_wordpieces(texts.documents, texts.fingerprint, config.vocabulary_size)
    return EncodedTexts(texts, make_preprocessor(config.preset, words, config.seq_length))


def build_model(config: Config, data: EncodedTexts) -> keras.Model:
    """A text classifier, or for regression one with a single output. Call it inside the strategy's scope."""
    return make_classifier(config.preset, config.model or "tiny", data, config.dropout, config.lora_rank)


class GlueTrainer(Trainer):
    """A step: losses are summed, and divided once: replicas may have different numbers of examples."""

    def __init__(self, strategy, data, model: keras.Model, optimizer, classes: list[str]):
        super().__init__(strategy, data)
        self.model, self.optimizer = model, optimizer
        self.loss_sum = keras.losses.MeanSquaredError("sum")
        if classes:
            self.loss_sum = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def train_step(self, x, y, weight):
        """One replica's step; returns the batch's loss and the learning rate."""
        with kr.noise_of_step(self.model, self.optimizer.iterations), tf.GradientTape() as tape:
            loss = self.loss_sum(y, self.model(x, training=True), weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.model.trainable_variables)
        gradients, loss, total = kr.sum_over_replicas((gradients, loss, tf.reduce_sum(weight)))
        learning_rate = tf.identity(self.optimizer.learning_rate)
        gradients = [None if gradient is None else gradient / total for gradient in gradients]
        kr.apply_summed(self.optimizer, gradients, self.model.trainable_variables)
        return {"loss": loss / total, "learning_rate": learning_rate}


class GlueEvaluator(Evaluator):
    """The logits of every example of a split, in its order, and their scores."""

    def __init__(self, strategy, data: EncodedTexts, split: str, batch_size: int, model: keras.Model):
        super().__init__(strategy, data.batches(split, batch_size))
        self.model, self.texts, self.split = model, data.texts, split

    def eval_step(self, x, *labels):
        """Returns the rows of all replicas."""
        return kr.gather_over_replicas(self.model(x, training=False))

    def eval_end(self, outputs) -> dict[str, float]:
        """Keeps the logits, and returns the split's scores."""
        self.logits = np.concatenate(outputs)
        return scores_of(self.texts, self.split, self.logits)


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = kr.make_strategy(config.replicas, deterministic=config.deterministic)
    with open_run(config.folder(), config.fixed("glue_controller"), overwrite=config.overwrite) as run:
        if run.results:
            return run.results
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        replicas = strategy.num_replicas_in_sync
        rate = config.learning_rate or (5e-5 if config.preset else 5e-4)
        # A run that is resumed keeps them, whatever the number of replicas now.
        batch_size, rate = run.keep("scaled", lambda: scale(config.batch_size, rate, replicas, config.lr_scaling))

        data = make_datasets(config)
        train, texts = data.batches("train", batch_size, config.seed), data.texts
        run.begin_with("data", [data.batches(split, batch_size).fingerprint() for split in ("train", "validation")])
        total_steps = min(len(train) * config.epochs, config.max_steps or sys.maxsize)
        schedule = WarmUpPolynomialDecay(rate, total_steps)

        with strategy.scope():
            model = build_model(config, data)
            optimizer = adamw(schedule)
            optimizer.build(model.trainable_variables)
        if config.dry_run:
            return print_plan(model, train, schedule, total_steps, data.preprocessor.tokenizer)

        trainer = GlueTrainer(strategy, train, model, optimizer, texts.classes)
        evaluators = {split: GlueEvaluator(strategy, data, split, batch_size, model) for split in data.evaluated}
        saved = {"every": config.checkpoint_every, "model": model, "optimizer": optimizer}
        checkpoints = kr.Checkpoints(run.folder / "checkpoints", **saved)
        log = RunLog(run.folder, train)
        metric = f"val_{texts.task.metrics[0]}"
        actions = [when_best(metric, lambda *_: save_classifier(model, texts, run.folder / "best"), run.folder)]
        controller = Controller(trainer, evaluators["validation"], checkpoints, log, config.steps_per_loop, actions)
        controller.train_and_evaluate(total_steps, eval_interval=len(train))

        if "test" in evaluators:
            evaluators["test"].evaluate()
        outputs = {split: evaluators[split].logits for split in data.evaluated}
        results = {"recipe": "glue_controller", "global_batch_size": batch_size, "config": asdict(config)}
        write_predictions(run.folder / "predictions", texts, outputs)
        save_classifier(model, texts, run.folder / "preset")
        results |= log.results(replicas) | classifier_results(data, outputs)
        return run.finish(results)


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results, told_of))


if __name__ == "__main__":
    run(main, CONFIG)
