# SPDX-License-Identifier: Apache-2.0
"""The results of a run: `results.json`, and the report that is printed."""

import dataclasses
import importlib.metadata
import math
import os
import platform
from typing import Any

import tensorflow as tf

from common.run.runs import PACKAGES
from common.run.speed import cpu_name, peak_memory_mb
from common.run.step_log import RunLog
from common.scores.entries import METRICS
from keras_replicas import num_workers

# A model must beat its baseline by more than this, or the report warns that it does not: a model at the baseline ends a
# little to either side of it. On some thousand examples, chance moves an accuracy by more than one example in a hundred
# (2 standard errors: 0.03), and a correlation by twice as much.
MARGINS = {"unigram_loss": 0.03, "metric": 0.01}
BASELINES = {"majority": "majority-class", "length": "length-only", "bag_of_words": "bag-of-words"}


def training_results(
    recipe: str, config: Any, strategy: tf.distribute.Strategy, global_batch_size: int, log: RunLog
) -> dict[str, Any]:
    """The part of `results.json` that every recipe has; see docs/what-a-run-leaves.md for what each entry means."""
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    return {
        "recipe": recipe,
        "replicas": strategy.num_replicas_in_sync,
        "workers": num_workers(),
        "global_batch_size": global_batch_size,
        "steps": log.step,
        "resumed_from_step": log.first_step or None,
        "seconds": round(log.seconds, 3),
        "tokens_per_second": round(log.tokens_per_second, 1),
        "mfu": log.flops.utilisation(log.tokens_per_second),
        "peak_flops_per_second": log.flops.peak,
        "padding_fraction": log.padding_fraction,
        "learning_rate": log.learning_rate,
        "train_loss": log.epoch["loss"],
        "peak_memory_mb": round(peak_memory_mb()),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "gpus": [gpu.get("device_name") for gpu in gpus]},
        "config": dataclasses.asdict(config),
    }


def report(results: dict[str, Any]) -> str:
    """The results as lines of text: of `train_and_evaluate`, or from `results.json` with null for NaN and infinity."""
    results = {name: math.nan if value is None else value for name, value in results.items()}
    rate = results["learning_rate"]
    batch = f"global batch {results['global_batch_size']}, on {results['replicas']} replica(s)"
    rows = [
        ("steps", f"{results['steps']}, {batch}"),
        ("time", f"{results['seconds']:.0f} s, {results['tokens_per_second']:,.0f} tokens/s"),
        *_speed_rows(results),
        ("padding", f"{results['padding_fraction']:.2%}"),
        ("learning rate", f"first {rate['first']:.2e}, peak {rate['peak']:.2e}, last {rate['last']:.2e}"),
        ("training loss", f"{results['train_loss']:.3f}, mean over the last epoch"),
    ]
    for split, name in (("val", "validation"), ("test", "test")):
        if f"{split}_unigram_loss" in results:
            loss, unigram = results[f"{split}_loss"], results[f"{split}_unigram_loss"]
            rows += [
                (f"{name} loss", f"{loss:.3f}, perplexity {results[f'{split}_perplexity']:.1f}"),
                ("  unigram baseline", f"{unigram:.3f}: the model is {_apart(loss, unigram)}"),
                *_bigram_rows(results, split),
                (f"{name} accuracy", f"{results[f'{split}_accuracy']:.1%}"),
            ]
            if bits := results.get(f"{split}_bits_per_character"):  # not in a run from before it was measured
                rows.append(("  bits per character", f"{bits:.3f}"))
        elif f"{split}_loss" in results:
            rows.append((f"{name} loss", f"{results[f'{split}_loss']:.3f}"))
            if f"{split}_mean_loss" in results:
                rows.append(("  mean baseline", f"{results[f'{split}_mean_loss']:.3f}"))
            rows.append((f"{name} {METRICS[_metrics_of(results, split)[0]]}", _metrics_shown(results, split)))
            rows += [
                (f"  {title} baseline", _metrics_shown(results, f"{split}_{baseline}"))
                for baseline, title in BASELINES.items()
                if _metrics_of(results, f"{split}_{baseline}")
            ]
        else:
            rows.append((name, "no such split, or no labels in it"))
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
    metric = next(iter(_metrics_of(results, "val")), None)
    simple = [results[f"val_{name}_{metric}"] for name in BASELINES if f"val_{name}_{metric}" in results]
    if not simple:
        return False
    beats_mean = results["val_loss"] < results.get("val_mean_loss", math.inf)
    return not (beats_mean and results[f"val_{metric}"] > max(simple) + MARGINS["metric"])


def _metrics_of(results: dict[str, Any], prefix: str) -> list[str]:
    """The metrics with entries such as `val_f1` for the prefix `val`, the main one first."""
    return [metric for metric in METRICS if f"{prefix}_{metric}" in results]


def _metrics_shown(results: dict[str, Any], prefix: str) -> str:
    """The metrics as text, such as `68.4%, F1 0.812`."""
    found = _metrics_of(results, prefix)
    values = {name: f"{results[f'{prefix}_{name}']:{'.1%' if name == 'accuracy' else '.3f'}}" for name in found}
    return ", ".join([values[found[0]], *(f"{METRICS[name]} {values[name]}" for name in found[1:])])


def _bigram_rows(results: dict[str, Any], split: str) -> list[tuple[str, str]]:
    if f"{split}_bigram_loss" not in results:  # a masked language model, which sees more than the token before
        return []
    loss, bigram = results[f"{split}_loss"], results[f"{split}_bigram_loss"]
    return [("  bigram baseline", f"{bigram:.3f}: the model is {_apart(loss, bigram)}")]


def _apart(loss: float, baseline: float) -> str:
    return f"{abs(baseline - loss):.3f} nats {'better' if loss < baseline else 'worse'}"


def _speed_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    if "mfu" not in results:  # a run from before these were measured
        return []
    peak = results["peak_flops_per_second"] / 1e12
    return [
        ("  MFU", f"{results['mfu']:.0%} of {peak:,.2f} TFLOP/s, the measured peak"),
        ("peak memory", f"{results['peak_memory_mb']:,} MiB of host memory"),
    ]
