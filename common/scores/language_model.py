# SPDX-License-Identifier: Apache-2.0
"""Metrics of a language model, and the unigram baseline."""

import math
from collections.abc import Iterable

import numpy as np


def unigram_loss(counts: np.ndarray, batches: Iterable[tuple], never_targets: Iterable[int] = ()) -> float:
    """The unigram baseline: mean loss, in nats per token, of predicting each token by its frequency in training.

    This is what the best model without context would reach; a language model has learned nothing until it is below.
    Token t's probability is (count(t) + 1) / (tokens + vocabulary size): add-one smoothing, so that a token that never
    occurs in training has a finite loss (Laplace; Jurafsky and Martin, "Speech and Language Processing", chapter 3).

    Args:
        counts: how often each id occurs in training, [vocabulary size]; see `count_ids`.
        batches: (x, y, sample_weight), of whose ids y with a weight the loss is the mean.
        never_targets: ids that are not counted in training, as they are never targets: padding and the like.
    """
    counts = np.array(counts)
    counts[list(never_targets)] = 0
    log_probability = np.log((counts + 1) / (counts.sum() + len(counts)))
    targets = np.concatenate([np.asarray(y)[np.asarray(weight) > 0] for _, y, weight in batches])
    return float(-log_probability[targets].mean())


def count_ids(sequences: np.ndarray, vocabulary_size: int) -> np.ndarray:
    """How often each id occurs, int64 [vocabulary_size], in ids [sequences, length]."""
    counts = np.zeros(vocabulary_size, np.int64)
    for start in range(0, len(sequences), 4096):
        counts += np.bincount(sequences[start : start + 4096].ravel(), minlength=vocabulary_size)
    return counts


def perplexity(loss: float) -> float:
    """exp(loss), with the loss in nats per token; infinity if it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def language_model_scores(split: str, scores: dict[str, float], unigram: float) -> dict[str, float]:
    """Entries `val_loss` (for the split `validation`), `val_accuracy` and so on; losses in nats per masked token.

    Of a split's `scores`, `loss` and `accuracy` are taken; `unigram` is its `unigram_loss`.
    """
    own = {name: scores[name] for name in ("loss", "accuracy")}
    own |= {"perplexity": perplexity(scores["loss"]), "unigram_loss": unigram}
    return {entry(split, name): value for name, value in own.items()}


def entry(split: str, name: str) -> str:
    """The name of an entry: `val_loss` for the split `validation` and the name `loss`."""
    return f"{'val' if split == 'validation' else split}_{name}"
