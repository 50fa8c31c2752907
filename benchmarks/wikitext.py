# SPDX-License-Identifier: Apache-2.0
"""Reads a complete run of `bert_from_scratch` on WikiText-2, as the README shows it.

Writes `benchmarks/results/wikitext-2.json` (its results, and what it fills
into five sentences) and the picture of its loss, `docs/wikitext-2.png`. It needs matplotlib.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np

from benchmarks.machine import ROOT, existing, machine, write_results
from keras_replicas import UserError

OPTIONS = "--model tiny --vocabulary-size 8192 --seq-length 128 --epochs 22 --max-steps 13304"  # of the run
SENTENCES = (
    "He was born in [MASK] and went to school in the city .",
    "The film received [MASK] reviews from critics .",
    "The ship was sunk during the second world [MASK] .",
    "The song was released as a [MASK] in the united states .",
    "The species is found in the [MASK] of south america .",
)
SMOOTHED = 100  # steps over which the picture averages the loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("run", type=existing, help="folder of the run")


def main(arguments: argparse.Namespace) -> None:
    """Reads the run and writes both files."""
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    from common.model.masked_lm import masked_lm_from_preset, preset_tokenizer
    from recipes._fill_mask import fill_mask

    run = Path(arguments.run)
    results = json.loads((run / "results.json").read_text())
    if results["resumed_from_step"]:
        raise UserError(f"{run} was interrupted, so its seconds are those of a part: remove it, and run it again")
    results["config"] |= {"workdir": "runs/wikitext-2", "corpus": "wikitext-2"}  # where they were is of no interest
    model, tokenizer = masked_lm_from_preset(str(run / "preset")), preset_tokenizer(str(run / "preset"))
    filled = {sentence: fill_mask(model, tokenizer, sentence)[0] for sentence in SENTENCES}
    summary = {"machine": machine(), "results": results, "filled": filled}
    losses = [json.loads(line)["loss"] for line in (run / "steps.jsonl").read_text().splitlines()]
    _draw(np.array(losses), results, ROOT / "docs/wikitext-2.png")
    write_results("wikitext-2", summary)


def _draw(losses: np.ndarray, results: dict, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    means = np.convolve(losses, np.ones(SMOOTHED) / SMOOTHED, mode="valid")
    axes.plot(np.arange(len(means)) + SMOOTHED, means, label=f"training, mean of {SMOOTHED} steps", linewidth=1)
    axes.plot([len(losses)], [results["val_loss"]], "o", label="validation, at the end", markersize=4)
    axes.axhline(results["val_unigram_loss"], color="gray", linestyle="--", label="unigram baseline")
    axes.set(xlabel="step", ylabel="loss in nats per masked token", title="bert_from_scratch on WikiText-2")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
