import random

import numpy as np
import pytest
import sklearn.feature_extraction
import sklearn.linear_model
import sklearn.metrics

from common.scores.baselines import LIMIT, bag_outputs, baseline_outputs, best_constant, length_bags, word_bags
from common.scores.metrics import classification_scores

VOCABULARY = 50


def words(draw, count):
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def split(make_example, seed, count=1500):
    draw = random.Random(seed)
    examples = [make_example(draw) for _ in range(count)]
    return [texts for texts, _ in examples], [label for _, label in examples]


def accuracies(make_example, num_classes=2):
    train, train_labels = split(make_example, 0)
    others, labels = split(make_example, 1, 500)
    found = baseline_outputs(train, train_labels, others, VOCABULARY, num_classes)
    return {name: np.mean(logits.argmax(axis=1) == labels) for name, logits in found.items()}


def test_majority_is_of_training():
    assert best_constant([1, 1, 0], 2).tolist() == [0, 1]
    assert best_constant([2, 0, 2, 1], 4).tolist() == [0, 0, 1, 0]
    assert best_constant([1, 0], 2).tolist() == [1, 0]
    found = baseline_outputs([([1],), ([2],), ([2],)], [0, 1, 1], [([1],)] * 5, VOCABULARY, 2)
    assert found["majority"].tolist() == [[0, 1]] * 5 and list(found) == ["majority", "length", "bag_of_words"]


def test_the_mean_is_of_training():
    found = baseline_outputs([([1],), ([2],), ([2],)], [0.5, 1.0, 4.5], [([1],)] * 5, VOCABULARY, 0)
    assert found["mean"].tolist() == [[2.0]] * 5 and list(found) == ["mean", "length", "bag_of_words"]
    assert all(numbers.shape == (5, 1) for numbers in found.values())


def test_noise_is_not_learned():
    found = accuracies(lambda draw: ((words(draw, 5), words(draw, 5)), draw.randrange(2)))
    assert all(accuracy == pytest.approx(0.5, abs=0.07) for accuracy in found.values())


def test_words_tell():
    def example(draw):
        label = draw.randrange(3)
        return ([*words(draw, 5), 3 * draw.randrange(10) + label, *words(draw, 2)],), label

    def sum_of(draw):
        text = words(draw, draw.randint(3, 8))
        return (text,), int(sum(text) > 25 * len(text))

    assert accuracies(example, num_classes=3)["length"] < 0.45
    found = accuracies(sum_of)
    assert found["bag_of_words"] > 0.9 and found["length"] < 0.65


def test_which_text_a_word_is_in_and_which_are_shared_tell():
    def placed(draw):
        texts, label = (words(draw, 4), words(draw, 4)), draw.randrange(2)
        texts[label].append(7)
        texts[1 - label].append(8)
        return texts, label

    def shared(draw):
        label = draw.randrange(2)
        first = draw.sample(range(VOCABULARY), 4)
        others = sorted(set(range(VOCABULARY)) - set(first))
        return (first, draw.sample(first, 4) if label else draw.sample(others, 4)), label

    assert accuracies(placed)["bag_of_words"] > 0.95
    assert accuracies(shared)["bag_of_words"] > 0.95
    assert accuracies(shared)["length"] < 0.6


@pytest.mark.parametrize("which", ["first", "second", "difference"])
def test_lengths_tell(which):
    def example(draw):
        one, two = draw.randint(1, 20), draw.randint(1, 20)
        label = {"first": one > 10, "second": two > 10, "difference": one > two}[which]
        return (words(draw, one), words(draw, two)), int(label)

    assert accuracies(example)["length"] > 0.95


def test_texts_of_any_length():
    ids = [([], [1] * 600), ([1] * 600, []), ([3],), ([],)]
    bags, num_features = length_bags(ids)
    assert all(0 <= feature < num_features for bag in bags for feature in bag)
    assert bags[0] == [0, 2 * LIMIT - 1, 2 * LIMIT + 1]
    assert word_bags([([1, 2], [2, 3]), ([1],)], 5) == ([[1, 2, 7, 8, 12], [1]], 15)
    assert bag_outputs([[0], [], [1]], [0, 0, 1], [[0], []], 2, 2).argmax(axis=1).tolist() == [0, 0]


def test_as_good_as_scikit_learns_and_the_same_each_time():
    def example(draw):
        text = words(draw, 10)
        return (text,), int(sum(text) + draw.gauss(0, 40) > 250)

    (train, train_labels), (others, labels) = split(example, 0), split(example, 1, 1000)
    bags, num_features = word_bags(train, VOCABULARY)
    other_bags, _ = word_bags(others, VOCABULARY)
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    logits = bag_outputs(bags, train_labels, other_bags, num_features, 2)
    np.testing.assert_array_equal(logits, bag_outputs(bags, train_labels, other_bags, num_features, 2))
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # the caller's random numbers are left alone

    train_vectors, other_vectors = vectors_of(bags, other_bags)
    peer = sklearn.linear_model.LogisticRegression(max_iter=1000).fit(train_vectors, train_labels)
    found = np.mean(logits.argmax(axis=1) == labels)
    assert found == pytest.approx(peer.score(other_vectors, labels), abs=0.03)
    theirs = sklearn.metrics.log_loss(labels, peer.predict_proba(other_vectors))
    assert classification_scores(logits, labels)["loss"] == pytest.approx(theirs, abs=0.03)


def vectors_of(bags, other_bags):
    """For scikit-learn: how often each bag has each feature."""
    vectors = sklearn.feature_extraction.DictVectorizer()
    train_vectors = vectors.fit_transform([{str(t): bag.count(t) for t in bag} for bag in bags])
    return train_vectors, vectors.transform([{str(t): bag.count(t) for t in bag} for bag in other_bags])


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1e4, 1e6), (1e-3, -5.0)])
def test_regression_is_as_good_as_scikit_learns_in_any_unit(scale, offset):
    def example(draw):
        text = words(draw, 10)
        return (text,), offset + scale * (sum(text) / 50 + draw.gauss(0, 0.5))

    (train, train_labels), (others, labels) = split(example, 0, 3000), split(example, 1, 1000)
    bags, num_features = word_bags(train, VOCABULARY)
    other_bags, _ = word_bags(others, VOCABULARY)
    found = bag_outputs(bags, train_labels, other_bags, num_features, 0)[:, 0]
    train_vectors, other_vectors = vectors_of(bags, other_bags)
    peer = sklearn.linear_model.Ridge(1.0, solver="lsqr").fit(train_vectors, train_labels)
    theirs, unexplained = peer.score(other_vectors, labels), np.mean((found - labels) ** 2) / np.var(labels)
    assert theirs > 0.7 and 1 - unexplained == pytest.approx(theirs, abs=0.01)
