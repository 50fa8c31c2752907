# SPDX-License-Identifier: Apache-2.0
"""Metrics of a causal language model, and the bigram baseline."""

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from common.scores.entries import entry
from common.scores.language_model import perplexity, unigram_loss

BATCHES_AT_ONCE = 1024  # whose pairs are counted together


class Pairs(NamedTuple):
    """How often each token follows another in training."""

    pairs: np.ndarray  # int64 [distinct pairs, 2], sorted: a token, and the one after it
    counts: np.ndarray  # float64 [distinct pairs]
    vocabulary_size: int

    def unigrams(self) -> np.ndarray:
        """How often each token follows any token, [vocabulary size]."""
        return np.bincount(self.pairs[:, 1], self.counts, self.vocabulary_size)


def causal_scores(
    split: str, scores: dict[str, float], batches: Iterable[tuple], train: Pairs, tokenizer: Any
) -> dict[str, float]:
    """As `language_model_scores`, for a causal language model, with `val_bigram_loss` too.

    `bits_per_character` is the loss of all labels in bits, divided by the characters that they stand for, with white
    space but without special tokens: what it takes to transmit a character of the text. It compares models of any
    vocabulary. Labels up to an end token are read as one text: this is exact for packed text, where each token is the
    label after the one before it; in answers and shards, each piece of a character cut between sequences counts as one.

    Args:
        split, scores: see there.
        batches: what it was evaluated on, (x, y, sample_weight), with a label for each of `x["token_ids"]`.
        train: pairs of the training split.
        tokenizer: KerasHub's tokenizer.
    """
    pairs = []
    for x, y, weight in batches:
        is_label = np.asarray(weight) > 0
        pairs.append(np.stack([np.asarray(x["token_ids"])[is_label], np.asarray(y)[is_label]], axis=1))
    targets = np.concatenate(pairs)
    characters = _count_characters(targets[:, 1], tokenizer)
    own = {
        "loss": scores["loss"],
        "accuracy": scores["accuracy"],
        "perplexity": perplexity(scores["loss"]),
        "bits_per_character": scores["loss"] / math.log(2) * len(targets) / max(characters, 1),
        "unigram_loss": unigram_loss(train.unigrams(), targets[:, 1]),
        "bigram_loss": bigram_loss(train, targets),
    }
    return {entry(split, name): float(value) for name, value in own.items()}


def _count_characters(labels: np.ndarray, tokenizer: Any) -> int:
    """The number of characters in texts whose ids follow one another, with an end token after each text."""
    parts = np.split(labels, np.flatnonzero(labels == tokenizer.end_token_id))
    texts = [ids[~np.isin(ids, tokenizer.special_token_ids)].tolist() for ids in parts]
    texts = [ids for ids in texts if ids]
    return sum(map(len, tokenizer.detokenize(texts))) if texts else 0


def count_pairs(batches: Iterable[tuple], number: int, tokenizer: Any) -> Pairs:
    """Counts each pair of a token and its label, where it has a weight.

    Args:
        batches: (x, y, sample_weight), with a label for each of `x["token_ids"]`.
        number: how many batches to read: those of an epoch.
        tokenizer: KerasHub's tokenizer.
    """
    size = tokenizer.vocabulary_size()
    codes: np.ndarray = np.empty(0, np.int64)
    counts: np.ndarray = np.empty(0)
    epoch = itertools.islice(batches, number)
    while group := list(itertools.islice(epoch, BATCHES_AT_ONCE)):
        new = [
            (np.asarray(x["token_ids"], np.int64) * size + np.asarray(y))[np.asarray(weight) > 0]
            for x, y, weight in group
        ]
        codes, places = np.unique(np.concatenate([codes, *new]), return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, np.ones(len(places) - len(counts))]))
    return Pairs(np.stack(np.divmod(codes, size), axis=1), counts, size)


def bigram_loss(train: Pairs, targets: np.ndarray) -> float:
    """The bigram baseline: mean loss, in nats per token, of predicting each token from the one before it alone.

    By interpolated Kneser-Ney smoothing (Kneser and Ney 1995; Chen and Goodman 1999, "An empirical study of smoothing
    techniques for language modeling", section 2.7): a discount D is taken from each count. What is saved after a token
    is shared out by how many different tokens each follows; D is taken from these numbers too, for all tokens alike.
    D = n1 / (n1 + 2 n2), for n1 pairs that occur once and n2 that occur twice (Ney, Essen and Kneser 1994).

    Args:
        train: pairs of the training split.
        targets: a token, and the one to predict after it, [targets, 2].
    """
    (first, second), counts, size = train.pairs.T, train.counts, train.vocabulary_size
    once, twice = np.sum(counts == 1), np.sum(counts == 2)
    discount = once / (once + 2 * twice) if once else 0.5

    before = np.bincount(second, minlength=size)  # how many different tokens each one follows
    fallback = np.maximum(before - discount, 0) / len(counts)
    fallback += discount * np.count_nonzero(before) / len(counts) / size

    total = np.bincount(first, counts, size)
    saved = np.where(total > 0, discount * np.bincount(first, minlength=size) / np.maximum(total, 1), 1.0)

    codes, wanted = train.pairs @ [size, 1], targets @ [size, 1]
    places = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    count = np.where(codes[places] == wanted, counts[places], 0.0)
    own = np.maximum(count - discount, 0) / np.maximum(total, 1)[targets[:, 0]]
    return float(-np.log(own + saved[targets[:, 0]] * fallback[targets[:, 1]]).mean())
