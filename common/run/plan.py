# SPDX-License-Identifier: Apache-2.0
"""The plan of a run, printed without training: `--dry-run`."""

import math
import textwrap
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

BAR = 40  # columns of the highest learning rate


def print_plan(
    model: keras.Model, schedule: Callable, sizes: dict[str, tuple[int, int]], batches: Iterable, pieces: list[str]
) -> dict:
    """Prints memory per replica, tokens, the learning-rate schedule, and a sequence as the model sees it.

    Args:
        model: compiled, with a `last_step`.
        schedule: the learning rate of a step, counted from 0.
        sizes: numbers of sequences and tokens in each split.
        batches: of one replica, as `masking.mask_tokens` gives them.
        pieces: the vocabulary, from id to token.

    Returns {}: there are no results.
    """
    batch, total_steps = next(iter(batches)), model.last_step
    print(f"{model.count_params():,} parameters in {keras.config.dtype_policy().name}; {total_steps} steps")
    state, activations = (f"{size / 2**20:,.0f} MiB" for size in memory_of_a_replica(model, batch))
    print(
        f"memory per replica: {state} for weights, gradients and optimizer state, about {activations} for activations"
    )
    for split, (sequences, tokens) in sizes.items():
        print(f"{split}: {tokens:,} tokens in {sequences:,} sequences")
    print("learning rate by step:")
    steps = sorted({round(i / 10 * (total_steps - 1)) for i in range(11)})
    rates = [float(schedule(step)) for step in steps]
    for step, rate in zip(steps, rates, strict=True):
        print(f"{step + 1:>10,} {rate:9.2e} {'#' * round(rate / (max(rates) or 1) * BAR)}")
    print("the first sequence, «input→label» at the masked positions:")
    print(textwrap.indent(textwrap.fill(masked_text(batch, pieces), 110), "    "))
    return {}


def memory_of_a_replica(model: keras.Model, batch) -> tuple[float, float]:
    """Bytes that a training step needs on each replica: state, and an estimate of the activations.

    The state is weights, a gradient for each trainable one, and the optimizer's variables. The activations, kept for
    the backward pass, are 16 s b h + 2 a s^2 b numbers a layer (batch b, length s, width h, a heads), after
    Korthikanti et al. 2022, arXiv:2205.05198, section 4.1; logits, their softmax and its gradient 3 b slots vocabulary.

    The model is compiled, with a BERT backbone; the batch is one replica's `(x, y, sample_weight)`.
    """
    kept = [*model.variables, *model.trainable_variables, *model.optimizer.variables]
    state = sum(4 * math.prod(variable.shape) for variable in kept)
    bert, (x, y, _) = model.backbone, batch
    b, s = x["token_ids"].shape
    numbers = bert.num_layers * (16 * s * b * bert.hidden_dim + 2 * bert.num_heads * s**2 * b)
    numbers += 3 * math.prod(y.shape) * bert.vocabulary_size
    return state, numbers * tf.as_dtype(model.compute_dtype).size


def masked_text(batch, pieces: list[str]) -> str:
    """The first sequence of a batch as text, each masked position as `«input→label»`."""
    x, y, weight = (keras.tree.map_structure(lambda part: part[0].numpy(), part) for part in batch)
    words = [pieces[i] for i, is_token in zip(x["token_ids"], x["padding_mask"], strict=True) if is_token]
    for position, label, used in zip(x["mask_positions"], y, weight, strict=True):
        if used:
            words[position] = f"«{words[position]}→{pieces[label]}»"
    return " ".join(words).replace(" ##", "")
