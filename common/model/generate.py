# SPDX-License-Identifier: Apache-2.0
"""Continues texts with a causal language model, using KerasHub's samplers and its cache."""

import math
from collections.abc import Sequence

import keras_hub
import numpy as np
import tensorflow as tf

from common.model.backbones import from_preset
from keras_replicas import UserError

TOKENS = 40  # in a continuation


def make_sampler(
    name: str = "top-k", k: int = 10, p: float = 0.9, temperature: float = 1.0, seed: int = 0
) -> keras_hub.samplers.Sampler:
    """KerasHub's sampler.

    Args:
        name: `greedy`, the likeliest token; `top-k`, one of the k likeliest (Fan et al. 2018, arXiv:1805.04833);
            `top-p`, one of the fewest that together have a probability of p (Holtzman et al. 2019, arXiv:1904.09751);
            or `random`, one of all.
        k, p: see `name`.
        temperature: divides the logits: below 1, what is likely becomes likelier.
        seed: seed of the draws.

    Raises:
        UserError: when there is no such sampler, or a value is out of range.
    """
    samplers = keras_hub.samplers
    if not 1e-6 <= temperature < math.inf:  # in float32, logits cannot be divided by less
        raise UserError(f"--temperature must be at least 1e-6, and finite; got {temperature:g}")
    if k < 1:
        raise UserError(f"--top-k must be at least 1; got {k}")
    if not 0 < p <= 1:
        raise UserError(f"--top-p must be above 0, and at most 1; got {p:g}")
    match name:
        case "greedy":
            return samplers.GreedySampler()
        case "top-k":
            return samplers.TopKSampler(k, seed=seed, temperature=temperature)
        case "top-p":
            return samplers.TopPSampler(p, seed=seed, temperature=temperature)
        case "random":
            return samplers.RandomSampler(seed=seed, temperature=temperature)
    raise UserError(f"--sampler must be greedy, top-k, top-p or random; got {name}")


def continuations(
    model: keras_hub.models.CausalLM, prompts: Sequence[str], sampler: keras_hub.samplers.Sampler, tokens: int = TOKENS
) -> list[str]:
    """The prompts, each followed by what the model adds, up to its end token or `tokens` tokens.

    The sampler starts afresh for each: a prompt gives the same text each time, whatever the other prompts.

    Raises:
        UserError: when a prompt has no token, or leaves no room for one within the preprocessor's `sequence_length`;
            when the model's logits are not finite, and the sampler draws.
    """
    if model.sampler is not sampler:  # `compile` would do so too, but lose what is compiled for training
        model.sampler, model.generate_function = sampler, None
    return [_continuation(model, prompt, sampler, tokens) for prompt in prompts]


def _continuation(
    model: keras_hub.models.CausalLM, prompt: str, sampler: keras_hub.samplers.Sampler, tokens: int
) -> str:
    room = model.preprocessor.sequence_length
    length = int(np.sum(model.preprocessor.generate_preprocess([prompt], room + 1)["padding_mask"]))
    if not length:
        raise UserError("the prompt is empty, and the model has no start token to begin with: give a text")
    if length >= room:
        raise UserError(f"the prompt has at least {length} tokens; the model takes {room}, with those it adds")
    for state in sampler.variables:
        state.assign([sampler.seed, 0])
    try:
        return model.generate([prompt], max_length=min(length + tokens, room))[0]
    except tf.errors.InvalidArgumentError as error:  # a draw from probabilities that are NaN
        raise UserError("the model has diverged: its logits are not finite, and so it writes nothing") from error


def causal_lm_for_generation(preset: str) -> keras_hub.models.CausalLM:
    """A preset's model, in float32.

    Raises:
        UserError: when there is no such preset of a causal language model, or it cannot be fetched.
    """
    model = from_preset(keras_hub.models.CausalLM, preset, dtype="float32", compile=False)
    model.compile(jit_compile=False)  # XLA would take longer to compile than to write a text
    return model


def print_continuations(preset: str, prompts: Sequence[str]) -> None:
    """Prints texts as the model saved in a preset continues them, with `top-k`; or, in one line, why it cannot.

    Raises:
        UserError: when there is no such preset.
    """
    model = causal_lm_for_generation(preset)
    try:
        for text in continuations(model, prompts, make_sampler()):
            print(f"\n{text}")
    except UserError as error:
        print(f"\n{error}")
