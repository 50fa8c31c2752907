# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a text classifier on labelled sentences or pairs of them, data-parallel, with Keras fit.

    python -m recipes run text_classifier                          # generated pairs, no network needed
    python -m recipes run text_classifier --task mrpc --preset hf://sentence-transformers/all-MiniLM-L6-v2
    python -m recipes run text_classifier --task own --data reviews.csv --text-columns review --label-column stars

Time: 1 min on 2 cores. Metric: the task's own on the validation split, against a bag-of-words baseline.

The model is of any family that KerasHub has a text classifier for, such as BERT, RoBERTa, DistilBERT, ALBERT and
DeBERTaV3, with its own tokenizer. Examples of similar length share a batch, so that little of it is padding.
"""

import functools
import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass

from common.run.classifier_options import ClassifierOptions
from common.run.command_line import parse, quiet_stderr, run, verbosity
from common.run.options import FitOptions


@dataclass(frozen=True)
class Config(ClassifierOptions, FitOptions):
    """The options of `text_classifier`, in addition to those of every recipe."""

    workdir: str = "runs/text_classifier"  # work directory: results, logs, checkpoints, preset, predictions


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras

from common.data.glue import open_examples
from common.data.text_batches import EncodedTexts
from common.data.wordpiece import train_wordpieces
from common.model.backbones import model_width
from common.model.classifier import make_classifier, make_preprocessor, save_classifier
from common.run.best import when_best
from common.run.callbacks import FitLog, Profile
from common.run.results import report, training_results
from common.run.runs import RecipeRun
from common.run.speed import model_flops
from common.scores.classification import classifier_results, predict_outputs, write_all_predictions
from common.training.losses import CrossEntropy
from common.training.optimizers import make_optimizer
from common.training.schedules import WarmUpPolynomialDecay
from keras_replicas import Checkpoints, data_parallel, make_strategy


def make_datasets(config: Config) -> EncodedTexts:
    """The texts of each split, and the model's inputs for them."""
    texts = open_examples(config.task, config.data, config.text_columns, config.label_column, config.regression)
    documents = functools.partial(map, " ".join, texts.splits["train"].texts)
    vocabulary = None if config.preset else train_wordpieces(documents, config.vocabulary_size)
    preprocessor = make_preprocessor(config.preset, vocabulary, config.seq_length)
    return EncodedTexts.of(texts, preprocessor, few_lengths=config.jit)


def build_model(config: Config, data: EncodedTexts, schedule=0.0) -> keras.Model:
    """A compiled text classifier. Call it inside the strategy's scope."""
    model = make_classifier(config.preset, config.model or "tiny", data, config.dropout, config.lora_rank)
    loss = CrossEntropy if data.texts.classes else keras.losses.MeanSquaredError
    loss = loss(reduction="mean_with_sample_weight")  # over all examples of the whole batch
    optimizer = make_optimizer("adamw", schedule, weight_decay=0.01)
    model.compile(optimizer, loss, jit_compile=config.jit, steps_per_execution=config.steps_per_execution)
    return data_parallel(model, accumulate=config.accumulate)


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} for workers other than the chief."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    run = RecipeRun("text_classifier", config)
    if run.results:
        return run.results
    width = model_width(config.preset, config.model or "tiny")
    run.configure_keras(config, width)
    scaled = run.scale(config, strategy.num_replicas_in_sync, config.peak_rate(width), "adamw")

    data = make_datasets(config)
    run.check_data(data.sizes(), data.checksums())
    train, validation = data.stream("train", scaled, config.seed), data.stream("validation", scaled)
    total_steps = min(len(train) * config.epochs, config.max_steps or sys.maxsize)
    schedule = WarmUpPolynomialDecay(scaled.learning_rate, int(config.warmup * total_steps), total_steps)

    with strategy.scope():
        model = build_model(config, data, schedule)

    options: dict = {"every": config.checkpoint_every, "max_steps": total_steps}
    checkpoints = Checkpoints(run.workdir / "checkpoints", exit_on_sigterm=True, **options)
    log = FitLog(run.workdir, len(train), total_steps, asdict(config), model_flops(model, config))
    save = functools.partial(save_classifier, model, data)
    best = when_best("val_loss", lambda *_: save(run.workdir / "best"), run.workdir)
    best = keras.callbacks.LambdaCallback(on_epoch_end=best)

    model.fit(
        train,
        epochs=config.epochs,
        validation_data=validation,
        callbacks=[log, best, Profile(run.workdir, config.profile_steps), checkpoints],
        verbose=verbosity(),  # a bar on a terminal and in a notebook, one line per epoch in a log file
    )

    results = training_results("text_classifier", config, strategy, scaled.global_batch_size, log)
    splits = [split for split in data.sizes() if split != "train"]
    outputs = {split: predict_outputs(strategy, model, data, split, scaled) for split in splits}
    results |= classifier_results(data.texts, outputs, data.preprocessor.tokenizer)

    write_all_predictions(run.workdir / "predictions", data.texts, outputs)
    save(run.workdir / "preset")
    return run.finish(results)


def main(config: Config) -> None:
    """Trains, and prints the report."""
    if results := train_and_evaluate(config):
        print(report(results))


if __name__ == "__main__":
    run(main, CONFIG)
