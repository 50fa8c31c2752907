# SPDX-License-Identifier: Apache-2.0
"""Losses and GLUE's metrics (Wang et al. 2018, arXiv:1804.07461) for classes and for numbers, in NumPy."""

import numpy as np


def classification_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of a classifier's logits, [examples, classes], taken as float64, given the true classes, [examples].

    F1 is 2 TP / (2 TP + FP + FN), and 0 for a class that is neither present nor predicted, as in scikit-learn.

    Returns:
        `loss`, the mean cross-entropy in nats per example; `accuracy`; `f1`, for two classes that of class 1 (as GLUE
        scores MRPC), for more the mean over all classes ("macro"); and `matthews`.
    """
    logits, labels = np.asarray(logits, np.float64), np.asarray(labels, np.int64)
    num_classes, predictions = logits.shape[1], logits.argmax(axis=1)
    shifted = logits - logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]
    matrix = confusion_matrix(labels, predictions, num_classes)
    right = np.diagonal(matrix)
    f1 = 2 * right / np.maximum(matrix.sum(axis=0) + matrix.sum(axis=1), 1)
    return {
        "loss": float(losses.mean()),
        "accuracy": float(right.sum() / len(labels)),
        "f1": float(f1[1] if num_classes == 2 else f1.mean()),
        "matthews": matthews(matrix),
    }


def regression_scores(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of predicted numbers, [examples, 1], taken as float64, given the true ones, [examples].

    Returns:
        `loss`, the mean squared error; `pearson`; and `spearman`, the correlation of ranks, where ties share a mean.
    """
    predictions, labels = np.asarray(predictions, np.float64)[:, 0], np.asarray(labels, np.float64)
    return {
        "loss": float(np.mean((predictions - labels) ** 2)),
        "pearson": correlation(predictions, labels),
        "spearman": correlation(ranks(predictions), ranks(labels)),
    }


def matthews(matrix: np.ndarray) -> float:
    """Matthews's correlation coefficient of a confusion matrix; 0 if only one class is present, or is predicted.

    For any number of classes: Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation
    coefficient".
    """
    matrix = matrix.astype(np.float64)  # the products do not fit into an int64
    total, true, predicted = matrix.sum(), matrix.sum(axis=1), matrix.sum(axis=0)
    spread = (total**2 - true @ true) * (total**2 - predicted @ predicted)
    return float((total * matrix.trace() - true @ predicted) / np.sqrt(spread)) if spread else 0.0


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation of two vectors; 0 if one is constant, where it is not defined and SciPy gives NaN."""
    if (x == x[0]).all() or (y == y[0]).all():
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1, 1))


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value of a vector, from 1; equal values have the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def confusion_matrix(labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> np.ndarray:
    """The confusion matrix, int64 [true class, predicted class], of true and predicted classes, [examples]."""
    places = np.asarray(labels, np.int64) * num_classes + np.asarray(predictions, np.int64)
    return np.bincount(places, minlength=num_classes**2).reshape(num_classes, num_classes)
