# SPDX-License-Identifier: Apache-2.0
"""Metrics of a language model, and the unigram baseline."""

import math
from typing import Any

import keras_hub
import numpy as np

from .data.rows import RowBatches
from .log import one_epoch

# In a vocabulary of byte pairs, whose alphabet has a letter for each byte, those of white space, and of the bytes of a
# UTF-8 character after its first; and SentencePiece's letter for a space.
NOT_COUNTED = {*"ĠĊĉč", *map(chr, range(161, 192)), *map(chr, range(290, 324)), "\u2581"}


def language_model_scores(
    split: str, scores: dict[str, float], batches: RowBatches, train: RowBatches, tokenizer: Any
) -> dict[str, float]:
    """Entries `val_loss` (for the split `validation`), `val_perplexity` and so on; losses in nats per token.

    `bits_per_character` is the loss in bits, divided by the mean number of characters, without white space, in a token
    to predict. It compares vocabularies of one kind, though roughly: with a smaller one, a masked token has more of its
    own word as context, and word pieces count the letters of normalised text.

    Args:
        split, scores: what was evaluated, and its `loss` and `accuracy`.
        batches: those of the evaluation, (x, y, sample_weight); the ids in y with a weight are the tokens to predict.
        train: those of the training, whose rows are counted for the baseline.
        tokenizer: KerasHub's tokenizer of the ids.
    """
    targets = np.concatenate([np.asarray(y)[np.asarray(weight) > 0] for _, y, weight in one_epoch(batches)])
    pieces = [tokenizer.id_to_token(number) for number in range(tokenizer.vocabulary_size())]
    if isinstance(tokenizer, keras_hub.models.BertTokenizer):
        characters = np.array([len(piece.removeprefix("##")) for piece in pieces])
    else:
        characters = np.array([sum(letter not in NOT_COUNTED for letter in piece) for piece in pieces])
    characters[tokenizer.special_token_ids] = 0  # they are no text
    own = {
        "loss": scores["loss"],
        "accuracy": scores["accuracy"],
        "perplexity": math.exp(min(scores["loss"], 700)),
        "bits_per_character": scores["loss"] / math.log(2) / np.mean(characters[targets]),
        "unigram_loss": unigram_loss(train.rows.counts(len(pieces)), targets),
    }
    prefix = "val" if split == "validation" else split
    return {f"{prefix}_{name}": float(value) for name, value in own.items()}


def unigram_loss(counts: np.ndarray, targets: np.ndarray) -> float:
    """The unigram baseline: mean loss, in nats, of predicting each target by how often each id occurs in training.

    No model without context does better. Token t's probability is (count(t) + 1) / (tokens + vocabulary size): add-one
    smoothing, for tokens that never occur in training (Jurafsky and Martin, "Speech and Language Processing", ch. 3).
    """
    log_probability = np.log((counts + 1) / (counts.sum() + len(counts)))
    return float(-log_probability[targets].mean())
