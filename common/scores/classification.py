# SPDX-License-Identifier: Apache-2.0
"""Scores of a fine-tuned model and of its baselines, a confusion matrix in TensorBoard, and predictions.

A model's outputs are logits, [examples, classes], or for regression numbers, [examples, 1].
"""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from common.data.byte_pairs import Vocabulary
from common.data.labelled import LabelledTexts
from common.data.text_batches import token_ids
from common.devices.cluster import is_chief
from common.scores.baselines import baseline_outputs
from common.scores.language_model import entry
from common.scores.metrics import classification_scores, confusion_matrix, regression_scores


def scores_of(texts: LabelledTexts, split: str, outputs: np.ndarray) -> dict[str, float]:
    """Entries such as `val_loss` and `val_accuracy`, for the split `validation`: its loss and the task's metrics.

    The outputs are those of the split's examples; a split without labels has no entries.
    """
    if texts.splits[split].labels is None:
        return {}
    scores = _scores(texts, split, outputs)
    return {entry(split, name): scores[name] for name in ("loss", *texts.metrics)}


def classifier_results(texts: LabelledTexts, outputs: dict[str, np.ndarray], vocabulary: Vocabulary) -> dict[str, Any]:
    """The part of `results.json` that these models have: loss, metrics and baselines of each labelled split.

    A baseline has the task's metrics, such as `val_bag_of_words_accuracy`; the mean of the training labels, which has
    no correlation with any, has a `val_mean_loss`.

    The outputs are those of each split but `train`; the vocabulary has the words of the bags.
    """
    results: dict[str, Any] = {}
    train = texts.splits["train"]
    learned = token_ids(train.texts, vocabulary), train.labels or []
    sizes = len(vocabulary.pieces), len(texts.classes)
    for split in outputs:
        if texts.splits[split].labels is not None:
            results |= scores_of(texts, split, outputs[split])
            others = token_ids(texts.splits[split].texts, vocabulary)
            for baseline, simple in baseline_outputs(*learned, others, *sizes).items():
                scores = _scores(texts, split, simple)
                names = ("loss",) if baseline == "mean" else texts.metrics
                results |= {entry(split, f"{baseline}_{name}"): scores[name] for name in names}
    return results


def draw_confusion(texts: LabelledTexts, split: str, outputs: np.ndarray, step: int | None = None) -> None:
    """Writes a labelled split's confusion matrix to TensorBoard, as text such as `validation/confusion`.

    The outputs are those of the split's examples; without a step, TensorBoard's own counts. Numbers have no matrix.
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
    """Writes, in GLUE's submission format, the names of the examples and what is predicted of them, [examples].

    Raises:
        ValueError: when their numbers differ.
    """
    lines = [f"{index}\t{prediction}\n" for index, prediction in zip(indices, predictions, strict=True)]
    path.write_text("".join(["index\tprediction\n", *lines]), encoding="utf-8")


def _scores(texts: LabelledTexts, split: str, outputs: np.ndarray) -> dict[str, float]:
    measure = classification_scores if texts.classes else regression_scores
    return measure(outputs, np.array(texts.splits[split].labels))
