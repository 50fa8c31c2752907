# SPDX-License-Identifier: Apache-2.0
"""The speed of each recipe's steps beside that of another commit, in turn, round after round.

It tells whether a change has made training slower. Each side runs its own code; texts are the collection's own.
"""

import argparse
import statistics
from typing import Any

from benchmarks.machine import ROOT, checkout, commit
from benchmarks.rounds import Timed, add_round_arguments, take_rounds

# One line per way to train: the recipe, what its name adds, its own arguments, and what is counted.
WAYS = (
    ("bert_mlm", "", {"replicas": 1}, "tokens"),
    ("bert_mlm", ", jit", {"replicas": 1, "jit": True}, "tokens"),
    ("bert_mlm", ", bfloat16", {"replicas": 1, "precision": "mixed_bfloat16"}, "tokens"),
    ("bert_mlm", ", 2 replicas", {"replicas": 2}, "tokens"),
    ("bert_mlm", ", 2 replicas, muon", {"replicas": 2, "optimizer": "muon"}, "tokens"),
    ("text_classifier", ", 2 replicas", {"replicas": 2}, "examples"),
    ("causal_lm", ", 2 replicas", {"replicas": 2}, "tokens"),
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
    size, length = {"model": arguments.model}, {"seq_length": SEQ_LENGTH}
    own = {
        "bert_mlm": size | length | {"vocabulary_size": arguments.vocabulary_size},
        "text_classifier": size,
        "causal_lm": size | length | {"vocabulary_size": min(arguments.vocabulary_size, 8192)},
    }
    speeds = {}
    with checkout(arguments.commit) as before:
        for recipe, more, options, counted in WAYS:
            name, words = recipe + more, {"recipe": recipe, "batch_size": BATCH} | own[recipe] | options
            if arguments.only not in name:
                continue
            sides = [Timed("benchmarks.ours:trainer", words, arguments.seconds, root) for root in (ROOT, before)]
            take_rounds(sides, arguments.rounds, name)
            speeds[name] = [side.per_second(counted) for side in sides]
    print(f"{arguments.commit} = 1; now: {commit()}\n\n{table(speeds)}")


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
