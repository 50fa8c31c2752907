# SPDX-License-Identifier: Apache-2.0
"""Metrics of a classifier's logits, its baselines, a confusion matrix in TensorBoard, and predictions."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from common.data.byte_pairs import Vocabulary
from common.data.glue import write_predictions
from common.data.labelled import LabelledTexts
from common.data.text_batches import token_ids
from common.devices.cluster import is_chief
from common.scores.baselines import baseline_accuracies
from common.scores.language_model import entry


def scores_of(texts: LabelledTexts, split: str, logits: np.ndarray) -> dict[str, float]:
    """Entries `val_loss` (for the split `validation`), `val_accuracy`, `val_f1` of `classification_scores`.

    The logits are those of the split's examples, [examples, classes]; a split without labels has no entries.
    """
    labels = texts.splits[split].labels
    scores = classification_scores(logits, np.array(labels)) if labels is not None else {}
    return {entry(split, name): value for name, value in scores.items()}


def classifier_results(texts: LabelledTexts, logits: dict[str, np.ndarray], vocabulary: Vocabulary) -> dict[str, Any]:
    """The part of `results.json` that classifiers have: metrics and baselines of each labelled split.

    The logits are those of each split but `train`, [examples, classes]; the vocabulary has the words of the bags.
    """
    results: dict[str, Any] = {}
    train = texts.splits["train"]
    learned = token_ids(train.texts, vocabulary), train.labels or []
    sizes = len(vocabulary.pieces), len(texts.classes)
    for split in logits:
        examples = texts.splits[split]
        if examples.labels is not None:
            results |= scores_of(texts, split, logits[split])
            simple = baseline_accuracies(*learned, token_ids(examples.texts, vocabulary), examples.labels, *sizes)
            results |= {entry(split, f"{name}_accuracy"): accuracy for name, accuracy in simple.items()}
    return results


def draw_confusion(texts: LabelledTexts, split: str, logits: np.ndarray, step: int | None = None) -> None:
    """Writes a labelled split's confusion matrix to TensorBoard, as text such as `validation/confusion`.

    The logits are those of the split's examples, [examples, classes]; without a step, TensorBoard's own counts.
    """
    if texts.splits[split].labels is None:
        return
    counts = confusion_matrix(np.array(texts.splits[split].labels), logits.argmax(axis=1), len(texts.classes))
    rows = [["true \\ predicted", *texts.classes], ["---"] * (len(texts.classes) + 1)]
    rows += [[name, *map(str, row)] for name, row in zip(texts.classes, counts, strict=True)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    tf.summary.text(f"{split}/confusion", table, step=step)


def write_all_predictions(folder: Path, texts: LabelledTexts, logits: dict[str, np.ndarray]) -> None:
    """Writes the predictions of each split in GLUE's format, those of the test split under GLUE's file name.

    Only the chief writes. The folder is created if missing; the logits are [examples, classes].
    """
    if not is_chief():
        return
    folder.mkdir(exist_ok=True)
    for split, rows in logits.items():
        name = texts.submission if split == "test" else f"{split}.tsv"
        classes = [texts.classes[place] for place in rows.argmax(axis=1)]
        write_predictions(folder / name, texts.splits[split].indices, classes)


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> np.ndarray:
    """The confusion matrix, int64 [true class, predicted class], of true and predicted classes, [examples]."""
    places = np.asarray(labels, np.int64) * num_classes + np.asarray(predictions, np.int64)
    return np.bincount(places, minlength=num_classes**2).reshape(num_classes, num_classes)


def classification_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of a classifier's logits, [examples, classes], taken as float64, by the true classes, [examples].

    F1 is 2 TP / (2 TP + FP + FN), and 0 for a class that is neither present nor predicted, as in scikit-learn.

    Returns:
        `loss`, the mean cross-entropy in nats per example; `accuracy`; and `f1`, with two classes that of class 1 (as
        GLUE scores MRPC), with more the mean over all classes ("macro").
    """
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels, np.int64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]
    matrix = confusion_matrix(labels, logits.argmax(axis=1), logits.shape[1])
    right = np.diagonal(matrix)
    f1 = 2 * right / np.maximum(matrix.sum(axis=0) + matrix.sum(axis=1), 1)
    return {
        "loss": float(losses.mean()),
        "accuracy": float(right.sum() / len(labels)),
        "f1": float(f1[1] if len(f1) == 2 else f1.mean()),
    }
