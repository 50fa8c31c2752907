# SPDX-License-Identifier: Apache-2.0
"""The speed of each recipe's steps beside that of another commit, in turn, round after round.

It tells whether a change has made training slower. Each side runs its own code; texts are the collection's own.
"""

import argparse
import statistics
from typing import Any

from benchmarks.machine import checkout, machine
from benchmarks.rounds import Timed, add_round_arguments, take_rounds
from benchmarks.text import temporary_folder
from benchmarks.workers import once

BERT, CLASSIFIER, CAUSAL = "benchmarks.ours:trainer", "benchmarks.ours_classifier:trainer", "benchmarks.ours_causal"
FLOAT32, BFLOAT16 = {"precision": "float32"}, {"precision": "mixed_bfloat16"}
# One line per way to train: its name, what trains, its own arguments, and what is counted.
WAYS = (
    ("bert_mlm", BERT, FLOAT32 | {"replicas": 1}, "tokens"),
    ("bert_mlm, jit", BERT, FLOAT32 | {"replicas": 1, "jit": True}, "tokens"),
    ("bert_mlm, bfloat16", BERT, BFLOAT16 | {"replicas": 1}, "tokens"),
    ("bert_mlm, 2 replicas", BERT, FLOAT32 | {"replicas": 2}, "tokens"),
    ("bert_mlm, 2 replicas, muon", BERT, FLOAT32 | {"replicas": 2, "optimizer": "muon"}, "tokens"),
    ("text_classifier, 2 replicas", CLASSIFIER, FLOAT32 | {"replicas": 2}, "examples"),
    ("causal_lm, 2 replicas", f"{CAUSAL}:trainer", FLOAT32 | {"replicas": 2}, "tokens"),
)
BATCH, SEQ_LENGTH = 32, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("commit", help="whose speed is 1: a hash, a tag, HEAD~3")
    parser.add_argument("--model", default="tiny", help="size")
    parser.add_argument("--vocabulary-size", type=int, default=30_522, help="tokens in a vocabulary trained for it")
    add_round_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures and prints."""
    if arguments.quick:
        arguments.model, arguments.vocabulary_size, arguments.rounds, arguments.seconds = "nano", 500, 1, 0.0
    ways = [way for way in WAYS if arguments.only in way[0]]
    with checkout(arguments.commit) as before, temporary_folder() as folder:
        causal = {"vocabulary_size": min(arguments.vocabulary_size, 8192), "model": arguments.model}
        once(f"{CAUSAL}:writer", {"folder": folder, "seq_length": SEQ_LENGTH} | causal)
        own = {
            BERT: {"model": arguments.model, "vocabulary_size": arguments.vocabulary_size, "seq_length": SEQ_LENGTH},
            CLASSIFIER: {"model": arguments.model},
            f"{CAUSAL}:trainer": {"preset": f"{folder}/preset", "seq_length": SEQ_LENGTH},
        }
        speeds = {}
        for name, function, options, counted in ways:
            words = {"batch_size": BATCH} | own[function] | options
            sides = [Timed(function, words, arguments.seconds), Timed(function, words, arguments.seconds, before)]
            take_rounds(sides, arguments.rounds, name)
            speeds[name] = [side.per_second(counted) for side in sides]
    print(f"{arguments.commit} = 1; now: {machine()['commit']}\n\n{table(speeds)}")


def table(speeds: dict[str, Any]) -> str:
    """In Markdown: the median and the range of each round's ratio.

    Args:
        speeds: for each way, those of all rounds, now and before.
    """
    lines = ["| | before, a second | now | now / before | range |", "| --- " * 5 + "|"]
    for name, (now, before) in speeds.items():
        ratios = [a / b for a, b in zip(now, before, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(before):,.0f} | {statistics.median(now):,.0f} "
            f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |"
        )
    return "\n".join(lines)
