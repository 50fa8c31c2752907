# SPDX-License-Identifier: Apache-2.0
"""Fine-tune BERT on labelled sentences or pairs of them, data-parallel, in one explicit loop.

    python -m recipes run glue_custom_loop                          # generated pairs, no network needed
    python -m recipes run glue_custom_loop --task mrpc --preset bert_base_en_uncased --batch-size 16
    python -m recipes run glue_custom_loop --task own --data reviews.csv --text-columns review --label-column stars

Time: 1 to 2 min on 2 cores. Metric: GLUE's for the task, on the validation split, against a bag-of-words baseline.

`GradientTape`, a sum over replicas, `strategy.run`: the lines marked (1) to (8) make the loop data-parallel. The recipe
`glue_controller` is the same job, driven by a Controller.
"""

import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Annotated

from common.command_line import FIRST, FREE, parse, quiet_stderr, run
from common.model.classifier_options import ClassifierOptions


@dataclass(frozen=True)
class Config(ClassifierOptions):
    """The options of `glue_custom_loop`, in addition to those of every recipe."""

    # work directory: results, logs, checkpoints, preset, predictions
    workdir: Annotated[str, FIRST, FREE] = "runs/glue_custom_loop"


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras
    import numpy as np
    import tensorflow as tf

from tqdm import tqdm

import keras_replicas as kr
from common.classification_scores import classifier_results, scores_of, told_of, write_predictions
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


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = kr.make_strategy(config.replicas, deterministic=config.deterministic)  # (1) the devices
    replicas = strategy.num_replicas_in_sync
    with open_run(config.folder(), config.fixed("glue_custom_loop"), overwrite=config.overwrite) as run:
        if run.results:
            return run.results
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        rate = config.learning_rate or (5e-5 if config.preset else 5e-4)
        # A run that is resumed keeps them, whatever the number of replicas now.
        batch_size, rate = run.keep("scaled", lambda: scale(config.batch_size, rate, replicas, config.lr_scaling))

        data = make_datasets(config)
        train = data.batches("train", batch_size, config.seed)
        run.begin_with("data", [data.batches(split, batch_size).fingerprint() for split in ("train", "validation")])
        total_steps = min(len(train) * config.epochs, config.max_steps or sys.maxsize)
        schedule = WarmUpPolynomialDecay(rate, total_steps)

        with strategy.scope():  # (2) a copy of every variable for each replica
            model = build_model(config, data)
            optimizer = adamw(schedule)
            optimizer.build(model.trainable_variables)
        if config.dry_run:
            return print_plan(model, train, schedule, total_steps, data.preprocessor.tokenizer)
        # A sum: a step divides it, once, by the weights of the whole batch.
        loss_sum = keras.losses.MeanSquaredError("sum")
        if data.texts.classes:
            loss_sum = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        @tf.function  # of the iterator: one trace, although batches have many lengths
        def train_step(batches, stop):
            def replica_step(x, y, weight):
                with kr.noise_of_step(model, optimizer.iterations), tf.GradientTape() as tape:  # (3) its own noise
                    loss = loss_sum(y, model(x, training=True), weight)
                    scaled = optimizer.scale_loss(loss)
                gradients = tape.gradient(scaled, model.trainable_variables)
                values = {"loss": loss, "weight": tf.reduce_sum(weight), "stop": stop}
                gradients, values = kr.sum_over_replicas((gradients, values))  # (4) of the whole batch
                learning_rate, total = tf.identity(optimizer.learning_rate), values.pop("weight")
                gradients = [None if gradient is None else gradient / total for gradient in gradients]
                kr.apply_summed(optimizer, gradients, model.trainable_variables)
                return {"loss": values["loss"] / total, "learning_rate": learning_rate, "stop": values["stop"]}

            return kr.first_replica(strategy, strategy.run(replica_step, args=next(batches)))  # (5) on every replica

        @tf.function
        def predict_step(batches):
            def replica_step(x):
                return kr.gather_over_replicas(model(x, training=False))  # (6) the rows of all replicas

            (x,) = next(batches)[:1]
            return kr.first_replica(strategy, strategy.run(replica_step, args=(x,)))  # (7) on every replica

        def predict(split: str) -> np.ndarray:
            batches = data.batches(split, batch_size)
            parts = iter(kr.distribute(strategy, batches))
            return np.concatenate([predict_step(parts) for _ in range(len(batches))])

        log = RunLog(run.folder, train)
        saved = {"model": model, "optimizer": optimizer}
        checkpoints = kr.Checkpoints(run.folder / "checkpoints", every=config.checkpoint_every, **saved)
        first = checkpoints.restore()
        log.begin(first)
        quiet, steps = not keras.config.is_interactive_logging_enabled(), range(first, total_steps)
        bar = tqdm(steps, "steps", total_steps, initial=first, disable=quiet, file=sys.stdout)
        with checkpoints:
            parts = iter(kr.distribute(strategy, train, first))  # (8) each replica's part of each batch
            for step in bar:
                log.start_clock()
                values = train_step(parts, tf.constant(float(checkpoints.told_to_stop)))
                values = {name: np.array([value]) for name, value in values.items()}
                stop = values.pop("stop")[0]
                log.write(values)
                if log.step % len(train) == 0 or log.step == total_steps:
                    scores = scores_of(data.texts, "validation", predict("validation"))
                    bar.write(f"step {log.step}: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
                    with log.board.as_default(step=log.step):
                        for name, value in scores.items():
                            tf.summary.scalar(f"validation/{name}", value)
                checkpoints.save_if_due(step + 1)
                if stop:
                    checkpoints.save_and_leave(step + 1)
            checkpoints.save(total_steps)

        outputs = {split: predict(split) for split in data.evaluated}
        results = {"recipe": "glue_custom_loop", "global_batch_size": batch_size, "config": asdict(config)}
        results |= log.results(replicas)
        write_predictions(run.folder / "predictions", data.texts, outputs)
        save_classifier(model, data.texts, run.folder / "preset")
        results |= classifier_results(data, outputs)
        return run.finish(results)


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results, told_of))


if __name__ == "__main__":
    run(main, CONFIG)
