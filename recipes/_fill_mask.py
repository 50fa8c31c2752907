# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes fill-mask`: fills the masks of sentences with a trained masked language model."""

from collections.abc import Iterable
from typing import Any

import keras
import keras_hub
import numpy as np

from common.data.vocabulary import encode
from common.files import one_line, plain
from common.model.masked_lm import get_file, huggingface_type, load_json, masked_lm_from_preset, preset_tokenizer
from keras_replicas import UserError


def fill_mask(
    model: keras_hub.models.MaskedLM, tokenizer: keras_hub.models.Tokenizer, sentence: str, top: int = 5
) -> list[list[dict[str, Any]]]:
    """A BERT's or RoBERTa's likeliest tokens for each mask of a sentence: `[MASK]`, or the model's, such as `<mask>`.

    A guess has a `score`, its probability; a `token`, its id; `token_str`, its text; and `sequence`, the sentence with
    it in the mask's place. Raises a UserError when there is no mask, or more tokens than the model has positions.
    """
    texts = sentence.replace("[MASK]", tokenizer.mask_token).split(tokenizer.mask_token)
    # A mask is a word with the space before it, as in RoBERTa's own tokenizer; BERT's ignores spaces.
    first, *others = encode([*map(str.rstrip, texts[:-1]), texts[-1]], tokenizer)
    ids, positions = [tokenizer.start_token_id, *first], []
    for part in others:
        positions.append(len(ids))
        ids += [tokenizer.mask_token_id, *part]
    ids.append(tokenizer.end_token_id)
    if not positions:
        raise UserError(f"no {tokenizer.mask_token} in {sentence!r}; put one in place of a word to predict")
    if len(ids) > model.backbone.max_sequence_length:
        raise UserError(f"the sentence has {len(ids)} tokens: shorten it to {model.backbone.max_sequence_length}")
    row = np.array([ids], np.int32)
    inputs = {"token_ids": row, "segment_ids": 0 * row, "padding_mask": 0 * row + 1, "mask_positions": [positions]}
    logits = model({name: np.array(inputs[name]) for name in model.input}, training=False)[0]
    spaced = isinstance(tokenizer, keras_hub.models.RobertaTokenizer)  # its tokens bring the space before a word
    found = []
    for number, scores in enumerate(keras.ops.convert_to_numpy(keras.ops.softmax(logits)), start=1):
        before, after = (tokenizer.mask_token.join(part) for part in (texts[:number], texts[number:]))
        guesses = []
        for token in np.argsort(-scores)[:top].tolist():
            word = tokenizer.detokenize([token])
            joined = spaced or word.startswith("##")
            filled = (before.rstrip() if joined else before) + (word if spaced else word.removeprefix("##")) + after
            guesses.append({"score": float(scores[token]), "token": token, "token_str": word, "sequence": filled})
        found.append(guesses)
    return found


def print_filled_masks(preset: str, sentences: Iterable[str]) -> None:
    """Prints sentences with the likeliest tokens for their masks, by a preset with its head, or raises a UserError."""
    if not huggingface_type(preset):
        kinds = ("BertMaskedLM", "RobertaMaskedLM")
        with one_line(f"cannot load {preset} as a {' or '.join(kinds)} that KerasHub saved"):
            if (kind := load_json(preset, "task.json")["class_name"]) not in kinds:
                raise UserError(f"it is a {kind}")
            get_file(preset, "task.weights.h5")  # without it, the head would be random
    tokenizer, model = preset_tokenizer(preset), masked_lm_from_preset(preset, dtype="float32")
    for sentence in sentences:
        print(f"\n{sentence}")
        for guesses in fill_mask(model, tokenizer, sentence):
            for guess in guesses:
                print(plain("    {score:.3f} {token:>6} {token_str:16} {sequence}".format_map(guess)))
