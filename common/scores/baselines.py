# SPDX-License-Identifier: Apache-2.0
"""Baselines for fine-tuned models: majority class or mean, text lengths and bag of words, which ignore word order.

All in NumPy, with its own seed: Keras and TensorFlow are not used, and the same input gives the same figures.
"""

from collections.abc import Callable, Sequence

import numpy as np

TextIds = Sequence[Sequence[Sequence[int]]]  # for each example, the token ids of its one or two texts
LIMIT = 256  # tokens; longer texts count as this long
EPOCHS = 10
STEPS = 200  # per epoch, or fewer if batches would have fewer than 32 examples
LEARNING_RATE = 0.01  # with linear decay to zero
BETAS = (0.9, 0.999)  # of Adam, Kingma and Ba 2014, arXiv:1412.6980


def baseline_outputs(
    train: TextIds, train_labels: Sequence[float], others: TextIds, vocabulary_size: int, num_classes: int
) -> dict[str, np.ndarray]:
    """The outputs of simple models, trained on one split, for the examples of another; takes a few seconds.

    Args:
        train: token ids of the training examples' texts, below `vocabulary_size` and without special tokens.
        train_labels: their classes, below `num_classes`, or numbers, [training examples].
        others: as `train`, for the examples to predict.
        num_classes: 0 for regression.

    Returns:
        Logits [others, classes], or numbers [others, 1], from `majority`, always the most frequent class, or `mean`,
        that of the training labels; `length`, by the texts' lengths alone; and `bag_of_words`, by the words of each
        text and those that they share, without order.
    """

    def outputs(make_bags, *arguments) -> np.ndarray:
        bags, num_features = make_bags(train, *arguments)
        other_bags, _ = make_bags(others, *arguments)
        return bag_outputs(bags, train_labels, other_bags, num_features, num_classes)

    return {
        "majority" if num_classes else "mean": np.tile(best_constant(train_labels, num_classes), (len(others), 1)),
        "length": outputs(length_bags),
        "bag_of_words": outputs(word_bags, vocabulary_size),
    }


def best_constant(train_labels: Sequence[float], num_classes: int) -> np.ndarray:
    """1 for the most frequent class, the lowest in a tie, and 0 for others, [classes]; for regression the mean, [1]."""
    if not num_classes:
        return np.array([np.mean(train_labels)])
    return np.eye(num_classes)[np.bincount(train_labels).argmax()]


def bag_outputs(
    train_bags: list[list[int]],
    train_labels: Sequence[float],
    bags: list[list[int]],
    num_features: int,
    num_classes: int,
) -> np.ndarray:
    """The outputs of multinomial logistic regression on bags of features, trained with Adam for 10 epochs; see above.

    A bag holds the numbers, below `num_features`, of an example's features; one that comes twice counts twice. Without
    classes, it is linear regression, on labels scaled to mean 0 and standard deviation 1.
    """
    train = [np.array([*bag, num_features]) for bag in train_bags]  # one more feature, which all have: the bias
    others = [np.array([*bag, num_features]) for bag in bags]
    start = np.zeros((num_features + 1, num_classes or 1))
    if num_classes:
        return _sums(others, _fit(train, np.eye(num_classes)[np.asarray(train_labels)], start, _softmax))[0]
    mean, deviation = np.mean(train_labels), np.std(train_labels)
    targets = (np.asarray(train_labels)[:, None] - mean) / deviation
    return mean + deviation * _sums(others, _fit(train, targets, start, lambda sums: sums))[0]


def length_bags(ids: TextIds) -> tuple[list[list[int]], int]:
    """The lengths of both texts and their difference, each value as a feature; and how many features."""

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


def _fit(
    bags: list[np.ndarray], targets: np.ndarray, weights: np.ndarray, predict: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Trains weights, [features, outputs], to predict targets, [bags, outputs], and returns the trained ones.

    The loss is cross-entropy if `predict` is a softmax of each bag's sums of weights, and half the squared error if it
    is the sums themselves: both have the same gradient.
    """
    draw = np.random.default_rng(0)
    batch = max(len(bags) // STEPS, 32)
    starts = range(0, len(bags), batch)
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for epoch in range(EPOCHS):
        order = draw.permutation(len(bags))
        for number, start in enumerate(starts, start=epoch * len(starts)):
            examples = order[start : start + batch]
            sums, features, owners = _sums([bags[example] for example in examples], weights)
            errors = (predict(sums) - targets[examples]) / len(examples)
            gradient = np.stack([np.bincount(features, error[owners], len(weights)) for error in errors.T], axis=1)
            mean += (1 - BETAS[0]) * (gradient - mean)
            square += (1 - BETAS[1]) * (gradient**2 - square)
            rate = LEARNING_RATE * (1 - number / (EPOCHS * len(starts)))
            unbiased = mean / (1 - BETAS[0] ** (number + 1)), square / (1 - BETAS[1] ** (number + 1))
            weights = weights - rate * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    return weights


def _sums(bags: list[np.ndarray], weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sums of the weights of each bag, [bags, outputs]; all bags' features, and to which bag each belongs."""
    features = np.concatenate(bags)
    owners = np.repeat(np.arange(len(bags)), [len(bag) for bag in bags])
    sums = [np.bincount(owners, column[features], len(bags)) for column in weights.T]
    return np.stack(sums, axis=1), features, owners


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)
