# SPDX-License-Identifier: Apache-2.0
"""Figures that a model's loss is held against, and scores of a classifier."""

import math
from collections.abc import Iterable

import numpy as np


def unigram_loss(counts: np.ndarray, targets: Iterable[np.ndarray], never_targets: Iterable[int] = ()) -> float:
    """Mean loss, in nats a token, of guessing targets by how often each token occurs in training.

    This is what the best model that looks at no context would reach; a language model has learned nothing until it is
    below. Token t's probability is (count(t) + 1) / (tokens + vocabulary size): add-one smoothing, so that a token that
    training never saw has a finite loss (Laplace; Jurafsky and Martin, "Speech and Language Processing", chapter 3).

    Args:
        counts: how often each id occurs in training, [vocabulary size]; see `count_ids`.
        targets: arrays of ids that the loss is the mean over.
        never_targets: ids that are not counted in training, as they are never asked for: padding and the like.
    """
    counts = np.array(counts)
    counts[list(never_targets)] = 0
    log_probability = np.log((counts + 1) / (counts.sum() + len(counts)))
    targets = np.concatenate([np.ravel(t) for t in targets])
    return float(-log_probability[targets].mean())


def count_ids(sequences: np.ndarray, vocabulary_size: int) -> np.ndarray:
    """How often each id occurs, int64 [vocabulary_size], in ids [sequences, length]."""
    counts = np.zeros(vocabulary_size, np.int64)
    for start in range(0, len(sequences), 4096):
        counts += np.bincount(sequences[start : start + 4096].ravel(), minlength=vocabulary_size)
    return counts


def perplexity(loss: float) -> float:
    """exp(loss): among how many equally likely tokens the model hesitates; infinity where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def language_model_scores(split: str, scores: dict[str, float], unigram: float) -> dict[str, float]:
    """Entries `val_loss` (for the split `validation`), `val_accuracy` and so on; losses in nats a masked token.

    Args:
        split: that was evaluated.
        scores: its `loss` and `accuracy`.
        unigram: see `unigram_loss`.
    """
    own = {name: scores[name] for name in ("loss", "accuracy")}
    own |= {"perplexity": perplexity(scores["loss"]), "unigram_loss": unigram}
    return {entry(split, name): value for name, value in own.items()}


def entry(split: str, name: str) -> str:
    """The name of an entry: `val_loss` for the split `validation` and the name `loss`."""
    return f"{'val' if split == 'validation' else split}_{name}"


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> np.ndarray:
    """How often each class was taken for which: int64 [true class, predicted class].

    Args:
        labels: true classes, [examples].
        predictions: predicted classes, [examples].
        num_classes: both are below it.
    """
    places = np.asarray(labels, np.int64) * num_classes + np.asarray(predictions, np.int64)
    return np.bincount(places, minlength=num_classes**2).reshape(num_classes, num_classes)


def classification_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of a classifier.

    F1 is 2 TP / (2 TP + FP + FN), and 0 where a class is neither there nor predicted, as in scikit-learn.

    Args:
        logits: [examples, classes]; any float type, taken as float64.
        labels: true classes, [examples].

    Returns:
        `loss`, the mean cross-entropy in nats an example; `accuracy`; and `f1`, with two classes that of class 1 (as
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
