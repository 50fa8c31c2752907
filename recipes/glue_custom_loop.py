# SPDX-License-Identifier: Apache-2.0
"""Fine-tune BERT on labelled sentences or pairs of them, data-parallel, in one explicit loop.

    python -m recipes run glue_custom_loop                          # generated pairs, no network needed
    python -m recipes run glue_custom_loop --task mrpc --preset bert_base_en_uncased --batch-size 16
    python -m recipes run glue_custom_loop --task own --data reviews.csv --text-columns review --label-column stars

Time: 1 min on 2 cores. Metric: GLUE's for the task, on the validation split, against a bag-of-words baseline.

`GradientTape`, a sum over replicas, `strategy.run`: the lines marked (1) to (8) make the loop data-parallel. The recipe
`glue_controller` is the same job, driven by a Controller.
"""

import functools
import os
import sys
import time

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass

from common.run.classifier_options import ClassifierOptions
from common.run.command_line import parse, quiet_stderr, run, verbosity


@dataclass(frozen=True)
class Config(ClassifierOptions):
    """The options of `glue_custom_loop`, in addition to those of every recipe."""

    workdir: str = "runs/glue_custom_loop"  # work directory: results, logs, checkpoints, preset


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import numpy as np
    import tensorflow as tf

from tqdm import tqdm

from common.data.glue import open_examples
from common.data.text_batches import EncodedTexts, in_order
from common.data.wordpiece import train_wordpieces
from common.model.backbones import model_width
from common.model.classifier import make_classifier, make_preprocessor, save_classifier
from common.run.checkpoints import Checkpoints
from common.run.results import report, training_results
from common.run.runs import open_run
from common.run.speed import model_flops
from common.run.step_log import StepLog, open_board
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


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} for workers other than the chief."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)  # (1) the devices
    run = open_run("glue_custom_loop", config, writes=("predictions",))
    if run.results:
        return run.results
    width = model_width(config.preset, config.model or "tiny")
    run.configure_keras(config, width)
    scaled = run.scale(config, strategy.num_replicas_in_sync, config.peak_rate(width), "adamw")

    data = make_datasets(config)
    run.check_data(data.sizes(), data.checksums())

    epoch_steps = data.steps("train", scaled)
    total_steps = min(epoch_steps * config.epochs, config.max_steps or sys.maxsize)
    schedule = WarmUpPolynomialDecay(scaled.learning_rate, int(config.warmup * total_steps), total_steps)

    with strategy.scope():  # (2) a copy of every variable for each replica
        model = build_model(config, data, schedule)
    optimizer = model.optimizer

    @tf.function(reduce_retracing=True)  # batches have many lengths
    def train_step(batch, stop):
        def replica_step(x, y, weight):
            with noise_of_step(model, optimizer.iterations), tf.GradientTape() as tape:  # (3) a replica's own noise
                logits = model(x, training=True)
                sums = batch_sums(x, y, weight, logits, model.compute_loss(x, y, logits, weight))
                loss = optimizer.scale_loss(sums["loss"])
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients, sums = sum_over_replicas((gradients, sums | {"stop": stop}))  # (4) of the whole batch
            learning_rate = tf.identity(optimizer.learning_rate)
            optimizer.apply([gradient / sums["labels"] for gradient in gradients], model.trainable_variables)
            return means_of(sums) | {"learning_rate": learning_rate}

        return first_replica(strategy, strategy.run(replica_step, args=batch))  # (5) on every replica

    @tf.function(reduce_retracing=True)  # batches have many lengths
    def predict_step(batch):
        def replica_step(x, examples):
            return gather_over_replicas((examples, model(x, training=False)))  # (6) of every replica

        return first_replica(strategy, strategy.run(replica_step, args=batch))  # (7) on every replica

    def predict(split: str) -> np.ndarray:
        batches = distribute(strategy, data.batches, split, scaled, range(data.steps(split, scaled)))
        return in_order(map(predict_step, batches), data.sizes()[split])

    board = open_board(run.workdir, asdict(config), 0)
    checkpoints = Checkpoints(run.workdir, config.checkpoint_every, model=model, optimizer=optimizer)
    log = StepLog(run.workdir, epoch_steps, checkpoints.restore(), model_flops(model, config))
    log.announce(model, total_steps)
    steps = range(log.step, total_steps)
    batches = distribute(strategy, data.labelled_batches, "train", scaled, steps, config.seed)

    bar = tqdm(total=total_steps, initial=log.step, unit="step", file=sys.stdout, disable=verbosity() == 2)
    with checkpoints, board.as_default():
        began = time.perf_counter()
        for batch in batches:  # (8) each replica gets its part
            waited = time.perf_counter() - began
            values = train_step(batch, tf.constant(float(checkpoints.told_to_stop))) | {"waited": waited}
            values = {name: np.ravel(value) for name, value in values.items()}
            shown = log.record(values, time.perf_counter() - began)
            for name, value in shown.items():
                tf.summary.scalar(f"train/{name}", value, step=log.step)
            bar.set_postfix(loss=f"{shown['loss']:.3f}", learning_rate=f"{shown['learning_rate']:.1e}")
            bar.update()
            if log.step % epoch_steps == 0 or log.step == total_steps:
                val_logits = predict("validation")
                for name, value in scores_of(data.texts, "validation", val_logits).items():
                    bar.write(f"step {log.step}: {name} {value:.4f}")
                    tf.summary.scalar(f"validation/{name}", value, step=log.step)
                draw_confusion(data.texts, "validation", val_logits, log.step)
            checkpoints.save_if_due(log.step)
            if values["stop"]:
                checkpoints.save_and_leave(log.step)
            began = time.perf_counter()
        checkpoints.save(log.step)
    bar.close()

    logits = {split: predict(split) for split in data.sizes() if split != "train"}
    results = training_results("glue_custom_loop", config, strategy, scaled.global_batch_size, log)
    results |= classifier_results(data.texts, logits, data.preprocessor.tokenizer)

    write_all_predictions(run.workdir / "predictions", data.texts, logits)
    save_classifier(model, data, run.workdir / "preset")
    return run.finish(results)


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results))


if __name__ == "__main__":
    run(main, CONFIG)
