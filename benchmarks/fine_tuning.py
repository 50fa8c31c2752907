# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning published weights: `text_classifier` beside transformers with Accelerate, its speed and its scores.

The same weights, tasks, batch, learning rate, weight decay and epochs on both sides; AdamW's other settings are each
side's own. Speeds are taken in turn, round after round, on all cores; then each seed's run, in bfloat16 and with
batches by length unless named otherwise, has a core to itself.
"""

import argparse
import hashlib
import json
import queue
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.all import stale
from benchmarks.machine import RESULTS, cores, existing, machine, write_results
from benchmarks.rounds import Timed, add_round_arguments, speed_table, take_rounds
from benchmarks.workers import Worker, together
from keras_replicas import UserError

PEERS, OURS = "benchmarks.transformers_classifier", "benchmarks.ours_classifier"
STEPS = {"recipe": "text_classifier"}  # of `benchmarks.ours`
# One line per contender: its name, its module, its own arguments.
CONTENDERS = (
    ("transformers, Accelerate", PEERS, {}),
    ("transformers, Accelerate, by length", PEERS, {"by_length": True}),
    ("transformers, Accelerate, bfloat16", PEERS, {"precision": "bf16"}),
    ("transformers, Accelerate, bfloat16, by length", PEERS, {"precision": "bf16", "by_length": True}),
    ("fit, one device", "benchmarks.ours", STEPS | {"replicas": 1}),
    ("fit, one device, bfloat16", "benchmarks.ours", STEPS | {"replicas": 1, "precision": "mixed_bfloat16"}),
    ("fit, 2 replicas", "benchmarks.ours", STEPS | {"replicas": 2}),
    ("fit, 2 replicas, bfloat16", "benchmarks.ours", STEPS | {"replicas": 2, "precision": "mixed_bfloat16"}),
)
BATCH, RATE = 16, 5e-5
OUR_RUN = {
    "batch_size": BATCH,
    "learning_rate": RATE,
    "lr_scaling": "none",
    "replicas": 1,
    "precision": "mixed_bfloat16",
}
PEERS_RUN = {"batch_size": BATCH, "rate": RATE, "by_length": True, "precision": "bf16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--preset", type=existing, required=True, help="a folder in Hugging Face's format")
    parser.add_argument("--mrpc", type=existing, default="", help="folder in GLUE's format")
    parser.add_argument("--rte", type=existing, default="", help="the same")
    parser.add_argument("--sst2", type=existing, default="", help="the same; its speed alone")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side for the scores")
    parser.add_argument("--epochs", type=int, default=4, help="of these runs")
    add_round_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.seeds, arguments.epochs = 1, 0.0, 1, 1
    tasks = {name: getattr(arguments, name) for name in ("mrpc", "sst2", "rte") if getattr(arguments, name)}
    if not tasks:
        raise UserError("give a task's folder: --mrpc, --sst2 or --rte")
    path = RESULTS / "fine_tuning.json"
    weights = hashlib.sha256(Path(arguments.preset, "model.safetensors").read_bytes()).hexdigest()
    results: dict[str, Any] = {
        "machine": machine(arguments.quick),
        "weights_sha256": weights,
        "speed": {},
        "scores": {},
    }
    if path.exists() and not arguments.quick:  # what the same command measured before, on other tasks
        before = json.loads(path.read_text())
        same = [[each["weights_sha256"], each["machine"]["versions"]] for each in (before, results)]
        if same[0] == same[1] and not stale("fine_tuning"):
            results = before
    for task in [task for task in tasks if task != "rte" and arguments.rounds]:
        results["speed"][task] = speeds(arguments, task, tasks[task])
        print(task_table(results["speed"][task]), "\n", flush=True)
    for task in [task for task in tasks if task != "sst2" and arguments.seeds]:
        words = {"preset": arguments.preset, "task": task, "data": tasks[task], "epochs": arguments.epochs}
        sides = {"transformers": (PEERS, words | PEERS_RUN), "ours": (OURS, words | OUR_RUN)}
        if task == "mrpc":  # one task tells whether batches by length cost quality
            sides = {"ours, batches at random": (OURS, words | OUR_RUN | {"by_length": False})} | sides
        results["scores"][task] = scores(sides, arguments.seeds)
    if not arguments.quick and not arguments.only:
        write_results("fine_tuning", results)
    print(score_table(results["scores"]))


def speeds(arguments: argparse.Namespace, task: str, data: str) -> dict[str, Any]:
    """Each contender's examples per second in every round, and its share of padding."""
    words = {"preset": arguments.preset, "task": task, "data": data, "batch_size": BATCH, "rate": RATE}
    chosen = [contender for contender in CONTENDERS if arguments.only in contender[0]]
    timed = [Timed(f"{module}:trainer", words | own, arguments.seconds) for _, module, own in chosen]
    take_rounds(timed, arguments.rounds, task)
    return {
        name: {"examples_per_second": each.per_second("examples"), "padding": padding(each.answers)}
        for (name, *_), each in zip(chosen, timed, strict=True)
    }


def padding(answers: list[dict[str, Any]]) -> float:
    """The share of padding in all that was timed."""
    return 1 - sum(each["tokens"] for each in answers) / sum(each["slots"] for each in answers)


def scores(sides: dict[str, tuple[str, dict[str, Any]]], seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Each side's scores on the validation split, one run per seed, each on a core of its own.

    Args:
        sides: by name, the module whose `scorer` does a run, and its arguments.
        seeds: runs of each side.
    """
    free: queue.Queue[int] = queue.Queue()
    for core in cores():
        free.put(core)

    def measure(job: tuple[str, int]) -> dict[str, Any]:
        (module, words), core = sides[job[0]], free.get()
        try:
            with together([Worker(f"{module}:scorer", words | {"seed": job[1]}, cores=[core])]) as [worker]:
                found = worker()
        finally:
            free.put(core)
        print(*job, found, file=sys.stderr, flush=True)
        return found

    jobs = [(side, seed) for seed in range(seeds) for side in sides]
    with ThreadPoolExecutor(len(cores())) as pool:
        found = dict(zip(jobs, pool.map(measure, jobs), strict=True))
    return {side: [found[side, seed] for seed in range(seeds)] for side in sides}


def task_table(measured: dict[str, Any]) -> str:
    """One task's speeds, in Markdown."""
    speeds = {name: row["examples_per_second"] for name, row in measured.items()}
    return speed_table("examples/s", speeds, padding={name: f"{row['padding']:.1%}" for name, row in measured.items()})


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
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> str:
    """All that was measured, in Markdown."""
    parts = [f"{task}:\n\n{task_table(measured)}" for task, measured in results["speed"].items()]
    return "\n\n".join([*parts, score_table(results["scores"]), f"The weights' SHA-256: {results['weights_sha256']}."])


def mean_of(values: list[float]) -> str:
    """The mean over seeds, and its standard error."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{error}"
