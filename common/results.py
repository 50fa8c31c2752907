# SPDX-License-Identifier: Apache-2.0
"""A run's folder: the configuration it was started with, and the results it ended with."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from common.callbacks import StepLog
from common.command_line import UserError
from common.metrics import perplexity
from common.scaling import global_batch_size
from common.strategy import num_workers

PACKAGES = ("tensorflow", "keras", "keras-hub", "tokenizers", "numpy")
# Knobs that do not change what a run computes.
IGNORED_KNOBS = ("workdir", "overwrite")


def open_run(recipe: str, config: Any) -> tuple[Path, dict | None]:
    """Makes the run's folder, or finds out what became of the run in it.

    Args:
        recipe: the recipe's name.
        config: its `Config`, with the knobs `workdir` and `overwrite`.

    Returns:
        The folder, with `config.json` written, and the results of the run in it where that has ended, else None.

    Raises:
        UserError: when the folder cannot be written, or holds a run of another recipe or with other knobs.
    """
    workdir = Path(config.workdir)
    wanted = {"recipe": recipe, **knobs(config)}
    try:
        if config.overwrite and (workdir / "config.json").is_file():
            shutil.rmtree(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        if (workdir / "config.json").is_file():
            found = json.loads((workdir / "config.json").read_text())
            different = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
            if different:
                raise UserError(
                    f"{workdir} holds a run with other knobs: "
                    + ", ".join(f"{name} {found.get(name)!r}, not {wanted.get(name)!r}" for name in different)
                    + ". Give another --workdir, or --overwrite to start afresh"
                )
        write_json(workdir / "config.json", wanted)
    except OSError as error:
        raise UserError(
            f"cannot write to the work folder {workdir}: {error.strerror}. Give another --workdir"
        ) from error
    if (workdir / "results.json").is_file():
        return workdir, json.loads((workdir / "results.json").read_text())
    (workdir / "steps.jsonl").unlink(missing_ok=True)
    shutil.rmtree(workdir / "tensorboard", ignore_errors=True)
    return workdir, None


def knobs(config: Any) -> dict[str, Any]:
    """The knobs that decide what a run computes."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in IGNORED_KNOBS}


def training_results(recipe: str, config: Any, strategy: tf.distribute.Strategy, log: StepLog) -> dict[str, Any]:
    """The part of `results.json` that every recipe has; see the README for what each entry means."""
    rates = log.learning_rates
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return {
        "recipe": recipe,
        "replicas": strategy.num_replicas_in_sync,
        "workers": num_workers(),
        "global_batch_size": global_batch_size(config.batch_size, strategy.num_replicas_in_sync),
        "steps": log.step,
        "resumed_from_step": None,
        "seconds": round(log.seconds, 3),
        "tokens_per_second": round(log.tokens_per_second, 1),
        "padding_fraction": log.padding_fraction,
        "learning_rate": {"first": rates[0], "peak": max(rates), "last": rates[-1]},
        "peak_memory_mb": round(peak_memory / (2**20 if sys.platform == "darwin" else 2**10)),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "hardware": {"cpu": _cpu_model(), "cores": os.cpu_count(), "gpus": [gpu.get("device_name") for gpu in gpus]},
        "config": dataclasses.asdict(config),
    }


def language_model_scores(split: str, loss: float, accuracy: float, unigram: float) -> dict[str, float]:
    """Entries `{split}_loss` and so on; losses in nats a masked token."""
    return {
        f"{split}_loss": loss,
        f"{split}_accuracy": accuracy,
        f"{split}_perplexity": perplexity(loss),
        f"{split}_unigram_loss": unigram,
    }


def report(results: dict[str, Any]) -> str:
    """The results for a person to read."""
    rate = results["learning_rate"]
    rows = {
        "steps": f"{results['steps']} of {results['global_batch_size']} examples, on {results['replicas']} replicas",
        "time": f"{results['seconds']:.0f} s, {results['tokens_per_second']:,.0f} tokens/s",
        "padding": f"{results['padding_fraction']:.2%}",
        "learning rate": f"first {rate['first']:.2e}, peak {rate['peak']:.2e}, last {rate['last']:.2e}",
        "train loss": f"{results['train_loss']:.3f}, mean of the last epoch",
    }
    for split, name in (("val", "validation"), ("test", "test")):
        if f"{split}_loss" in results:
            loss, unigram = results[f"{split}_loss"], results[f"{split}_unigram_loss"]
            rows[f"{name} loss"] = f"{loss:.3f}, perplexity {results[f'{split}_perplexity']:.1f}"
            rows["  by word frequency"] = f"{unigram:.3f}: the model is {unigram - loss:.3f} nats better"
            rows[f"{name} accuracy"] = f"{results[f'{split}_accuracy']:.1%}"
    if "test_loss" not in results:
        rows["test"] = "the corpus has no test split"
    rows["run folder"] = results["config"]["workdir"]
    return "\n".join(f"{name:20} {value}" for name, value in rows.items())


def write_json(path: Path, content: Any) -> None:
    """Writes whole or not at all: a reader never finds half a file."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
