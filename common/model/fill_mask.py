# SPDX-License-Identifier: Apache-2.0
"""Fills the masks of sentences with a trained masked language model."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from common.data.byte_pairs import Vocabulary, special_ids
from common.data.wordpiece import WordPieces
from common.model.huggingface import in_huggingface_form, require_head
from common.model.masked_lm import masked_lm_from_preset, preset_vocabulary
from keras_replicas import UserError

SENTENCES = (  # to try out a model of the default text
    "Returns a [MASK] with the same shape as the input.",
    "The function raises a [MASK] if the argument is not valid.",
    "This layer is applied to the [MASK] of the model.",
)


def fill_mask(model: keras.Model, vocabulary: Vocabulary, sentence: str, top: int = 5) -> list[list[dict[str, Any]]]:
    """The likeliest tokens for each mask of a sentence, with the entries of Hugging Face's `fill-mask` pipeline.

    Args:
        model, vocabulary: a `BertMaskedLM` or `RobertaMaskedLM`, and the vocabulary it was trained with.
        sentence: text with one or more masks: `[MASK]`, or the model's own, such as `<mask>`.
        top: number of guesses for each mask.

    Returns:
        For each mask in order, its guesses, the likeliest first: `score`, its probability; `token`, its id;
        `token_str`, its text; and the `sequence` with the guess in the mask's place.

    Raises:
        UserError: when there is no mask, or the sentence is longer than the model's positions.
    """
    tokenizer, special = vocabulary.tokenizer(), vocabulary.special
    *before, last = sentence.replace(WordPieces.special.mask, special.mask).split(special.mask)
    # A mask is a word with the space before it, as in RoBERTa's own tokenizer; BERT's ignores spaces.
    parts = [tokenizer.encode(part, add_special_tokens=False).ids for part in [*map(str.rstrip, before), last]]
    id_of = special_ids(vocabulary)
    ids, positions = [id_of["start"], *parts[0]], []
    for part in parts[1:]:
        positions.append(len(ids))
        ids += [id_of["mask"], *part]
    ids.append(id_of["end"])
    if not positions:
        raise UserError(f"no {special.mask} in {sentence!r}; put one in place of a word to predict")
    if len(ids) > model.backbone.max_sequence_length:
        raise UserError(f"the sentence has {len(ids)} tokens; the model takes {model.backbone.max_sequence_length}")
    inputs = {
        "token_ids": np.array([ids], np.int32),
        "segment_ids": np.zeros((1, len(ids)), np.int32),
        "padding_mask": np.ones((1, len(ids)), np.int32),
        "mask_positions": np.array([positions], np.int32),
    }
    logits = model({name: inputs[name] for name in model.input}, training=False)[0]
    probabilities = keras.ops.convert_to_numpy(keras.ops.softmax(logits))

    def guess(position: int, token: int, score: float) -> dict[str, Any]:
        filled = [*ids[:position], token, *ids[position + 1 :]]
        if len(positions) == 1:  # otherwise the other masks are shown
            filled = [piece for piece in filled if piece not in id_of.values()]
        return {
            "score": float(score),
            "token": int(token),
            "token_str": tokenizer.decode([token]),
            "sequence": tokenizer.decode(filled, skip_special_tokens=False),
        }

    return [
        [guess(position, token, scores[token]) for token in np.argsort(-scores)[:top]]
        for position, scores in zip(positions, probabilities, strict=True)
    ]


def print_filled_masks(preset: str, sentences: Iterable[str] = SENTENCES, top: int = 5) -> None:
    """Prints sentences with the likeliest tokens for their masks, according to the model saved in a preset.

    Raises:
        UserError: as `fill_mask`, and when there is no such preset, or it lacks the masked-language-model head.
    """
    if not in_huggingface_form(preset):
        require_head(preset, "BertMaskedLM", "RobertaMaskedLM")
    model, vocabulary = masked_lm_from_preset(preset, dtype="float32"), preset_vocabulary(preset)
    for sentence in sentences:
        print(f"\n{sentence}")
        for guesses in fill_mask(model, vocabulary, sentence, top):
            for guess in guesses:
                print("    {score:.3f} {token:>6} {token_str:16} {sequence}".format_map(guess))
