# SPDX-License-Identifier: Apache-2.0
"""The scores of fine-tuning published weights: `text_classifier` beside transformers with Accelerate.

The same weights, tasks, batch, learning rate, weight decay and epochs on both sides; AdamW's other settings are each
side's own. Each seed's run, in bfloat16 and with batches by length, has a core to itself.
"""

import argparse
import statistics
import sys
from typing import Any

from benchmarks.fine_tuning import BATCH, OURS, PEERS, RATE, weights_of
from benchmarks.machine import existing, machine, write_results
from benchmarks.workers import on_a_core_each

SEEDS, EPOCHS = 5, 4
OUR_RUN = {
    "batch_size": BATCH,
    "learning_rate": RATE,
    "lr_scaling": "none",
    "replicas": 1,
    "precision": "mixed_bfloat16",
}
PEERS_RUN = {"batch_size": BATCH, "rate": RATE, "precision": "bf16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--preset", type=existing, required=True, help="a folder in Hugging Face's format")
    parser.add_argument("--mrpc", type=existing, required=True, help="folder in GLUE's format")
    parser.add_argument("--rte", type=existing, required=True, help="the same")


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    seeds, epochs = (1, 1) if arguments.quick else (SEEDS, EPOCHS)
    results = {"machine": machine(arguments.quick), "weights_sha256": weights_of(arguments.preset), "scores": {}}
    for task in ("mrpc", "rte"):
        words = {"preset": arguments.preset, "task": task, "data": getattr(arguments, task), "epochs": epochs}
        sides = {"transformers": (PEERS, words | PEERS_RUN), "ours": (OURS, words | OUR_RUN)}
        results["scores"][task] = scores(sides, seeds)
    if not arguments.quick:
        write_results("fine_tuning_scores", results)
    print(score_table(results["scores"]))


def scores(sides: dict[str, tuple[str, dict[str, Any]]], seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Each side's scores on the validation split, one run per seed, each on a core of its own.

    Args:
        sides: by name, the module whose `scorer` does a run, and its arguments.
        seeds: runs of each side.
    """
    jobs = [(side, seed) for seed in range(seeds) for side in sides]
    found: dict[tuple[str, int], dict[str, Any]] = {}
    given = [(f"{sides[side][0]}:scorer", sides[side][1] | {"seed": seed}) for side, seed in jobs]
    for index, answer in on_a_core_each(given):
        found[jobs[index]] = answer
        print(*jobs[index], answer, file=sys.stderr, flush=True)
    return {side: [found[side, seed] for seed in range(seeds)] for side in sides}


def score_table(scores: dict[str, Any]) -> str:
    """The scores of each task in Markdown: mean and standard error over the seeds."""
    lines = ["| task, dev split | seeds | | accuracy | F1 |", "| --- " * 5 + "|"]
    for task, sides in scores.items():
        ours = [*sides.values()][-1][0]  # it has the baselines too
        names = [name for name in ("accuracy", "f1") if name in ours]
        for side, runs in sides.items():
            shown = [mean_of([run[name] for run in runs]) for name in names] + [""] * (2 - len(names))
            lines.append(f"| {task} | {len(runs)} | {side} | {' | '.join(shown)} |")
        for baseline in ("bag_of_words", "majority"):
            shown = [f"{ours[f'{baseline}_{name}']:.3f}" for name in names] + [""] * (2 - len(names))
            lines.append(f"| {task} | | {baseline.replace('_', ' ')} | {' | '.join(shown)} |")
    gaps = ", ".join(f"{task} {gap_of(sides):+.1f}" for task, sides in scores.items() if len(sides["ours"]) > 1)
    return "\n".join(
        [*lines, "", f"Accuracy of ours less transformers', in standard errors of the difference: {gaps}."]
    )


def gap_of(sides: dict[str, list[dict[str, float]]]) -> float:
    """How many standard errors of the difference our mean accuracy is above the peer's."""
    ours, theirs = ([run["accuracy"] for run in sides[side]] for side in ("ours", "transformers"))
    error = sum(statistics.variance(each) / len(each) for each in (ours, theirs)) ** 0.5
    return (statistics.mean(ours) - statistics.mean(theirs)) / error


def mean_of(values: list[float]) -> str:
    """The mean over seeds, and its standard error."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{error}"
