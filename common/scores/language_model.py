# SPDX-License-Identifier: Apache-2.0
"""Metrics of a language model, and the unigram baseline."""

import math
from collections.abc import Iterable

import numpy as np

from common.data.byte_pairs import Vocabulary, count_characters, special_ids
from common.scores.entries import entry


def language_model_scores(
    split: str, scores: dict[str, float], batches: Iterable[tuple], counts: np.ndarray, vocabulary: Vocabulary
) -> dict[str, float]:
    """Entries `val_loss` (for the split `validation`), `val_perplexity` and so on; losses in nats per token.

    `bits_per_character` is the loss in bits, divided by the mean number of characters, without white space, in a token
    to predict. It compares vocabularies of one kind, though roughly: with a smaller one, a masked token has more of its
    own word as context, and word pieces count the letters of normalised text.

    Args:
        split: the split that was evaluated.
        scores: the model's scores on it, with its `loss` and `accuracy`.
        batches: those of the evaluation, (x, y, sample_weight); the ids in y with a weight are the tokens to predict.
        counts: see `unigram_loss`.
        vocabulary: the vocabulary of the ids.
    """
    targets = np.concatenate([np.asarray(y)[np.asarray(weight) > 0] for _, y, weight in batches])
    own = {
        "loss": scores["loss"],
        "accuracy": scores["accuracy"],
        "perplexity": perplexity(scores["loss"]),
        "bits_per_character": scores["loss"] / math.log(2) / np.mean(np.array(count_characters(vocabulary))[targets]),
        "unigram_loss": unigram_loss(counts, targets, special_ids(vocabulary).values()),
    }
    return {entry(split, name): float(value) for name, value in own.items()}


def unigram_loss(counts: np.ndarray, targets: np.ndarray, never_targets: Iterable[int] = ()) -> float:
    """The unigram baseline: mean loss, in nats per token, of predicting each token by its frequency in training.

    This is what the best model without context would reach; a language model has learned nothing until it is below.
    Token t's probability is (count(t) + 1) / (tokens + vocabulary size): add-one smoothing, so that a token that never
    occurs in training has a finite loss (Laplace; Jurafsky and Martin, "Speech and Language Processing", chapter 3).

    Args:
        counts: how often each id occurs in training, [vocabulary size]; see `count_ids`.
        targets: ids to predict, a vector.
        never_targets: ids that are not counted in training, because they are never targets: padding and the like.
    """
    counts = np.array(counts)
    counts[list(never_targets)] = 0
    log_probability = np.log((counts + 1) / (counts.sum() + len(counts)))
    return float(-log_probability[targets].mean())


def count_ids(sequences: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """How often each id of a vocabulary occurs in sequences, ids [sequences, length]; int64 [vocabulary size]."""
    counts = np.zeros(len(vocabulary.pieces), np.int64)
    for start in range(0, len(sequences), 4096):
        counts += np.bincount(np.ravel(sequences[start : start + 4096]), minlength=len(counts))
    return counts


def perplexity(loss: float) -> float:
    """exp(loss), with the loss in nats per token; infinity if it overflows."""
    return math.exp(loss) if loss < 700 else math.inf
