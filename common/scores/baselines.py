# SPDX-License-Identifier: Apache-2.0
"""Baselines for text classifiers: majority class, text lengths and bag of words, which ignore word order.

All in NumPy, with its own seed: Keras and TensorFlow are not used, and the same input gives the same figures.
"""

from collections.abc import Sequence

import numpy as np

TextIds = Sequence[Sequence[Sequence[int]]]  # of each example, the token ids of its one or two texts
LIMIT = 256  # tokens; longer texts count as this long
EPOCHS = 10
STEPS = 200  # per epoch, or fewer if batches would have fewer than 32 examples
LEARNING_RATE = 0.01  # with linear decay to zero
BETAS = (0.9, 0.999)  # of Adam, Kingma and Ba 2014, arXiv:1412.6980


def baseline_accuracies(
    train: TextIds,
    train_labels: Sequence[int],
    others: TextIds,
    labels: Sequence[int],
    vocabulary_size: int,
    num_classes: int,
) -> dict[str, float]:
    """Accuracies of simple classifiers, trained on one split and evaluated on another; a few seconds.

    Args:
        train, train_labels: token ids of the training examples' texts, below `vocabulary_size` and without special
            tokens, and their classes, [training examples], below `num_classes`.
        others, labels: the same of the examples to measure on.

    Returns:
        `majority`, always the most frequent class; `length`, on the texts' lengths alone; `bag_of_words`, on the words
        of each text and those that they share, without order.
    """

    def accuracy(make_bags, *arguments) -> float:
        bags, num_features = make_bags(train, *arguments)
        other_bags, _ = make_bags(others, *arguments)
        return bag_accuracy(bags, train_labels, other_bags, labels, num_features, num_classes)

    return {
        "majority": majority_accuracy(train_labels, labels),
        "length": accuracy(length_bags),
        "bag_of_words": accuracy(word_bags, vocabulary_size),
    }


def majority_accuracy(train_labels: Sequence[int], labels: Sequence[int]) -> float:
    """The fraction of `labels` equal to the most frequent one of `train_labels`, the lowest in a tie."""
    return float(np.mean(np.asarray(labels) == np.bincount(train_labels).argmax()))


def bag_accuracy(
    train_bags: list[list[int]],
    train_labels: Sequence[int],
    bags: list[list[int]],
    labels: Sequence[int],
    num_features: int,
    num_classes: int,
) -> float:
    """The accuracy of multinomial logistic regression on bags of features, trained with Adam for 10 epochs.

    A bag holds the numbers, below `num_features`, of an example's features; one that comes twice counts twice.
    """
    train = [np.array([*bag, num_features]) for bag in train_bags]  # one more, which all have: the bias
    others = [np.array([*bag, num_features]) for bag in bags]
    weights = _fit(train, np.asarray(train_labels), np.zeros((num_features + 1, num_classes)))
    return float(np.mean(_logits(others, weights)[0].argmax(axis=1) == np.asarray(labels)))


def length_bags(ids: TextIds) -> tuple[list[list[int]], int]:
    """The length of the first text, of the second and their difference, a feature for each value; and how many."""

    def bag(first: Sequence[int], second: Sequence[int] = ()) -> list[int]:
        one, two = min(len(first), LIMIT - 1), min(len(second), LIMIT - 1)
        return [one, LIMIT + two, 3 * LIMIT + one - two]

    return [bag(*texts) for texts in ids], 4 * LIMIT


def word_bags(ids: TextIds, vocabulary_size: int) -> tuple[list[list[int]], int]:
    """The tokens in the first text, those in the second and those in both, each as a feature; and how many features."""

    def bag(first: Sequence[int], second: Sequence[int] = ()) -> list[int]:
        shared = sorted(set(first) & set(second))
        return [*first, *(vocabulary_size + token for token in second), *(2 * vocabulary_size + t for t in shared)]

    return [bag(*texts) for texts in ids], 3 * vocabulary_size


def _fit(bags: list[np.ndarray], labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Minimises the cross-entropy from these weights, [features, classes]."""
    draw = np.random.default_rng(0)
    batch = max(len(bags) // STEPS, 32)
    starts = range(0, len(bags), batch)
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for epoch in range(EPOCHS):
        order = draw.permutation(len(bags))
        for number, start in enumerate(starts, start=epoch * len(starts)):
            examples = order[start : start + batch]
            gradient = _gradient([bags[example] for example in examples], labels[examples], weights)
            mean += (1 - BETAS[0]) * (gradient - mean)
            square += (1 - BETAS[1]) * (gradient**2 - square)
            rate = LEARNING_RATE * (1 - number / (EPOCHS * len(starts)))
            unbiased = mean / (1 - BETAS[0] ** (number + 1)), square / (1 - BETAS[1] ** (number + 1))
            weights = weights - rate * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    return weights


def _logits(bags: list[np.ndarray], weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [examples, classes], the sums of the weights of each bag; and every feature, with whose it is."""
    features = np.concatenate(bags)
    owners = np.repeat(np.arange(len(bags)), [len(bag) for bag in bags])
    sums = [np.bincount(owners, column[features], len(bags)) for column in weights.T]
    return np.stack(sums, axis=1), features, owners


def _gradient(bags: list[np.ndarray], labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    logits, features, owners = _logits(bags, weights)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    errors = (probabilities - np.eye(weights.shape[1])[labels]) / len(bags)
    return np.stack([np.bincount(features, column[owners], len(weights)) for column in errors.T], axis=1)
