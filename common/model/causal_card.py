# SPDX-License-Identifier: Apache-2.0
"""Model cards of causal language models."""

from typing import Any

from common.model.model_card import Kind, last_part, model_card

CAUSAL = Kind(
    name="causal language model",
    tag="causal-language-modeling",
    pipeline="text-generation",
    labels="predicted token",
    code="""\
import keras_hub

model = keras_hub.models.CausalLM.from_preset("{uri}")
model.compile(sampler="greedy")
print(model.generate("Returns a", max_length=24))
""",
)


def causal_card(results: dict[str, Any]) -> str:
    """The card of a finished model of `causal_lm`, from what `results.json` holds; see `model_card`."""
    config = results["config"]
    begun = "random weights"
    if config["preset"]:
        begun = f"`{last_part(config['preset'])}`{' by LoRA' if config['lora_rank'] else ''}"
    summary = (
        f"A causal language model, trained from {begun} on `{last_part(config['data'] or config['corpus'])}`\n"
        f"for {results['steps']:,} steps: it predicts each token of a text from those before it, and so writes."
    )
    limits = (
        "What it writes may be wrong, and repeats the errors and biases of its training text. It is for learning and\n"
        "for comparing trainings, not for decisions, facts, or text of another kind or language."
    )
    return model_card(CAUSAL, results, summary, limits)
