# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes generate`: continues texts with a causal language model."""

from collections.abc import Sequence

import tensorflow as tf

from common.model.causal_lm import causal_lm_for_generation, continuations, make_sampler
from keras_replicas import UserError


def generate(
    preset: str, prompts: Sequence[str], sampler: str, k: int, p: float, temperature: float, seed: int, tokens: int
) -> None:
    """Prints each prompt with what the model adds to it.

    Args:
        preset: KerasHub name, or a folder that a recipe has saved.
        prompts: texts.
        sampler, k, p, temperature, seed: see `make_sampler`.
        tokens: the most tokens to add.

    Raises:
        UserError: when there is no such preset, a value is out of range, or a prompt is longer than the model takes.
    """
    if tokens < 1:
        raise UserError(f"the number of tokens to add must be at least 1; got {tokens}")
    if any("\ud800" <= character <= "\udfff" for prompt in prompts for character in prompt):
        raise UserError("a prompt is not text that UTF-8 can encode")
    draw = make_sampler(sampler, k, p, temperature, seed)
    tf.get_logger().setLevel("ERROR")  # else it warns that each length of a prompt is traced
    for text in continuations(causal_lm_for_generation(preset), prompts, draw, tokens):
        print(text)
