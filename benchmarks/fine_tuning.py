# SPDX-License-Identifier: Apache-2.0
"""The speed of fine-tuning published weights: `text_classifier` beside transformers with Accelerate.

The same weights, tasks, batch, learning rate and weight decay on both sides; AdamW's other settings are each side's
own.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

from benchmarks.machine import existing, machine, with_word, write_results
from benchmarks.rounds import ROUNDS, SECONDS, Timed, add_only_argument, speed_table, take_rounds
from keras_replicas import UserError

PEERS, OURS = "benchmarks.transformers_classifier", "benchmarks.ours_classifier"
RECIPE = {"recipe": "text_classifier"}  # of `benchmarks.ours`
# One line per contender: its name, its module, its own arguments.
CONTENDERS = (
    ("transformers, Accelerate, by length", PEERS, {}),
    ("transformers, Accelerate, bfloat16, by length", PEERS, {"precision": "bf16"}),
    ("fit, one device", "benchmarks.ours", RECIPE | {"replicas": 1}),
    ("fit, one device, bfloat16", "benchmarks.ours", RECIPE | {"replicas": 1, "precision": "mixed_bfloat16"}),
    ("fit, 2 replicas", "benchmarks.ours", RECIPE | {"replicas": 2}),
    ("fit, 2 replicas, bfloat16", "benchmarks.ours", RECIPE | {"replicas": 2, "precision": "mixed_bfloat16"}),
)
BATCH, RATE = 16, 5e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--preset", type=existing, required=True, help="a folder in Hugging Face's format")
    parser.add_argument("--mrpc", type=existing, required=True, help="folder in GLUE's format")
    parser.add_argument("--sst2", type=existing, required=True, help="the same")
    add_only_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    results = {"machine": machine(arguments.quick), "weights_sha256": weights_of(arguments.preset)}
    results["speed"] = {task: speeds(arguments, task, getattr(arguments, task)) for task in ("mrpc", "sst2")}
    if not arguments.quick and not arguments.only:
        write_results("fine_tuning", results)
    print(tables(results))


def weights_of(preset: str) -> str:
    """The SHA-256 of a preset's weights.

    Raises:
        UserError: when the folder has none.
    """
    weights = Path(preset, "model.safetensors")
    if not weights.is_file():
        raise UserError(f"--preset {preset} has no model.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def speeds(arguments: argparse.Namespace, task: str, data: str) -> dict[str, Any]:
    """Each contender's examples per second in every round, and its share of padding."""
    words = {"preset": arguments.preset, "task": task, "data": data, "batch_size": BATCH, "rate": RATE}
    names = with_word(arguments.only, [name for name, *_ in CONTENDERS])
    chosen = [contender for contender in CONTENDERS if contender[0] in names]
    rounds, seconds = (1, 0.0) if arguments.quick else (ROUNDS, SECONDS)
    timed = [Timed(f"{module}:trainer", words | own, seconds) for _, module, own in chosen]
    take_rounds(timed, rounds, task)
    return {
        name: {"examples_per_second": each.per_second("examples"), "padding": padding(each.answers)}
        for (name, *_), each in zip(chosen, timed, strict=True)
    }


def padding(answers: list[dict[str, Any]]) -> float:
    """The share of padding in all that was timed."""
    return 1 - sum(each["tokens"] for each in answers) / sum(each["slots"] for each in answers)


def task_table(measured: dict[str, Any]) -> str:
    """One task's speeds, in Markdown."""
    speeds = {name: row["examples_per_second"] for name, row in measured.items()}
    return speed_table("examples/s", speeds, padding={name: f"{row['padding']:.1%}" for name, row in measured.items()})


def tables(results: dict[str, Any]) -> str:
    """Each task's speeds, in Markdown."""
    parts = [f"{task}:\n\n{task_table(measured)}" for task, measured in results["speed"].items()]
    return "\n\n".join([*parts, f"The weights' SHA-256: {results['weights_sha256']}."])
