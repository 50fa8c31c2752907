# SPDX-License-Identifier: Apache-2.0
"""Scores of a fine-tuned model and of its baselines, a confusion matrix in TensorBoard, and predictions.

A model's outputs are logits, [examples, classes], or, for regression, numbers, [examples, 1].
"""

from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from common.data.encoding import token_ids
from common.data.labelled import LabelledTexts
from common.data.text_batches import EncodedTexts, in_order
from common.scores.baselines import baseline_outputs
from common.scores.entries import entry
from common.scores.metrics import classification_scores, confusion_matrix, regression_scores
from common.training.scaling import Scaled
from keras_replicas import distribute, first_replica, gather_over_replicas, is_chief


def predict_outputs(
    strategy: tf.distribute.Strategy, model: keras.Model, data: EncodedTexts, split: str, scaled: Scaled
) -> np.ndarray:
    """A model's outputs for every example of a split, on every worker.

    Each replica computes its part of every batch of `scaled`.
    """

    def replica_step(x, examples):
        return gather_over_replicas((examples, model(x, training=False)))

    @tf.function(reduce_retracing=True)
    def step(batch):
        return first_replica(strategy, strategy.run(replica_step, args=batch))

    batches = distribute(strategy, data.stream(split, scaled, labelled=False))
    return in_order(map(step, batches), data.sizes()[split])


def scores_of(texts: LabelledTexts, split: str, outputs: np.ndarray) -> dict[str, float]:
    """Entries such as `val_loss` and `val_accuracy`, for the split `validation`: its loss and the task's metrics.

    The outputs are those of the split's examples; a split without labels has no entries.
    """
    if texts.splits[split].labels is None:
        return {}
    scores = _scores(texts, split, outputs)
    return {entry(split, name): scores[name] for name in ("loss", *texts.metrics)}


def classifier_results(
    texts: LabelledTexts, outputs: dict[str, np.ndarray], tokenizer: keras_hub.models.Tokenizer
) -> dict[str, Any]:
    """These models' part of `results.json`: loss, metrics and baselines of each labelled split.

    A baseline has the task's metrics, such as `val_bag_of_words_accuracy`; the mean of the training labels, which
    correlates with nothing, has a `val_mean_loss` instead.

    The outputs are those of each split but `train`; the bag's words are the tokenizer's tokens.
    """
    labelled = [split for split in outputs if texts.splits[split].labels is not None]
    ids = {split: token_ids(texts.splits[split].texts, tokenizer) for split in ("train", *labelled)}
    known = sorted({token for example in ids["train"] for text in example for token in text})
    number = {token: place for place, token in enumerate(known)}  # a vocabulary may be large; all others count as one
    numbers = {
        split: [[[number.get(token, len(known)) for token in text] for text in example] for example in examples]
        for split, examples in ids.items()
    }
    others = [example for split in labelled for example in numbers[split]]  # of all splits: one fit serves them
    sizes = len(known) + 1, len(texts.classes)
    baselines = baseline_outputs(numbers["train"], texts.splits["train"].labels or [], others, *sizes)
    results: dict[str, Any] = {}
    end = 0
    for split in labelled:
        results |= scores_of(texts, split, outputs[split])
        start, end = end, end + len(ids[split])
        for baseline, simple in baselines.items():
            scores = _scores(texts, split, simple[start:end])
            names = ("loss",) if baseline == "mean" else texts.metrics
            results |= {entry(split, f"{baseline}_{name}"): scores[name] for name in names}
    return results


def draw_confusion(texts: LabelledTexts, split: str, outputs: np.ndarray, step: int | None = None) -> None:
    """Writes a labelled split's confusion matrix to TensorBoard, as text such as `validation/confusion`.

    The outputs are those of the split's examples; without a step, TensorBoard's own is used. Regression has no matrix.
    """
    if texts.splits[split].labels is None or not texts.classes:
        return
    counts = confusion_matrix(np.array(texts.splits[split].labels), outputs.argmax(axis=1), len(texts.classes))
    rows = [["true \\ predicted", *texts.classes], ["---"] * (len(texts.classes) + 1)]
    rows += [[name, *map(str, row)] for name, row in zip(texts.classes, counts, strict=True)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    tf.summary.text(f"{split}/confusion", table, step=step)


def write_all_predictions(folder: Path, texts: LabelledTexts, outputs: dict[str, np.ndarray]) -> None:
    """Writes the predictions of each split in GLUE's format, those of the test split under GLUE's file name.

    They are the names of classes, or numbers; those of the test split are clipped to the task's limits. Only the chief
    writes. The folder is created if missing.
    """
    if not is_chief():
        return
    folder.mkdir(exist_ok=True)
    for split, rows in outputs.items():
        name = texts.submission if split == "test" else f"{split}.tsv"
        if texts.classes:
            predictions = [texts.classes[place] for place in rows.argmax(axis=1)]
        else:
            predictions = list(map(str, rows[:, 0].clip(*texts.limits) if split == "test" else rows[:, 0]))
        write_predictions(folder / name, texts.splits[split].indices, predictions)


def write_predictions(path: Path, indices: list[str], predictions: list[str]) -> None:
    """Writes, in GLUE's submission format, the names of the examples and their predictions, [examples].

    Raises:
        ValueError: when their numbers differ.
    """
    lines = [f"{index}\t{prediction}\n" for index, prediction in zip(indices, predictions, strict=True)]
    path.write_text("".join(["index\tprediction\n", *lines]), encoding="utf-8")


def _scores(texts: LabelledTexts, split: str, outputs: np.ndarray) -> dict[str, float]:
    measure = classification_scores if texts.classes else regression_scores
    return measure(outputs, np.array(texts.splits[split].labels))
