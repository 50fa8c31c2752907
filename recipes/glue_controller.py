# SPDX-License-Identifier: Apache-2.0
"""Fine-tune BERT on labelled sentences or pairs of them, data-parallel, driven by a Controller as in Orbit.

    python -m recipes run glue_controller                          # generated pairs, no network needed
    python -m recipes run glue_controller --task mrpc --preset bert_base_en_uncased --batch-size 16
    python -m recipes run glue_controller --task own --data reviews.csv --text-columns review --label-column stars

Time: 1 min on 2 cores. Metric: GLUE's for the task, on the validation split, against a bag-of-words baseline.

A Trainer defines a training step, an Evaluator an evaluation; the Controller alternates between them, logs and saves
checkpoints. The recipe `glue_custom_loop` is the same job as one explicit loop.
"""

import functools
import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import dataclass

from common.run.classifier_options import ClassifierOptions
from common.run.command_line import parse, quiet_stderr, run


@dataclass(frozen=True)
class Config(ClassifierOptions):
    """The options of `glue_controller`, in addition to those of every recipe."""

    workdir: str = "runs/glue_controller"  # work directory: results, logs, checkpoints, preset
    steps_per_loop: int = 50  # maximum steps per call, after which the Controller logs


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import numpy as np
    import tensorflow as tf

from common.data.glue import open_examples
from common.data.text_batches import EncodedTexts, in_order
from common.data.wordpiece import train_wordpieces
from common.model.backbones import model_width
from common.model.classifier import make_classifier, make_preprocessor, save_classifier
from common.run.best import when_best
from common.run.checkpoints import Checkpoints
from common.run.controller import Controller, Evaluator, Trainer
from common.run.results import report, training_results
from common.run.runs import open_run
from common.run.speed import model_flops
from common.run.step_log import StepLog
from common.scores.classification import classifier_results, draw_confusion, scores_of, write_all_predictions
from common.training.explicit_step import batch_sums, means_of, noise_of_step
from common.training.losses import CrossEntropy
from common.training.optimizers import make_optimizer
from common.training.schedules import WarmUpPolynomialDecay
from keras_replicas.replicas import first_replica, gather_over_replicas, sum_over_replicas
from keras_replicas.strategy import distribute, make_strategy


def make_datasets(config: Config) -> EncodedTexts:
    """The texts of each split, and their token ids."""
    texts = open_examples(config.task, config.data, config.text_columns, config.label_column, config.regression)
    documents = functools.partial(map, " ".join, texts.splits["train"].texts)
    vocabulary = None if config.preset else train_wordpieces(documents, config.vocabulary_size)
    return EncodedTexts.of(texts, make_preprocessor(config.preset, vocabulary, config.seq_length))


def build_model(config: Config, data: EncodedTexts, schedule) -> keras.Model:
    """A compiled text classifier. Call it inside the strategy's scope."""
    model = make_classifier(config.preset, config.model or "tiny", data, config.dropout, config.lora_rank)
    # The loss is a sum: a step divides it, once, by the number of labels in the whole batch.
    loss = CrossEntropy() if data.texts.classes else keras.losses.MeanSquaredError("sum")
    model.compile(make_optimizer("adamw", schedule, weight_decay=0.01), loss)
    return model


class GlueTrainer(Trainer):
    """A step: the gradient of the batch's mean loss, over all replicas, is applied."""

    def __init__(self, strategy: tf.distribute.Strategy, model: keras.Model, dataset, log: StepLog):
        super().__init__(dataset)
        self.strategy, self.model, self.log = strategy, model, log

    def train_step(self, iterator) -> dict[str, tf.Tensor]:
        """See `Trainer`."""
        return first_replica(self.strategy, self.strategy.run(self._replica_step, args=next(iterator)))

    def train_loop_end(self, values: dict[str, np.ndarray], seconds: float) -> dict[str, float]:
        """See `Trainer`."""
        return self.log.record(values, seconds)

    def _replica_step(self, x, y, weight):
        model, optimizer = self.model, self.model.optimizer
        with noise_of_step(model, optimizer.iterations), tf.GradientTape() as tape:
            logits = model(x, training=True)
            sums = batch_sums(x, y, weight, logits, model.compute_loss(x, y, logits, weight))
            loss = optimizer.scale_loss(sums["loss"])
        gradients, sums = sum_over_replicas((tape.gradient(loss, model.trainable_variables), sums))
        learning_rate = tf.identity(optimizer.learning_rate)
        # Divided once, by the labels of the whole batch: replicas may have different numbers of them.
        optimizer.apply([gradient / sums["labels"] for gradient in gradients], model.trainable_variables)
        return means_of(sums) | {"learning_rate": learning_rate}


