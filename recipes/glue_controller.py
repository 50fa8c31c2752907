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

from common.checks import check_knobs
from common.command_line import parse, run
from common.glue import open_examples
from common.labelled import Examples, LabelledTexts
from common.scaling import LearningRateScaling


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
        check_knobs(self)


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is answered at once
    CONFIG = parse(Config, __doc__)

from common.quiet import quiet_stderr

with quiet_stderr():
    import keras
    import numpy as np
    import tensorflow as tf

from common.byte_pairs import Vocabulary
from common.checkpoints import Checkpoints
from common.classification import classifier_results, draw_confusion, scores_of, write_all_predictions
from common.cluster import is_chief
from common.controller import Controller, Evaluator, Trainer, when_best
from common.losses import CrossEntropy
from common.models import classifier_from_preset, classifier_from_size, model_width, preset_vocabulary, save_preset
from common.noise import noise_of_step
from common.optimizers import make_optimizer
from common.order import steps_per_epoch
from common.precision import choose_precision
from common.replicas import batch_sums, first_replica, gather_over_replicas, means_of, sum_over_replicas
from common.results import report, training_results
from common.runs import open_run, write_json
from common.scaling import global_batch_size, learning_rate_factor, scaling_rule
from common.schedules import WarmUpPolynomialDecay
from common.speed import model_flops
from common.step_log import StepLog
from common.strategy import distribute, make_strategy
from common.text_batches import checksums, encode, in_order, labelled, numbered_batches
from common.wordpiece import train_wordpieces


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

    def __init__(self, strategy, model: keras.Model, dataset, steps: int, split: str, examples: Examples):
        super().__init__(dataset, steps)
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
    run = open_run("glue_controller", config, writes=("best", "predictions"))
    if run.results:
        print(f"The run in {run.workdir} is complete; --overwrite starts afresh.")
        return run.results
    keras.utils.set_random_seed(config.seed)
    precision = choose_precision(config.precision, False, model_width(config.preset, config.model or "tiny"))
    keras.config.set_dtype_policy(run.keep("chosen_precision", precision))
    replicas = strategy.num_replicas_in_sync
    base_rate = config.learning_rate or (3e-5 if config.preset else 5e-4)
    scaling = scaling_rule(config.lr_scaling, "adamw")
    batch_size, peak_rate = run.split(config, replicas, base_rate * learning_rate_factor(scaling, replicas))
    global_batch = global_batch_size(batch_size, replicas)

    texts, vocabulary, encoded = make_datasets(config)
    run.check_data({split: len(part) for split, part in encoded.items()}, checksums(encoded, texts))
    epoch_steps = steps_per_epoch(len(encoded["train"]), global_batch)
    total_steps = min(epoch_steps * config.epochs, config.max_steps or sys.maxsize)
    schedule = WarmUpPolynomialDecay(peak_rate, int(config.warmup * total_steps), total_steps)
    with strategy.scope():
        model = build_model(config, vocabulary, len(texts.classes), schedule)
    print(f"{model.count_params():,} parameters in {keras.config.dtype_policy().name}; {total_steps} steps")
    print(f"batch: {batch_size} examples x {replicas} replicas = {global_batch}, {epoch_steps} steps an epoch")
    print(f"learning rate: {peak_rate:g} at the peak, {scaling} scaling of {base_rate:g}")

    def batches(split: str, steps: range, seed: int | None = None):
        return functools.partial(numbered_batches, encoded[split], vocabulary, batch_size, replicas, steps, seed)

    checkpoints = Checkpoints(run.workdir, config.checkpoint_every, model=model, optimizer=model.optimizer)
    flops = model_flops(strategy, model.backbone, config.seq_length)
    log = StepLog(run.workdir, epoch_steps, checkpoints.restore(), flops)
    print(f"going on from step {log.step}" if log.step else f"watch it: tensorboard --logdir {run.workdir}", flush=True)
    numbered = batches("train", range(log.step, total_steps), config.seed)
    train_batches = distribute(strategy, labelled(numbered, texts.splits["train"].labels))
    evaluators = {}
    for split in [split for split in encoded if split != "train"]:
        steps = steps_per_epoch(len(encoded[split]), global_batch)
        dataset = distribute(strategy, batches(split, range(steps)))
        evaluators[split] = GlueEvaluator(strategy, model, dataset, steps, split, texts.splits[split])
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
    if not is_chief():
        return {}
    logits = {split: evaluator.logits for split, evaluator in evaluators.items()}
    results = training_results("glue_controller", config, strategy, global_batch, log)
    results |= classifier_results(texts, logits, vocabulary)
    write_all_predictions(run.workdir / "predictions", texts, logits)
    save(run.workdir / "preset")
    write_json(run.workdir / "results.json", results)
    return results


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results))


if __name__ == "__main__":
    run(main, CONFIG)
