# SPDX-License-Identifier: Apache-2.0
"""Fine-tune BERT on labelled sentences or pairs of them, data-parallel, with a Controller.

    python -m recipes run glue_controller                          # generated pairs, no network needed
    python -m recipes run glue_controller --task mrpc --preset bert_base_en_uncased --batch-size 16
    python -m recipes run glue_controller --task own --data reviews.csv --text-columns review --label-column stars

Time: 1 min on 2 cores. Metric: GLUE's for the task, on the validation split, against a bag-of-words baseline.

A Trainer says what a step is, an Evaluator how to evaluate, and the Controller does the rest, as in Orbit: loops of
many steps in one call, checkpoints, summaries, and an action when a score is better than ever. The recipe
`glue_custom_loop` is the same job in one explicit loop.
"""

import functools
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

    # work directory: results, logs, checkpoints, preset, predictions; best/ has the model with the best score
    workdir: Annotated[str, FIRST, FREE] = "runs/glue_controller"
    steps_per_loop: Annotated[Count, FREE] = 100  # steps in one call, at most


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import numpy as np
    import tensorflow as tf

import keras_replicas as kr
from common.classification_scores import classifier_results, report, scores_of, write_predictions
from common.controller import Controller, Evaluator, Trainer, when_best
from common.data.examples import EncodedTexts
from common.data.labelled import open_examples
from common.data.vocabulary import train_wordpieces
from common.log import RunLog
from common.model.classifier import make_classifier, make_preprocessor, save_classifier
from common.run_folder import open_run
from common.training import CrossEntropy, WarmUpPolynomialDecay, adamw, scale


def make_datasets(config: Config) -> EncodedTexts:
    """The texts of each split, and the model's inputs for them."""
    texts = open_examples(config.task, config.data, config.text_columns, config.label_column, config.regression)
    words = None if config.preset else train_wordpieces(texts.documents, texts.fingerprint, config.vocabulary_size)
    return EncodedTexts(texts, make_preprocessor(config.preset, words, config.seq_length))


def build_model(config: Config, data: EncodedTexts) -> keras.Model:
    """A text classifier, or for regression one with a single output. Call it inside the strategy's scope."""
    of = (config.preset, config.model or "tiny", data.preprocessor, len(data.texts.classes) or 1, data.texts.mean_label)
    return make_classifier(*of, dropout=config.dropout, lora_rank=config.lora_rank)


class GlueTrainer(Trainer):
    """A step: the gradient of the batch's mean loss, over all replicas, is applied."""

    def __init__(self, strategy, data, model: keras.Model, optimizer, log: RunLog, classes: list[str]):
        super().__init__(strategy, data)
        self.model, self.optimizer, self.log = model, optimizer, log
        # A sum: a step divides it, once, by the weights of the whole batch.
        self.loss_sum = CrossEntropy("sum") if classes else keras.losses.MeanSquaredError("sum")

    def begin(self, step: int) -> None:
        """Opens the log, too."""
        super().begin(step)
        self.log.begin(step)

    def train_step(self, iterator) -> dict[str, tf.Tensor]:
        """Does a step on every replica, and returns its loss and learning rate."""
        return kr.first_replica(self.strategy, self.strategy.run(self._replica_step, args=next(iterator)))

    def train(self, num_steps: int) -> dict[str, float]:
        """Runs a loop of steps; the time since the last one does not count."""
        self.log.start_clock()
        return super().train(num_steps)

    def train_loop_end(self, values: dict[str, np.ndarray]) -> dict[str, float]:
        """Writes a line for each step, and returns the means."""
        self.log.write(values)
        return super().train_loop_end(values)

    def _replica_step(self, x, y, weight):
        model, optimizer = self.model, self.optimizer
        with kr.noise_of_step(model, optimizer.iterations), tf.GradientTape() as tape:
            loss = self.loss_sum(y, model(x, training=True), weight)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        gradients, loss, total = kr.sum_over_replicas((gradients, loss, tf.reduce_sum(weight)))
        learning_rate = tf.identity(optimizer.learning_rate)
        # Divided once, by the weights of the whole batch: replicas may have different numbers of examples.
        gradients = [None if gradient is None else gradient / total for gradient in gradients]
        kr.apply_summed(optimizer, gradients, model.trainable_variables)
        return {"loss": loss / total, "learning_rate": learning_rate}


class GlueEvaluator(Evaluator):
    """The logits of every example of a split, in its order, and their scores."""

    def __init__(self, strategy, data: EncodedTexts, split: str, batch_size: int, model: keras.Model):
        super().__init__(strategy, data.batches(split, batch_size))
        self.model, self.texts, self.split = model, data.texts, split

    def eval_step(self, iterator):
        """Returns the rows of all replicas."""
        x, *_ = next(iterator)
        return kr.first_replica(self.strategy, self.strategy.run(self._replica_step, args=(x,)))

    def eval_end(self, outputs) -> dict[str, float]:
        """Keeps the logits, and returns the split's scores."""
        self.logits = np.concatenate(outputs)
        return scores_of(self.texts, self.split, self.logits)

    def _replica_step(self, x):
        return kr.gather_over_replicas(self.model(x, training=False))


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} for workers other than the chief."""
    strategy = kr.make_strategy(config.replicas, deterministic=config.deterministic)
    replicas = strategy.num_replicas_in_sync
    with open_run(config.folder(), config.fixed("glue_controller"), overwrite=config.overwrite) as run:
        if run.results:
            return run.results
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        rate = config.learning_rate or (5e-5 if config.preset else 5e-4)
        # A run that is resumed keeps them, whatever the number of replicas now.
        batch_size, rate = run.keep("scaled", scale(config.batch_size, rate, replicas, config.lr_scaling))

        data = make_datasets(config)
        train = data.batches("train", batch_size, config.seed)
        total_steps = min(len(train) * config.epochs, config.max_steps or sys.maxsize)

        with strategy.scope():
            model = build_model(config, data)
            optimizer = adamw(WarmUpPolynomialDecay(rate, total_steps))
            optimizer.build(model.trainable_variables)

        log = RunLog(run.folder, train)
        splits = [split for split in data.sizes() if split != "train"]
        evaluators = {split: GlueEvaluator(strategy, data, split, batch_size, model) for split in splits}
        saved, texts = {"model": model, "optimizer": optimizer}, data.texts
        save = functools.partial(save_classifier, model, texts.classes, texts.columns)
        best = when_best(f"val_{texts.metrics[0]}", lambda *_: save(run.folder / "best"), run.folder)
        controller = Controller(
            GlueTrainer(strategy, train, model, optimizer, log, texts.classes),
            evaluators["validation"],
            kr.Checkpoints(run.folder / "checkpoints", every=config.checkpoint_every, **saved),
            steps_per_loop=config.steps_per_loop,
            summary_dir=run.folder / "tensorboard",
            eval_actions=[best],
        )
        controller.train_and_evaluate(total_steps, eval_interval=len(train))

        if "test" in evaluators:
            evaluators["test"].evaluate()
        outputs = {split: evaluator.logits for split, evaluator in evaluators.items()}
        results = {"recipe": "glue_controller", "global_batch_size": batch_size, "config": asdict(config)}
        results |= log.results(replicas)
        write_predictions(run.folder / "predictions", texts, outputs)
        save(run.folder / "preset")
        results |= classifier_results(texts, outputs, data.preprocessor.tokenizer)
        return run.finish(results)


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results))


if __name__ == "__main__":
    run(main, CONFIG)
