# SPDX-License-Identifier: Apache-2.0
"""Model cards of masked language models."""

from typing import Any

from common.model.model_card import Kind, last_part, model_card

MASKED = Kind(
    name="masked language model",
    tag="masked-language-modeling",
    pipeline="fill-mask",
    labels="masked token",
    code="""\
import keras_hub
import numpy as np

model = keras_hub.models.MaskedLM.from_preset("{uri}")
tokenizer = model.preprocessor.tokenizer
before, after = (np.array(tokenizer(part)) for part in ("returns a", " with the same shape."))
ids = np.array([[tokenizer.start_token_id, *before, tokenizer.mask_token_id, *after, tokenizer.end_token_id]])
inputs = {{"token_ids": ids, "padding_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}}
inputs["mask_positions"] = np.array([[1 + len(before)]])
logits = np.array(model({{name: inputs[name] for name in model.input}}))[0, 0]
print([tokenizer.id_to_token(int(i)) for i in logits.argsort()[::-1][:5]])
""",
)
NAMES = {"bert": "BERT", "roberta": "RoBERTa"}


def masked_card(results: dict[str, Any]) -> str:
    """The card of a finished model of `bert_from_scratch`, from what `results.json` holds; see `model_card`."""
    config = results["config"]
    summary = (
        f"A masked language model in the form of {NAMES[config['architecture']]}, trained from random weights on\n"
        f"`{last_part(config['corpus'])}` for {results['steps']:,} steps: it predicts the masked words of a text."
    )
    limits = (
        "The published BERT had 1,000,000 steps of 256 sequences of 512 tokens; this model had those\n"
        "above, on the one corpus named there, whose errors and biases it repeats. It is for learning and for\n"
        "comparing trainings, not for decisions, facts, or text of another kind or language."
    )
    return model_card(MASKED, results, summary, limits)
