# SPDX-License-Identifier: Apache-2.0
"""Training speed of this project's `fit`, of the published Keras example, and of transformers with Accelerate.

Every contender trains the same size of BERT with the same vocabulary on the same text, in a process of its own, and is
timed in turn, round after round; only one computes at a time. Tokens are counted without padding.
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, with_word, write_results
from benchmarks.rounds import ROUNDS, SECONDS, Timed, add_only_argument, speed_table, take_rounds
from benchmarks.text import add_text_arguments, prepare_text

SEQ_LENGTH, MASK_RATE, DROPOUT = 128, 0.15, 0.1
PUBLISHED = "published Keras example, padded to 512"
OURS = "benchmarks.ours:trainer"
PUBLISHERS = "benchmarks.keras_example:trainer"
PEERS = "benchmarks.transformers_peer:trainer"

# One line per contender: its name; what makes it; its own arguments.
CONTENDERS = (
    (PUBLISHED, PUBLISHERS, {}),
    ("transformers, Accelerate", PEERS, {}),
    ("transformers, Accelerate, bfloat16", PEERS, {"precision": "bf16"}),
    ("transformers, Accelerate, bfloat16, compiled", PEERS, {"precision": "bf16", "compiler": "inductor"}),
    ("fit, one device", OURS, {"replicas": 1}),
    ("fit, one device, bfloat16", OURS, {"replicas": 1, "precision": "mixed_bfloat16"}),
    ("fit, one device, Muon", OURS, {"replicas": 1, "optimizer": "muon"}),
    ("fit, one device, bfloat16, Muon", OURS, {"replicas": 1, "precision": "mixed_bfloat16", "optimizer": "muon"}),
    ("fit, 2 replicas", OURS, {"replicas": 2}),
    ("fit, 2 replicas, bfloat16", OURS, {"replicas": 2, "precision": "mixed_bfloat16"}),
)
# Sequences per step: of 128 tokens, and of 512 in the published example, whose 64 take too much memory.
BATCHES = {"nano": (32, 32), "tiny": (32, 64), "base": (16, 4)}
ROUNDS_OF = {"tiny": ROUNDS, "base": 3}  # by size; one of BERT-base takes seven minutes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_text_arguments(parser)
    add_only_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    rounds_of, seconds = ({"nano": 1}, 0.0) if arguments.quick else (ROUNDS_OF, SECONDS)
    names = with_word(arguments.only, [name for name, *_ in CONTENDERS])
    contenders = [contender for contender in CONTENDERS if contender[0] in names]
    results = {"corpus": Path(arguments.corpus).name, "sizes": {}}
    with tempfile.TemporaryDirectory() as folder:
        text = prepare_text(arguments, SEQ_LENGTH, folder)
        for size, rounds in rounds_of.items():
            of = machine(arguments.quick)
            timed = {c[0]: Timed(*specification(c, size, text, folder), seconds) for c in contenders}
            take_rounds([*timed.values()], rounds, size, stay=False)  # in memory together, they slow each other
            rows = {name: {"tokens_per_second": each.per_second("tokens")} for name, each in timed.items()}
            found = {"pieces": text["pieces"], "contenders": rows}
            results["sizes"][size] = {"machine": of} | found
            print(table(found), "\n", flush=True)
    if not arguments.quick and not arguments.only:
        write_results("throughput", results)


def specification(contender, size: str, text: dict[str, Any], folder: str):
    """What makes a contender: the function and its arguments."""
    _, function, own = contender
    packed, padded = BATCHES[size]
    common = {"model": size, "dropout": DROPOUT, "batch_size": padded if function == PUBLISHERS else packed}
    words = {"corpus": text["corpus"], "vocabulary": text["vocabulary"]}
    of_function = {
        OURS: {"recipe": "bert_mlm", "seq_length": SEQ_LENGTH, "mask_rate": MASK_RATE} | words,
        PUBLISHERS: words,
        PEERS: {"folder": folder},
    }
    return function, common | of_function[function] | own


def table(measured: dict[str, Any]) -> str:
    """The results of one size, in Markdown; ratios of medians, to the published example too."""
    rows = measured["contenders"]
    speeds = {name: row["tokens_per_second"] for name, row in rows.items()}
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    published = medians.get(PUBLISHED, math.nan)
    ratios = {name: f"{median / published:.1f} x" for name, median in medians.items()}
    return speed_table("tokens/s", speeds, **{"vs. published": ratios})
