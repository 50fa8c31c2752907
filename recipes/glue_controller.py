# SPDX-License-Identifier: Apache-2.0
"""Fine-tune BERT on labelled sentences or pairs of them, data-parallel, driven by a Controller as in Orbit.

    python -m recipes run glue_controller                          # generated pairs, no network needed
    python -m recipes run glue_controller --task mrpc --preset bert_base_en_uncased --batch-size 16
    python -m recipes run glue_controller --task own --data reviews.csv --text-columns review --label-column stars

Time: 2 min on 2 cores. Metric: accuracy and F1 on the validation split, against a bag of words.

A Trainer knows a step, an Evaluator an evaluation; the Controller calls them by turns, logs and saves. The recipe
`glue_custom_loop` is the same job as one explicit loop.
"""

import functools
import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what is on the screen is ours

from dataclasses import dataclass
from typing import Literal

from common.data.glue import open_examples
from common.data.labelled import Examples, LabelledTexts
from common.model.checks import check_model
from common.run.checks import check_options
from common.run.command_line import parse, run
from common.training.scaling import LearningRateScaling


@dataclass(frozen=True)
class Config:
    """The knobs of `glue_controller`."""

    workdir: str = "runs/glue_controller"  # folder of the run: results, logs, preset
    task: Literal["roles", "mrpc", "sst2", "own"] = "roles"  # roles: generated pairs; own: files of yours
    # folder in GLUE's form, else GLUE is fetched from the Hub; own: a .tsv, .csv, .jsonl file or a folder
    data: str = ""
    text_columns: str = ""  # own: the name of the texts' column, or two names with a comma
    label_column: str = ""  # own: the name of the labels' column
    preset: str = ""  # KerasHub name, or folder such as runs/bert_mlm/preset, to start from; else random weights
    # BERT size, from random weights; tiny where neither this nor a preset is given
    model: Literal["nano", "tiny", "mini", "small", "medium", "base", "large"] | None = None
    vocabulary_size: int = 4096  # pieces of the vocabulary that is trained where there is no preset
    seq_length: int = 128  # tokens in an example at most
    replicas: int = 0  # 0: every GPU, or the CPU as 2; N: N GPUs, or one GPU or the CPU split in N
    batch_size: int = 16  # examples on each replica in a step
    learning_rate: float = 0.0  # peak, for one replica; 0: 3e-5 from a preset, 5e-4 from random weights
    lr_scaling: LearningRateScaling = "auto"  # how the rate grows with replicas; auto: sqrt, as for any Adam
    warmup: float = 0.1  # share of all steps in which the rate rises
    dropout: float = 0.1
    epochs: int = 3
    max_steps: int = 0  # end after this many steps; 0: no cap
    precision: Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"] = "auto"  # auto: by the hardware
    deterministic: bool = False  # on GPUs: the same bits in every run, and float32 without TF32; slower
    seed: int = 0  # of weights, order and dropout
    steps_per_loop: int = 50  # steps in one call at most, after which the Controller logs
    checkpoint_every: int = 200  # steps between two checkpoints, from which a run that was stopped goes on
    overwrite: bool = False  # start afresh in a workdir that holds a run; if stopped, the same command goes on

    def __post_init__(self):
        check_options(self)
        check_model(self.preset, self.model, self.seq_length)
        open_examples(self.task, self.data, self.text_columns, self.label_column)


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is answered at once
    CONFIG = parse(Config, __doc__)

from common.run.quiet import quiet_stderr

with quiet_stderr():
    import keras
    import numpy as np
    import tensorflow as tf

from common.data.byte_pairs import Vocabulary
from common.data.order import steps_per_epoch
from common.data.text_batches import checksums, encode, in_order, labelled, numbered_batches
from common.data.wordpiece import train_wordpieces
from common.devices.cluster import is_chief
from common.devices.strategy import distribute, make_strategy
from common.model.backbones import model_width, preset_vocabulary
from common.model.classifier import classifier_from_preset, classifier_from_size
from common.model.saving import save_preset
from common.run.checkpoints import Checkpoints
from common.run.controller import Controller, Evaluator, Trainer, when_best
from common.run.results import report, training_results
from common.run.runs import open_run
from common.run.speed import model_flops
from common.run.step_log import StepLog
from common.scores.classification import classifier_results, draw_confusion, scores_of, write_all_predictions
from common.training.losses import CrossEntropy
from common.training.noise import noise_of_step
from common.training.optimizers import make_optimizer
from common.training.replicas import batch_sums, first_replica, gather_over_replicas, means_of, sum_over_replicas
from common.training.schedules import WarmUpPolynomialDecay


def make_datasets(config: Config) -> tuple[LabelledTexts, Vocabulary, dict[str, np.ndarray]]:
    """The texts, the vocabulary, and for each split the token ids [examples, seq_length]."""
    texts = open_examples(config.task, config.data, config.text_columns, config.label_column)
    if config.preset:
        vocabulary = preset_vocabulary(config.preset)
    else:
        vocabulary = train_wordpieces(lambda: map(" ".join, texts.splits["train"].texts), config.vocabulary_size)
    encoded = {split: encode(part.texts, vocabulary, config.seq_length) for split, part in texts.splits.items()}
    return texts, vocabulary, encoded


