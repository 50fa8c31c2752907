# SPDX-License-Identifier: Apache-2.0
"""What pretraining is worth: SST-2 from a preset of `bert_from_scratch`, and from random weights of the same size.

Both sides have the same options of `text_classifier`, but for the learning rate. Each seed's run has a core to itself.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.fine_tuning import OURS
from benchmarks.fine_tuning_scores import score_table, scores
from benchmarks.machine import existing, machine, write_results
from common.language_model import told_of
from common.log import report

RATE = 1.9e-4  # from the preset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--pretrained", type=existing, required=True, help="work directory of a run of bert_from_scratch"
    )
    parser.add_argument("--sst2", type=existing, required=True, help="folder in GLUE's format")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each side")
    parser.add_argument("--epochs", type=int, default=3, help="of these runs")


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    if arguments.quick:
        arguments.seeds, arguments.epochs = 1, 1
    folder = Path(arguments.pretrained)
    pretraining = json.loads((folder / "results.json").read_text())
    pretraining["config"] |= {"workdir": "runs/bert_from_scratch", "corpus": "simplewiki"}  # as on the page
    words = {"task": "sst2", "data": arguments.sst2, "epochs": arguments.epochs, "replicas": 1}
    sides = {
        "from random weights": (OURS, words | {"model": pretraining["config"]["model"] or "tiny"}),
        "from the preset": (OURS, words | {"preset": str(folder / "preset"), "learning_rate": RATE}),
    }
    results = {
        "machine": machine(arguments.quick),
        "pretraining": pretraining,
        "scores": {"sst2": scores(sides, arguments.seeds)},
    }
    if not arguments.quick:
        write_results("pretraining", results)
    print(tables(results))


def tables(results: dict[str, Any]) -> str:
    """The report of pretraining, and the scores of fine-tuning, in Markdown."""
    return f"```text\n{report(results['pretraining'], told_of)}\n```\n\n{score_table(results['scores'])}"
