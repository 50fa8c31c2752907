# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a text classifier on labelled sentences or pairs of them, data-parallel, with Keras fit.

    python -m recipes run text_classifier                          # generated pairs, no network needed
    python -m recipes run text_classifier --task mrpc --preset hf://sentence-transformers/all-MiniLM-L6-v2
    python -m recipes run text_classifier --task own --data reviews.csv --text-columns review --label-column stars

Time: 1 to 2 min on 2 cores. Metric: the task's own on the validation split, against a bag-of-words baseline.

The model is of any family that KerasHub has a text classifier for, such as BERT, RoBERTa, DistilBERT, ALBERT and
DeBERTaV3, with its own tokenizer. Examples of similar length share a batch, so that little of it is padding.
"""

import os
import sys

# These must be set before the first import of Keras and TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log off the screen

from dataclasses import asdict, dataclass
from typing import Annotated

from common.command_line import FIRST, FREE, FitOptions, parse, quiet_stderr, run
from common.model.classifier_options import ClassifierOptions


@dataclass(frozen=True)
class Config(ClassifierOptions, FitOptions):
    """The options of `text_classifier`, in addition to those of every recipe."""

    # work directory: results, logs, checkpoints, preset, predictions
    workdir: Annotated[str, FIRST, FREE] = "runs/text_classifier"


if __name__ == "__main__":  # before TensorFlow is imported, so that a typo is reported at once
    CONFIG = parse(Config, __doc__)

with quiet_stderr():
    import keras

from common.classification_scores import classifier_results, told_of, write_predictions
from common.data.examples import EncodedTexts
from common.data.labelled import open_examples
from common.data.vocabulary import train_wordpieces
from common.log import RunLog, print_plan, report
from common.model.classifier import make_classifier, make_preprocessor, save_classifier
from common.run_folder import open_run
from common.training import Accuracy, WarmUpPolynomialDecay, adamw, scale
from keras_replicas import Checkpoints, data_parallel, make_strategy


def make_datasets(config: Config) -> EncodedTexts:
    """The texts of each split, and the model's inputs for them."""
    texts = open_examples(config.task, config.data, config.text_columns, config.label_column, config.regression)
    words = None if config.preset else train_wordpieces(texts.documents, texts.fingerprint, config.vocabulary_size)
    return EncodedTexts(texts, make_preprocessor(config.preset, words, config.seq_length))


def build_model(config: Config, data: EncodedTexts, schedule=0.0) -> keras.Model:
    """A compiled text classifier, or for regression one with a single output. Call it inside the strategy's scope."""
    model = make_classifier(config.preset, config.model or "tiny", data, config.dropout, config.lora_rank)
    reduction = "mean_with_sample_weight"  # over all examples of the whole batch
    loss = keras.losses.MeanSquaredError(reduction)
    if data.texts.classes:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    metrics = [Accuracy()] if data.texts.classes else []
    model.compile(adamw(schedule), loss, metrics=[], weighted_metrics=metrics, jit_compile=config.jit)
    return data_parallel(model, accumulate=config.accumulate)


def train_and_evaluate(config: Config) -> dict:
    """Trains, evaluates, and returns what it writes to `results.json`; {} after a dry run, and for other workers."""
    strategy = make_strategy(config.replicas, deterministic=config.deterministic)
    with open_run(config.folder(), config.fixed("text_classifier"), overwrite=config.overwrite) as run:
        if run.results:
            return run.results
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        replicas = strategy.num_replicas_in_sync
        rate = config.learning_rate or (5e-5 if config.preset else 5e-4)
        # A run that is resumed keeps them, whatever the number of replicas now.
        batch_size, rate = run.keep("scaled", lambda: scale(config.batch_size, rate, replicas, config.lr_scaling))

        data = make_datasets(config)
        train, validation = data.batches("train", batch_size, config.seed), data.batches("validation", batch_size)
        run.begin_with("data", [train.fingerprint(), validation.fingerprint()])
        total_steps = min(len(train) * config.epochs, config.max_steps or sys.maxsize)
        schedule = WarmUpPolynomialDecay(rate, total_steps)

        with strategy.scope():
            model = build_model(config, data, schedule)
        if config.dry_run:
            return print_plan(model, train, schedule, total_steps, data.preprocessor.tokenizer)
        log = RunLog(run.folder, train)
        checkpoints = Checkpoints(
            run.folder / "checkpoints", every=config.checkpoint_every, max_steps=total_steps, exit_on_sigterm=True
        )
        model.fit(train, epochs=config.epochs, validation_data=validation, callbacks=[log, checkpoints])

        results = {"recipe": "text_classifier", "global_batch_size": batch_size, "config": asdict(config)}
        outputs = {split: model.predict(data.batches(split, batch_size), verbose=0) for split in data.evaluated}
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