def build_model(config: Config, vocabulary: Vocabulary, num_classes: int, schedule) -> keras.Model:
    """A compiled `BertTextClassifier`. Call it inside the strategy's scope."""
    if config.preset:
        model = classifier_from_preset(config.preset, num_classes, config.dropout)
    else:
        model = classifier_from_size(config.model or "tiny", vocabulary, num_classes, config.dropout, config.seq_length)
    # The loss is a sum: a step divides it, once, by the number of labels in the whole batch.
    model.compile(make_optimizer("adamw", schedule, weight_decay=0.01), CrossEntropy())
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
        self.log.record(values, seconds)
        means = {name: np.average(values[name], weights=values["labels"]) for name in ("loss", "accuracy")}
        return means | {"learning_rate": values["learning_rate"][-1]} | self.log.speed

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
    """Logits of every example of a split, once, and what they are worth."""

    def __init__(self, strategy, model: keras.Model, batches, split: str, examples: Examples, global_batch: int):
        steps = steps_per_epoch(len(examples.texts), global_batch)
        super().__init__(distribute(strategy, batches(split, range(steps))), steps)
        self.strategy, self.model, self.split, self.examples = strategy, model, split, examples

    def eval_step(self, iterator):
        """See `Evaluator`."""
        return first_replica(self.strategy, self.strategy.run(self._replica_step, args=next(iterator)))

    def eval_end(self, outputs) -> dict[str, float]:
        """See `Evaluator`."""
        self.logits = in_order(outputs, len(self.examples.texts))
        return scores_of(self.split, self.examples, self.logits) if self.examples.labels is not None else {}

    def _replica_step(self, x, examples):
        return gather_over_replicas((examples, self.model(x, training=False)))


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} for workers other than the chief."""
    strategy = make_strategy(config.replicas, config.deterministic)
    run = open_run("glue_controller", config)
    if run.results:
        return run.results
    keras.utils.set_random_seed(config.seed)
    run.set_precision(config.precision, False, model_width(config.preset, config.model or "tiny"))
    base_rate = config.learning_rate or (3e-5 if config.preset else 5e-4)
    scaled = run.scale(config, strategy.num_replicas_in_sync, base_rate, "adamw")

    texts, vocabulary, encoded = make_datasets(config)
    run.check_data({split: len(part) for split, part in encoded.items()}, checksums(encoded, texts))
    epoch_steps = steps_per_epoch(len(encoded["train"]), scaled.global_batch_size)
    total_steps = min(epoch_steps * config.epochs, config.max_steps or sys.maxsize)
    schedule = WarmUpPolynomialDecay(scaled.learning_rate, int(config.warmup * total_steps), total_steps)
    with strategy.scope():
        model = build_model(config, vocabulary, len(texts.classes), schedule)

    def batches(split: str, steps: range, seed: int | None = None):
        return functools.partial(numbered_batches, encoded[split], vocabulary, scaled, steps, seed)

    checkpoints = Checkpoints(run.workdir, config.checkpoint_every, model=model, optimizer=model.optimizer)
    flops = model_flops(strategy, model.backbone, config.seq_length)
    log = StepLog(run.workdir, epoch_steps, checkpoints.restore(), flops)
    log.announce(model, total_steps)
    numbered = batches("train", range(log.step, total_steps), config.seed)
    train_batches = distribute(strategy, labelled, numbered, texts.splits["train"].labels)
    evaluators = {
        split: GlueEvaluator(strategy, model, batches, split, texts.splits[split], scaled.global_batch_size)
        for split in encoded
        if split != "train"
    }
    save = functools.partial(save_preset, model, vocabulary, config.seq_length)
    controller = Controller(
        trainer=GlueTrainer(strategy, model, train_batches, log),
        evaluator=evaluators["validation"],
        steps_per_loop=config.steps_per_loop,
        global_step=log.step,
        checkpoint_manager=checkpoints,
        summary_dir=run.workdir / "tensorboard",
        eval_actions=[
            lambda step, _: draw_confusion(texts, "validation", evaluators["validation"].logits, step),
            when_best("val_accuracy", lambda *_: save(run.workdir / "best"), run.workdir / "best.json"),
        ],
    )
    controller.train_and_evaluate(total_steps, eval_interval=epoch_steps)

    if "test" in evaluators:
        evaluators["test"].evaluate()
    logits = {split: evaluator.logits for split, evaluator in evaluators.items()}
    results = training_results("glue_controller", config, strategy, scaled.global_batch_size, log)
    results |= classifier_results(texts, logits, vocabulary)
    if is_chief():
        write_all_predictions(run.workdir / "predictions", texts, logits)
        save(run.workdir / "preset")
    return run.finish(results)


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results))


if __name__ == "__main__":
    run(main, CONFIG)
