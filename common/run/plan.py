# SPDX-License-Identifier: Apache-2.0
"""The plan of a run, and the memory of its first steps: `--dry-run`."""

import itertools
import textwrap
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import keras
import numpy as np

from common.data.stream import one_epoch
from common.run.speed import peak_memory_mb

BAR = 40  # columns of the highest learning rate
TRAINED = 3  # steps, of which memory is measured


def print_plan(
    model: keras.Model,
    schedule: Callable,
    sizes: dict[str, tuple[int, int]],
    train: Any,
    total_steps: int,
    pieces: list[str],
) -> dict:
    """Prints tokens, the learning-rate schedule, a sequence as the model sees it, and the memory of a few steps.

    Args:
        model: compiled; it is trained for `TRAINED` steps, on all workers.
        schedule: the learning rate of a step, counted from 0.
        sizes: numbers of sequences and tokens in each split.
        train: training data that begins at any step, of a masked language model, as `masking.mask_tokens` returns it,
            or of a causal one.
        total_steps: steps of the run.
        pieces: the vocabulary, from id to token.

    Returns {}: there are no results.
    """
    batch = next(iter(one_epoch(train, model.distribute_strategy.num_replicas_in_sync)))
    print(f"{model.count_params():,} parameters in {keras.config.dtype_policy().name}; {total_steps} steps")
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
    print(textwrap.indent(textwrap.fill(text, 110), "    "), flush=True)
    trained = min(TRAINED, total_steps)
    model.fit(train, steps_per_epoch=trained, verbose=0)
    print(f"peak memory in the first {trained} step(s): {peak_memory_mb():,.0f} MiB of host memory")
    return {}


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