class GlueEvaluator(Evaluator):
    """The logits of every example of a split, once, and their scores."""

    def __init__(self, strategy, model: keras.Model, data: EncodedTexts, split: str, scaled):
        steps = data.steps(split, scaled)
        super().__init__(distribute(strategy, data.batches, split, scaled, range(steps)), steps)
        self.strategy, self.model, self.data, self.split = strategy, model, data, split

    def eval_step(self, iterator):
        """See `Evaluator`."""
        return first_replica(self.strategy, self.strategy.run(self._replica_step, args=next(iterator)))

    def eval_end(self, outputs) -> dict[str, float]:
        """See `Evaluator`."""
        self.logits = in_order(outputs, self.data.sizes()[self.split])
        draw_confusion(self.data.texts, self.split, self.logits)
        return scores_of(self.data.texts, self.split, self.logits)

    def _replica_step(self, x, examples):
        return gather_over_replicas((examples, self.model(x, training=False)))


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} for workers other than the chief."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    run = open_run("glue_controller", config, writes=("best", "predictions"))
    if run.results:
        return run.results
    run.configure_keras(config, width := model_width(config.preset, config.model or "tiny"))
    scaled = run.scale(config, strategy.num_replicas_in_sync, config.peak_rate(width), "adamw")

    data = make_datasets(config)
    run.check_data(data.sizes(), data.checksums())

    steps = data.steps("train", scaled)  # per epoch
    total_steps = min(steps * config.epochs, config.max_steps or sys.maxsize)
    schedule = WarmUpPolynomialDecay(scaled.learning_rate, int(config.warmup * total_steps), total_steps)

    with strategy.scope():
        model = build_model(config, data, schedule)

    checkpoints = Checkpoints(run.workdir, config.checkpoint_every, model=model, optimizer=model.optimizer)
    log = StepLog(run.workdir, steps, checkpoints.restore(), model_flops(model, config))
    log.announce(model, total_steps)

    batches = distribute(strategy, data.labelled_batches, "train", scaled, range(log.step, total_steps), config.seed)
    evaluators = {part: GlueEvaluator(strategy, model, data, part, scaled) for part in data.sizes() if part != "train"}
    save, metric = functools.partial(save_classifier, model, data), f"val_{data.texts.metrics[0]}"
    controller = Controller(
        trainer=GlueTrainer(strategy, model, batches, log),
        evaluator=evaluators["validation"],
        steps_per_loop=config.steps_per_loop,
        global_step=log.step,
        checkpoint_manager=checkpoints,
        summary_dir=run.workdir / "tensorboard",
        eval_actions=[when_best(metric, lambda *_: save(run.workdir / "best"), run.workdir, log.step)],
    )
    controller.train_and_evaluate(total_steps, eval_interval=steps)

    if "test" in evaluators:
        evaluators["test"].evaluate()
    logits = {split: evaluator.logits for split, evaluator in evaluators.items()}
    results = training_results("glue_controller", config, strategy, scaled.global_batch_size, log)
    results |= classifier_results(data.texts, logits, data.preprocessor.tokenizer)

    write_all_predictions(run.workdir / "predictions", data.texts, logits)
    save(run.workdir / "preset")
    return run.finish(results)


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results))


if __name__ == "__main__":
    run(main, CONFIG)
