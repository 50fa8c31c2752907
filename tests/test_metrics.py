import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from common.data.byte_pairs import BytePairs
from common.data.wordpiece import WordPieces
from common.scores.causal import bigram_loss, causal_scores, count_pairs

from common.language_model_scores import count_ids, language_model_scores, perplexity, unigram_loss


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


def batch_of(row, weights=None):
    ids = np.array([row])
    return (
        {"token_ids": ids[:, :-1]},
        ids[:, 1:],
        np.ones(len(row) - 1)[None] if weights is None else np.array([weights]),
    )


def test_pairs_are_counted_where_there_is_a_weight_and_only_of_one_epoch():
    batches = [batch_of([0, 1, 0, 1, 2]), batch_of([2, 0, 1], [0, 1]), batch_of([3, 3])]
    pairs = count_pairs(batches, 2, SimpleNamespace(vocabulary_size=lambda: 4))
    assert pairs.pairs.tolist() == [[0, 1], [1, 0], [1, 2]] and pairs.counts.tolist() == [3, 1, 1]
    assert pairs.unigrams().tolist() == [1, 3, 1, 0]


def test_bigram_loss_against_a_hand_count():
    """Pairs 01 three times, 02 twice, 12 and 20 once: D is 2 / (2 + 2 x 1)."""
    batch = batch_of([0, 1]), batch_of([0, 1]), batch_of([0, 1, 2, 0, 2]), batch_of([0, 2])
    train = count_pairs(batch, 4, SimpleNamespace(vocabulary_size=lambda: 4))
    discount = 2 / 4
    # Of the four different pairs, one ends with 0, one with 1, two with 2; the three discounts go to all four tokens.
    fallback = np.array([1 - discount, 1 - discount, 2 - discount, 0]) / 4 + 3 * discount / 4 / 4
    assert fallback.sum() == pytest.approx(1)
    after_0 = np.array([0, 3 - discount, 2 - discount, 0]) / 5 + 2 * discount / 5 * fallback
    assert after_0.sum() == pytest.approx(1)
    for pair, probability in (([0, 1], after_0[1]), ([0, 3], after_0[3]), ([3, 2], fallback[2])):
        assert bigram_loss(train, np.array([pair])) == pytest.approx(-math.log(probability))


def test_a_bigram_is_below_a_unigram_where_order_tells_something():
    draw = np.random.default_rng(0)
    follows = draw.dirichlet(np.full(50, 0.1), 50)
    row = [0]
    for _ in range(4000):
        row.append(int(draw.choice(50, p=follows[row[-1]])))
    tokenizer = SimpleNamespace(
        vocabulary_size=lambda: 50,
        special_token_ids=[0],
        end_token_id=0,
        detokenize=lambda texts: ["xx" * len(ids) for ids in texts],
    )
    train = count_pairs([batch_of(row[:3000])], 1, tokenizer)
    scores = causal_scores("validation", {"loss": 1.0, "accuracy": 0.5}, [batch_of(row[3000:])], train, tokenizer)
    best = -np.mean(np.log([follows[pair] for pair in itertools.pairwise(row[3000:])]))
    assert best < scores["val_bigram_loss"] < best + 0.3 < scores["val_unigram_loss"]
    characters = 2 * sum(token != 0 for token in row[3001:])
    assert scores["val_bits_per_character"] == pytest.approx(1000 / characters / math.log(2))


def test_a_character_that_is_cut_between_rows_counts_once():
    tokenizer = SimpleNamespace(
        vocabulary_size=lambda: 256,
        special_token_ids=[0],
        end_token_id=0,
        detokenize=lambda texts: [bytes(ids).decode(errors="replace") for ids in texts],
    )
    text = "naïve 語語語 ok"
    row = [0, *text.encode(), 0, *text.encode(), 0]
    batches = [batch_of(row[start : start + 5]) for start in range(0, len(row) - 1, 4)]
    scores = causal_scores(
        "test", {"loss": 1.0, "accuracy": 0.5}, batches, count_pairs(batches, 9, tokenizer), tokenizer
    )
    assert scores["test_bits_per_character"] == pytest.approx((len(row) - 1) / (2 * len(text)) / math.log(2))


def test_perplexity():
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e9) == math.inf
