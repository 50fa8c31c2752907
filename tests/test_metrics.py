import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import sklearn.metrics

from common.data.byte_pairs import BytePairs
from common.data.wordpiece import WordPieces
from common.scores.classification import classification_scores, confusion_matrix
from common.scores.language_model import count_ids, language_model_scores, perplexity, unigram_loss


def test_unigram_loss_against_a_hand_count():
    training = np.array([[0, 3, 3, 3], [0, 4, 3, 5]])
    # Of ids 3, 3, 3, 4, 3, 5 (0 does not count), with one added to each of six: 3 has 5/12, 4 has 2/12, 2 has 1/12.
    targets = np.array([3, 4, 2, 3])
    expected = -(2 * math.log(5 / 12) + math.log(2 / 12) + math.log(1 / 12)) / 4
    counts = count_ids(training, SimpleNamespace(pieces=range(6)))
    assert unigram_loss(counts, targets, never_targets=[0]) == pytest.approx(expected)


def test_bits_per_character_do_not_depend_on_the_vocabulary():
    """Hand count: 1 nat for each of 4 tokens, over the letters that they stand for; a token of weight 0 is none."""
    words = WordPieces([*WordPieces.special, "ab", "##cde", "f"], lowercase=True, strip_accents=True)
    pairs = BytePairs([*BytePairs.special, "ab", "Ġcde", "f", "ĠÃ", "¼Ċ"], [])
    for vocabulary, targets, letters in ((words, [5, 6, 7, 7], 7), (pairs, [5, 6, 8, 9], 6)):
        batches = [(None, np.array([targets, [5] * 4]), np.array([[1] * 4, [0] * 4]))]
        counts = np.ones(len(vocabulary.pieces), int)
        scores = language_model_scores("test", {"loss": 1.0, "accuracy": 0.5}, batches, counts, vocabulary)
        assert scores["test_bits_per_character"] == pytest.approx(4 / letters / math.log(2))
        assert scores["test_unigram_loss"] == pytest.approx(math.log(len(counts) + sum(counts) - 5) - math.log(2))


def test_perplexity():
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e9) == math.inf


def random_case(seed, num_classes, num_present):
    draw = np.random.default_rng(seed)
    logits = draw.normal(scale=3, size=(200, num_classes)).astype(np.float32)
    logits[:, num_present:] -= 100  # the other classes are neither there nor predicted
    return logits, draw.integers(num_present, size=200)


@pytest.mark.parametrize(("num_classes", "num_present"), [(2, 2), (2, 1), (3, 3), (5, 3)])
def test_scores_equal_scikit_learns(num_classes, num_present):
    logits, labels = random_case(num_classes, num_classes, num_present)
    scores, predictions, classes = (
        classification_scores(logits, labels),
        logits.argmax(axis=1),
        list(range(num_classes)),
    )
    assert scores["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, predictions), abs=1e-6)
    average = "binary" if num_classes == 2 else "macro"
    f1 = sklearn.metrics.f1_score(labels, predictions, labels=classes, average=average, zero_division=0)
    assert scores["f1"] == pytest.approx(f1, abs=1e-6)
    probabilities = scipy.special.softmax(logits.astype(np.float64), axis=1)
    assert scores["loss"] == pytest.approx(sklearn.metrics.log_loss(labels, probabilities, labels=classes), abs=1e-6)
    expected = sklearn.metrics.confusion_matrix(labels, predictions, labels=classes)
    np.testing.assert_array_equal(confusion_matrix(labels, predictions, num_classes), expected)


def test_f1_is_of_class_one_and_large_logits_do_not_overflow():
    logits = np.array([[1000, 0], [0, 1000], [0, 1000], [1000, 0]])
    scores = classification_scores(logits, np.array([0, 1, 0, 0]))
    assert scores == {"loss": 250.0, "accuracy": 0.75, "f1": pytest.approx(2 / 3)}  # of class 0 it is 0.8
