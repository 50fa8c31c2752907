# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning from the same weights and head, on the same batches: does transformers on torch compute what fit does?

One device, float32, no dropout, which no two libraries draw alike. What they define differently is set alike, see
`transformers_classifier.follower`. What is left is rounding, so that scores can differ by seeds alone.
"""

import argparse
from typing import Any

import numpy as np

from benchmarks.fine_tuning import BATCH, OURS, PEERS, RATE
from benchmarks.machine import existing, machine, write_results
from benchmarks.workers import once

EPOCHS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--preset", type=existing, required=True, help="a folder in Hugging Face's format")
    parser.add_argument("--mrpc", type=existing, required=True, help="folder in GLUE's format")
    parser.add_argument("--rte", type=existing, required=True, help="the same")


def main(arguments: argparse.Namespace) -> None:
    """Trains on both sides, prints and writes how far they are apart."""
    epochs, of = 1 if arguments.quick else EPOCHS, machine(arguments.quick)
    rows = {task: compare(arguments.preset, task, getattr(arguments, task), epochs) for task in ("mrpc", "rte")}
    results = {"machine": of, "tasks": rows}
    print(table(results))
    if not arguments.quick:
        write_results("same_steps", results)


def compare(preset: str, task: str, data: str, epochs: int) -> dict[str, Any]:
    """The largest differences of a step's loss, and of an output for the validation split after the last step."""
    words = {"preset": preset, "task": task, "data": data, "batch_size": BATCH, "rate": RATE}
    ours = once(f"{OURS}:leader", words, epochs=epochs)
    losses, outputs = ours.pop("losses"), np.array(ours.pop("outputs"))
    theirs = once(f"{PEERS}:follower", {"preset": preset, "rate": RATE}, **ours)
    their_outputs = np.array(theirs["outputs"])
    return {
        "epochs": epochs,
        "steps": len(losses),
        "loss": float(np.abs(np.subtract(losses, theirs["losses"])).max()),
        "output": float(np.abs(outputs - their_outputs).max()),
        "predictions": len(outputs),
        "equal_predictions": int((outputs.argmax(axis=1) == their_outputs.argmax(axis=1)).sum()),
    }


def table(results: dict[str, Any]) -> str:
    """One line per task, in Markdown."""
    lines = [
        "| task | epochs | steps | largest difference of a step's loss | of an output on dev | equal predictions |",
        "| --- " * 6 + "|",
    ]
    lines += [
        f"| {task} | {row['epochs']} | {row['steps']} | {row['loss']:.1e} | {row['output']:.1e} "
        f"| {row['equal_predictions']} of {row['predictions']} |"
        for task, row in results["tasks"].items()
    ]
    return "\n".join(lines)
