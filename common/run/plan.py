# SPDX-License-Identifier: Apache-2.0
"""The plan of a run, printed without training: `--dry-run`."""

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable
from operator import itemgetter

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.cluster import num_workers

BAR = 40  # columns of the highest learning rate
HEADS = ("num_heads", "num_query_heads", "num_attention_heads")  # what families of models call them


def print_plan(
    model: keras.Model,
    schedule: Callable,
    sizes: dict[str, tuple[int, int]],
    batches: Iterable,
    pieces: list[str],
    longest: int | None = None,
) -> dict:
    """Prints memory per replica, tokens, the learning-rate schedule, and a sequence as the model sees it.

    Args:
        model: compiled, with a `last_step`.
        schedule: the learning rate of a step, counted from 0.
        sizes: numbers of sequences and tokens in each split.
        batches: one replica's, of a masked language model, as `masking.mask_tokens` returns them, or of a causal one.
        pieces: the vocabulary, from id to token.
        longest: tokens per sequence in a causal model's longest batch, for which memory is counted, if batches have
            several lengths.

    Returns {}: there are no results.
    """
    batch, total_steps = next(iter(batches)), model.last_step
    print(f"{model.count_params():,} parameters in {keras.config.dtype_policy().name}; {total_steps} steps")
    state, activations = (f"{size / 2**20:,.0f} MiB" for size in memory_of_a_replica(model, _padded(batch, longest)))
    print(
        f"memory per replica: {state} for weights, gradients and optimizer state, about {activations} for activations"
    )
    if any(weight.name.startswith("lora_") for weight in model.weights):
        print(f"without LoRA, all weights trained: {state_without_lora(model) / 2**20:,.0f} MiB for the former")
    for split, (sequences, tokens) in sizes.items():
        print(f"{split}: {tokens:,} tokens in {sequences:,} sequences")
    print("learning rate by step:")
    steps = sorted({round(i / 10 * (total_steps - 1)) for i in range(11)})
    rates = [float(schedule(step)) for step in steps]
    for step, rate in zip(steps, rates, strict=True):
        print(f"{step + 1:>10,} {rate:9.2e} {'#' * round(rate / (max(rates) or 1) * BAR)}")
    masked = "mask_positions" in batch[0]
    print(f"the first sequence, {'«input→label» at the masked positions' if masked else 'its labels as «labels»'}:")
    text = (masked_text if masked else labelled_text)(batch, pieces)
    print(textwrap.indent(textwrap.fill(text, 110), "    "))
    return {}


def memory_of_a_replica(model: keras.Model, batch) -> tuple[float, float]:
    """Bytes that a training step needs on each replica: state, and an estimate of the activations.

    The state is weights, the optimizer's variables, and for each trainable weight a gradient and a copy of it while it
    is clipped; with gradient accumulation one more, the sum; with several workers five more, for what each sends,
    receives and adds up. The activations, kept for the backward pass of one part of the batch, follow the form of
    Korthikanti et al. 2022, arXiv:2205.05198, section 4.1: 32 s b h + 2 a s^2 b numbers per layer (batch b, length s,
    width h, a heads), or 20 s b h where GELU keeps nothing but its input (`fused.py`). Logits, their exponentials and
    gradient are 3 b slots vocabulary numbers in float32; mixed precision adds the logits in its own dtype. The factors
    are measured (`python -m benchmarks memory`).

    The model is compiled, with a BERT or a decoder as its backbone; the batch is one replica's `(x, y, sample_weight)`.
    """
    held = [*model.variables, *model.optimizer.variables, *(copies_of_a_gradient(model) * model.trainable_variables)]
    state = sum(4 * math.prod(variable.shape) for variable in held)
    backbone, (x, y, _) = model.backbone, batch
    b, s = x["token_ids"].shape
    size = tf.as_dtype(model.compute_dtype).size
    kept = 32 if model.jit_compile or tf.config.list_logical_devices("GPU") else 20
    numbers = backbone.num_layers * (kept * s * b * backbone.hidden_dim + 2 * num_heads(backbone) * s**2 * b)
    logits = math.prod(y.shape) * backbone.vocabulary_size * (3 * 4 + (size if size < 4 else 0))
    return state, (numbers * size + logits) / model.accumulate


def copies_of_a_gradient(model: keras.Model) -> int:
    """How many tensors of a gradient's size a step holds at most; see `memory_of_a_replica`."""
    return 2 + (model.accumulate > 1) + 5 * (num_workers() > 1)


def _padded(batch, length: int | None):
    """A batch with each part padded to a length, if one is given."""
    if length is None:
        return batch
    return keras.tree.map_structure(lambda part: tf.pad(part, [[0, 0], [0, length - part.shape[1]]]), batch)


def state_without_lora(model: keras.Model) -> int:
    """What the state of `memory_of_a_replica` would be if all weights of a model with adapters were trained."""

    def copies(weight: keras.Variable) -> int:  # itself, the copies of its gradient, and its moments
        optimizer = model.optimizer
        one = isinstance(optimizer, keras.optimizers.SGD) or (
            isinstance(optimizer, keras.optimizers.Muon) and not optimizer._should_use_adamw(weight)
        )
        return 1 + copies_of_a_gradient(model) + (1 if one else 2)

    weights = [weight for weight in model.weights if not weight.name.startswith("lora_")]
    return sum(4 * copies(weight) * math.prod(weight.shape) for weight in weights)


def num_heads(backbone: keras.Model) -> int:
    """The number of attention heads in a layer: those of queries, if several share keys and values."""
    return next(getattr(backbone, name) for name in HEADS if hasattr(backbone, name))


def masked_text(batch, pieces: list[str]) -> str:
    """The first sequence of a batch as text, each masked position as `«input→label»`."""
    x, y, weight = (keras.tree.map_structure(lambda part: part[0].numpy(), part) for part in batch)
    words = [pieces[i] for i, is_token in zip(x["token_ids"], x["padding_mask"], strict=True) if is_token]
    for position, label, used in zip(x["mask_positions"], y, weight, strict=True):
        if used:
            words[position] = f"«{words[position]}→{pieces[label]}»"
    return " ".join(words).replace(" ##", "")


def labelled_text(batch, pieces: list[str]) -> str:
    """The first sequence of a causal language model's batch as tokens, with labels as `«labels»`."""
    x, y, weight = (keras.tree.map_structure(lambda part: part[0].numpy(), part) for part in batch)
    is_token = np.append(x["padding_mask"][1:], weight[-1]) > 0  # of the labels, one position ahead
    tokens = [(False, x["token_ids"][0]), *zip(weight[is_token] > 0, y[is_token], strict=True)]
    words = [
        (is_label, " ".join(pieces[i] for _, i in run)) for is_label, run in itertools.groupby(tokens, itemgetter(0))
    ]
    return " ".join(f"«{text}»" if is_label else text for is_label, text in words)
