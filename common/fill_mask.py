# SPDX-License-Identifier: Apache-2.0
"""Fills `[MASK]` in sentences with a trained masked language model."""

from collections.abc import Iterable

import keras
import numpy as np

from common.command_line import UserError
from common.models import masked_lm_from_preset, preset_vocabulary
from common.wordpiece import CLS, MASK, SEP, Vocabulary, make_tokenizer


def fill_mask(model: keras.Model, vocabulary: Vocabulary, sentence: str, top: int = 5) -> list[list[tuple[str, float]]]:
    """The likeliest pieces for each `[MASK]` of a sentence.

    Args:
        model: a `BertMaskedLM`.
        vocabulary: the one it was trained with.
        sentence: text with one or more `[MASK]`.
        top: how many pieces for each.

    Returns:
        For each `[MASK]` in order, `top` pairs (piece, probability), the likeliest first.

    Raises:
        UserError: when there is no `[MASK]`, or the sentence is longer than the model's positions.
    """
    tokenizer = make_tokenizer(vocabulary)
    parts = [tokenizer.encode(part, add_special_tokens=False).ids for part in sentence.split(MASK)]
    ids = [vocabulary.pieces.index(CLS), *parts[0]]
    positions = []
    for part in parts[1:]:
        positions.append(len(ids))
        ids += [vocabulary.pieces.index(MASK), *part]
    ids.append(vocabulary.pieces.index(SEP))
    if not positions:
        raise UserError(f"no {MASK} in {sentence!r}; put one where a word is to be guessed")
    if len(ids) > model.backbone.max_sequence_length:
        raise UserError(f"the sentence has {len(ids)} tokens; the model takes {model.backbone.max_sequence_length}")
    inputs = {
        "token_ids": np.array([ids], np.int32),
        "segment_ids": np.zeros((1, len(ids)), np.int32),
        "padding_mask": np.ones((1, len(ids)), np.int32),
        "mask_positions": np.array([positions], np.int32),
    }
    probabilities = keras.ops.convert_to_numpy(keras.ops.softmax(model(inputs, training=False)[0]))
    best = np.argsort(-probabilities, axis=-1)[:, :top]
    return [[(vocabulary.pieces[i], float(p[i])) for i in row] for p, row in zip(probabilities, best, strict=True)]


def print_filled_masks(preset: str, sentences: Iterable[str], top: int = 5) -> None:
    """Prints sentences with their `[MASK]`s' likeliest pieces, by the model saved in a preset.

    Raises:
        UserError: as `fill_mask`, and when there is no such preset.
    """
    model, vocabulary = masked_lm_from_preset(preset, dtype="float32"), preset_vocabulary(preset)
    for sentence in sentences:
        print(f"\n{sentence}")
        for guesses in fill_mask(model, vocabulary, sentence, top):
            print("    " + "  ".join(f"{piece} {probability:.3f}" for piece, probability in guesses))
