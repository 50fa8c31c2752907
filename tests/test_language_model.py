"""A language model's scores, by hand counts."""

import math
from types import SimpleNamespace

import keras_hub
import numpy as np
import pytest

from common.language_model import language_model_scores, unigram_loss
from keras_replicas import Batches


def test_unigram_loss():
    """Of ids 3, 3, 3, 4, 3, 5, with one added to each of six: 3 has 5/12, 4 has 2/12, 2 has 1/12."""
    expected = -(2 * math.log(5 / 12) + math.log(2 / 12) + math.log(1 / 12)) / 4
    assert unigram_loss(np.array([0, 0, 0, 4, 1, 1]), np.array([3, 4, 2, 3])) == pytest.approx(expected)


def word_pieces():
    return keras_hub.models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ab", "##cde", "f"])


def byte_pairs():
    """In its alphabet, ü is the letters Ã and ¼, Ġ is a space, as is SentencePiece's letter, and Ċ a line break."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "ab", "Ġ\u2581cde", "f", "ĠÃ", "¼Ċ", "a", "b"]
    return keras_hub.models.RobertaTokenizer({piece: number for number, piece in enumerate(pieces)}, ["a b"])


ENDED = (byte_pairs, [6, 8, 2], 4)  # by a token that is no text


@pytest.mark.parametrize(
    ("make", "targets", "characters"), [(word_pieces, [5, 6, 7], 6), (byte_pairs, [6, 8, 9], 4), ENDED]
)
def test_bits_per_character_do_not_depend_on_the_vocabulary(make, targets, characters):
    """1 nat for each of 3 tokens, over the letters that they stand for; a token of weight 0 is none."""
    labels, weights = np.array([targets, [5] * 3]), np.array([[1.0] * 3, [0.0] * 3])
    counts = np.arange(make().vocabulary_size())
    train = SimpleNamespace(rows=SimpleNamespace(counts=lambda size: counts))
    batches = Batches((labels, labels, weights), 1, shuffle=False)
    scores = language_model_scores("test", {"loss": 1.0, "accuracy": 0.5}, batches, train, make())
    assert scores == {
        "test_loss": 1.0,
        "test_accuracy": 0.5,
        "test_perplexity": pytest.approx(math.e),
        "test_bits_per_character": pytest.approx(3 / characters / math.log(2)),
        "test_unigram_loss": pytest.approx(unigram_loss(counts, np.array(targets))),
    }


def test_a_loss_that_is_beyond_all_has_a_perplexity():
    batches = Batches((np.array([[5]]), np.array([[5]]), np.array([[1.0]])), 1)
    train = SimpleNamespace(rows=SimpleNamespace(counts=lambda size: np.ones(size, int)))
    scores = language_model_scores("validation", {"loss": 1e9, "accuracy": 0.0}, batches, train, word_pieces())
    assert scores["val_perplexity"] == math.exp(700)
