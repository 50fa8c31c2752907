# SPDX-License-Identifier: Apache-2.0
"""Continues texts with a causal language model, using KerasHub's samplers and its cache."""

import math
from collections.abc import Iterator, Sequence

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from keras_replicas import UserError, is_chief

from ..data.rows import Rows
from .presets import from_preset

TOKENS = 4  # of a row that has no prompt


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
        raise UserError(f"k is 1 or more, p above 0 and at most 1, a seed 0 to 2^31 - 1; got {k}, {p:g} and {seed}")
    drawn = {"seed": seed, "temperature": temperature}
    own = {"greedy": {}, "top-k": {"k": k, **drawn}, "top-p": {"p": p, **drawn}, "random": drawn}
    if name not in own:
        raise UserError(f"the sampler must be {', '.join(own)}; got {name}")
    return keras_hub.samplers.get({"class_name": name.replace("-", "_"), "config": own[name]})


def continuations(
    model: keras_hub.models.CausalLM, prompts: Sequence[str], sampler: keras_hub.samplers.Sampler, tokens: int = 40
) -> Iterator[str]:
    """The prompts, each followed by what the model adds, up to its end token or `tokens` tokens.

    The sampler starts afresh for each: a prompt gives the same text each time, whatever the other prompts. Raises a
    UserError when a prompt has no token, or leaves no room for one within the preprocessor's `sequence_length`; when k
    exceeds the vocabulary; when the model's logits are not finite, and the sampler draws.
    """
    if (getattr(sampler, "k", None) or 1) > (size := model.backbone.vocabulary_size):
        raise UserError(f"the k of top-k, {sampler.k}, is more than the {size} tokens of the vocabulary")
    if model.sampler is not sampler:  # `compile` would do so too, but lose what is compiled for training
        model.sampler, model.generate_function = sampler, None
    room = model.preprocessor.sequence_length
    for prompt in prompts:
        length = int(np.sum(model.preprocessor.generate_preprocess([prompt], room + 1)["padding_mask"]))
        if not 0 < length < room:
            raise UserError(f"the prompt has {length} tokens or more; give 1 to {room - 1}, with those added {room}")
        for state in sampler.variables:
            state.assign([sampler.seed, 0])
        try:
            yield model.generate([prompt], max_length=min(length + tokens, room))[0]
        except tf.errors.InvalidArgumentError as error:  # a draw from probabilities that are NaN
            raise UserError("the model has diverged: its logits are not finite, and so it writes nothing") from error


def causal_lm_for_generation(preset: str) -> keras_hub.models.CausalLM:
    """A preset's model, in float32; a UserError when there is none of a causal language model, or it cannot be had."""
    model = from_preset(keras_hub.models.CausalLM, preset, dtype="float32", compile=False)
    model.compile(jit_compile=False)  # XLA would take longer to compile than to write a text
    return model


def print_continuations(preset: str, prompts: Sequence[str]) -> None:
    """Prints texts as the model saved in a preset continues them, with `top-k`; or, in one line, why it cannot."""
    try:
        for text in continuations(causal_lm_for_generation(preset), prompts, make_sampler()):
            print(f"\n{text}")
    except UserError as error:
        print(f"\n{error}")


def beginnings(rows: Rows, tokenizer: keras_hub.models.Tokenizer, count: int = 3) -> list[str]:
    """The prompts of the first rows, to be continued; of rows without prompts, the first tokens."""
    ids, _, is_label = (part.numpy() for part in rows.read(tf.range(min(count, len(rows)), dtype=tf.int64)))
    texts = []
    for row, labels in zip(ids, is_label, strict=True):
        end = min(int(labels[1:].argmax()) + 1, rows.length // 2)  # the first token is no label, or a start token
        row = row[: end if end > 1 else TOKENS]
        text = [token for token in row.tolist() if token not in tokenizer.special_token_ids]
        texts += [tokenizer.detokenize(text)] if text else []
    return texts


class Samples(keras.callbacks.Callback):
    """Writes to `board`, at each epoch's end, how the model continues some texts, with the same draws each time."""

    def __init__(self, board: tf.summary.SummaryWriter, texts: Sequence[str]):
        super().__init__()
        self.board, self.texts, self.sampler = board, texts, make_sampler()

    def on_epoch_end(self, epoch, logs=None):
        """Writes the texts verbatim, line breaks included, on the chief; for a diverged model, why there are none."""
        if is_chief() and self.texts:
            try:
                written = list(continuations(self.model, self.texts, self.sampler))
            except UserError as error:
                written = [str(error)]
            with self.board.as_default(step=self.model.steps_done):
                tf.summary.text("samples", ["    " + text.replace("\n", "\n    ") for text in written])
