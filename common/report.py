# SPDX-License-Identifier: Apache-2.0
"""What a run prints: its results, with their baselines, and a plan of it before it starts."""

import math
import textwrap
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from .log import one_epoch, peak_memory_mb

# Names of metrics in reports. The first that a task has is its main metric: accuracy for MRPC, Pearson correlation for
# STS-B, as in Liu et al. 2019, arXiv:1907.11692. Higher is better.
METRICS = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "Spearman",
}
# A model must beat its baseline by more than this, or the report warns that it does not: a model at the baseline ends a
# little to either side of it. On some thousand examples, chance moves an accuracy by more than one example in a hundred
# (2 standard errors: 0.03), and a correlation by twice as much.
MARGINS = {"unigram_loss": 0.03, "metric": 0.01}
BASELINES = {"majority": "majority-class", "length": "length-only", "bag_of_words": "bag-of-words"}
BAR = 40  # columns of the highest learning rate
TRAINED = 3  # steps, of which memory is measured


def report(results: dict[str, Any]) -> str:
    """The results as lines of text: of `train_and_evaluate`, or from `results.json` with null for NaN and infinity."""
    results = _numbers(results)
    rate = results["learning_rate"]
    batch = f"global batch {results['global_batch_size']}, on {results['replicas']} replica(s)"
    rows = [
        ("steps", f"{results['steps']}, {batch}"),
        ("time", f"{results['seconds']:.0f} s, {results['tokens_per_second']:,.0f} tokens/s"),
        ("peak memory", f"{results['peak_memory_mb']:,} MiB of host memory"),
        ("padding", f"{results['padding_fraction']:.2%}"),
        ("learning rate", f"first {rate['first']:.2e}, peak {rate['peak']:.2e}, last {rate['last']:.2e}"),
        ("training loss", f"{results['train_loss']:.3f}, mean over the last epoch"),
    ]
    for split, name in (("val", "validation"), ("test", "test")):
        if f"{split}_unigram_loss" in results:
            rows += _language_model_rows(results, split, name)
        elif f"{split}_loss" in results:
            rows += _task_rows(results, split, name)
    if no_better(results):
        advice = "try a third of the --learning-rate, or more --epochs"
        rows.append(("warning", f"the model does not beat its baseline on the validation split: {advice}"))
    rows.append(("work directory", results["config"]["workdir"]))
    width = max(20, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:{width}} {value}" for name, value in rows)


def no_better(results: dict[str, Any]) -> bool:
    """Whether the model does not beat its baseline on the validation split by more than `MARGINS`.

    That is the unigram baseline for a language model; for a fine-tuned model, by its main metric, the best of those
    that ignore word order, and in regression also the loss of the mean of the training labels. NaN never beats it.
    """
    if "val_unigram_loss" in results:
        return not results["val_loss"] < results["val_unigram_loss"] - MARGINS["unigram_loss"]
    metric = next((name for name in METRICS if f"val_{name}" in results), None)
    simple = [results[f"val_{name}_{metric}"] for name in BASELINES if f"val_{name}_{metric}" in results]
    if not simple:
        return False
    beats_mean = results["val_loss"] < results.get("val_mean_loss", math.inf)
    return not (beats_mean and results[f"val_{metric}"] > max(simple) + MARGINS["metric"])


def _numbers(results: dict[str, Any]) -> dict[str, Any]:
    """The same with NaN for null."""
    inner = {name: _numbers(value) for name, value in results.items() if isinstance(value, dict)}
    return {name: math.nan if value is None else value for name, value in (results | inner).items()}


def _language_model_rows(results: dict[str, Any], split: str, name: str) -> list[tuple[str, str]]:
    loss, unigram = results[f"{split}_loss"], results[f"{split}_unigram_loss"]
    difference = f"{abs(unigram - loss):.3f} nats {'better' if loss < unigram else 'worse'}"
    return [
        (f"{name} loss", f"{loss:.3f}, perplexity {results[f'{split}_perplexity']:.1f}"),
        ("  unigram baseline", f"{unigram:.3f}: the model is {difference}"),
        (f"{name} accuracy", f"{results[f'{split}_accuracy']:.1%}"),
        ("  bits per character", f"{results[f'{split}_bits_per_character']:.3f}"),
    ]


def _task_rows(results: dict[str, Any], split: str, name: str) -> list[tuple[str, str]]:
    def shown(prefix: str) -> str:
        """The metrics that begin so, such as `68.4%, F1 0.812`."""
        found = [metric for metric in METRICS if f"{prefix}_{metric}" in results]
        texts = [f"{results[f'{prefix}_{each}']:{'.1%' if each == 'accuracy' else '.3f'}}" for each in found]
        names = ["", *(f"{METRICS[each]} " for each in found[1:])]
        return ", ".join(name + text for name, text in zip(names, texts, strict=bool(texts)))

    main = next(title for metric, title in METRICS.items() if f"{split}_{metric}" in results)
    baselines = [(f"  {title} baseline", shown(f"{split}_{each}")) for each, title in BASELINES.items()]
    mean = results.get(f"{split}_mean_loss")
    return [
        (f"{name} loss", f"{results[f'{split}_loss']:.3f}"),
        *([] if mean is None else [("  mean baseline", f"{mean:.3f}")]),
        (f"{name} {main}", shown(split)),
        *((title, text) for title, text in baselines if text),
    ]


def print_plan(model: keras.Model, train: Any, schedule: Callable, total_steps: int, tokenizer: Any) -> dict:
    """Prints a run's size, its learning rates, an example as the model sees it, and the memory of a few steps.

    Args:
        model: compiled; it is trained for `TRAINED` steps, on all workers.
        train: data that begins at any step, of (x, y, sample_weight).
        schedule: the learning rate of a step, counted from 0.
        total_steps: steps of the run.
        tokenizer: KerasHub's, of the ids.

    Returns:
        {}: there are no results.
    """
    x, y, weight = next(iter(one_epoch(train)))
    tokens_in_first = int(tf.reduce_sum(x["padding_mask"]))
    print(f"{model.count_params():,} parameters in {keras.config.dtype_policy().name}")
    print(f"{total_steps:,} steps, {len(train):,} in an epoch; in the first, {tokens_in_first:,} tokens")
    rates = {step: float(schedule(step)) for step in sorted({round(i / 10 * (total_steps - 1)) for i in range(11)})}
    print("learning rate by step:")
    for step, rate in rates.items():
        print(f"{step + 1:>10,} {rate:9.2e} {'#' * round(rate / (max(rates.values()) or 1) * BAR)}")
    shown = {"input": x["token_ids"][0][x["padding_mask"][0] > 0]}
    if y.shape.rank == 2:
        shown["labels"] = y[0][weight[0] > 0]
    for name, ids in shown.items():
        tokens = " ".join(tokenizer.id_to_token(number) for number in ids.numpy().tolist())
        print(f"the first sequence's {name}:\n{textwrap.indent(textwrap.fill(tokens, 110), '    ')}", flush=True)
    steps = min(TRAINED, total_steps)
    model.fit(train, steps_per_epoch=steps, verbose=0)
    print(f"peak memory in the first {steps} step(s): {peak_memory_mb():,.0f} MiB of host memory")
    return {}
