# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes generate`: continues texts with a causal language model."""

import math
from collections.abc import Sequence

import keras_hub
import tensorflow as tf

from common.files import plain
from common.model.causal_lm import causal_lm_for_generation, continuations
from keras_replicas import UserError


def generate(
    preset: str, prompts: Sequence[str], sampler: str, k: int, p: float, temperature: float, seed: int, tokens: int
) -> None:
    """Prints each prompt with what the model adds to it, at most so many tokens.

    The draws are those of `make_sampler`. Raises a `UserError` when there is no such preset, a value is out of range,
    or a prompt is longer than the model takes.
    """
    if tokens < 1:
        raise UserError(f"the number of tokens to add must be at least 1; got {tokens}")
    if any("\ud800" <= character <= "\udfff" for prompt in prompts for character in prompt):
        raise UserError("a prompt has characters that UTF-8 cannot encode: remove them")
    draw = make_sampler(sampler, k, p, temperature, seed)
    tf.get_logger().setLevel("ERROR")  # else it warns that each length of a prompt is traced
    for text in continuations(causal_lm_for_generation(preset), prompts, draw, tokens):
        print(plain(text))


def make_sampler(
    name: str = "top-k", k: int = 10, p: float = 0.9, temperature: float = 1.0, seed: int = 0
) -> keras_hub.samplers.Sampler:
    """KerasHub's sampler, or a UserError when there is none of this name, or a value is out of range.

    `greedy`: the likeliest token; `top-k`: one of the k likeliest (Fan et al. 2018, arXiv:1805.04833); `top-p`: one of
    the fewest that together have a probability of p (Holtzman et al. 2019, arXiv:1904.09751); `random`: one of all. The
    temperature divides the logits: below 1, what is likely becomes likelier.
    """
    if not 1e-6 <= temperature < math.inf:  # in float32, logits cannot be divided by less
        raise UserError(f"the temperature must be at least 1e-6, and finite; got {temperature:g}")
    if k < 1 or not 0 < p <= 1 or not 0 <= seed < 2**31:
        raise UserError(f"k must be 1 or more, p in (0, 1], the seed below 2^31; got k={k}, p={p:g}, seed={seed}")
    drawn = {"seed": seed, "temperature": temperature}
    settings = {"greedy": {}, "top-k": {"k": k, **drawn}, "top-p": {"p": p, **drawn}, "random": drawn}
    if name not in settings:
        raise UserError(f"the sampler must be {', '.join(settings)}; got {name}")
    return keras_hub.samplers.get({"class_name": name.replace("-", "_"), "config": settings[name]})
