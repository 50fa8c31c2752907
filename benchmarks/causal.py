# SPDX-License-Identifier: Apache-2.0
"""Training speed of `causal_lm` beside transformers with Accelerate, all weights or by LoRA.

Every contender trains the same GPT-2 on the same sequences of 128 tokens, in a process of its own, and is timed in
turn, round after round; only one computes at a time. Memory is the peak of its process since that began.
"""

import argparse
import tempfile
from typing import Any

from benchmarks.machine import machine, with_word, write_results
from benchmarks.rounds import ROUNDS, SECONDS, Timed, add_only_argument, speed_table, take_rounds
from benchmarks.workers import once

SEQ_LENGTH, BATCH, RANK, PIECES, DROPOUT = 128, 16, 8, 8192, 0.1
SIZES, CORPUS = ("tiny", "small"), "docstrings"
PEERS, OURS = "benchmarks.transformers_causal:trainer", "benchmarks.ours:trainer"
# One line per contender: its name, what makes it, its own arguments.
CONTENDERS = (
    ("transformers, Accelerate", PEERS, {}),
    ("transformers, Accelerate, bfloat16", PEERS, {"precision": "bf16"}),
    ("transformers, Accelerate, bfloat16, compiled", PEERS, {"precision": "bf16", "compiler": "inductor"}),
    ("fit, one device", OURS, {"replicas": 1}),
    ("fit, one device, bfloat16", OURS, {"replicas": 1, "precision": "mixed_bfloat16"}),
    ("fit, 2 replicas", OURS, {"replicas": 2}),
    ("fit, 2 replicas, bfloat16", OURS, {"replicas": 2, "precision": "mixed_bfloat16"}),
    ("fit, one device, LoRA", OURS, {"replicas": 1, "lora_rank": RANK}),
    ("fit, one device, bfloat16, LoRA", OURS, {"replicas": 1, "precision": "mixed_bfloat16", "lora_rank": RANK}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_only_argument(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    sizes, pieces = (("nano",), 500) if arguments.quick else (SIZES, PIECES)
    results: dict[str, Any] = {"machine": machine(arguments.quick), "sizes": {}}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            options = {"corpus": CORPUS, "vocabulary_size": pieces, "model": size}
            once("benchmarks.text:gpt2_writer", {"folder": folder, "seq_length": SEQ_LENGTH} | options)
            results["sizes"][size] = measure(arguments, size, folder)
        print(f"{size}:\n\n{table(results['sizes'][size])}\n", flush=True)
    if not arguments.quick and not arguments.only:
        write_results("causal", results)


def measure(arguments: argparse.Namespace, size: str, folder: str) -> dict[str, Any]:
    """Each contender's tokens per second in every round, and its peak memory in MiB."""
    common = {"batch_size": BATCH, "dropout": DROPOUT}
    own = {
        PEERS: {"folder": folder, "model": size},
        OURS: {"recipe": "causal_lm", "corpus": CORPUS, "preset": f"{folder}/preset", "seq_length": SEQ_LENGTH},
    }
    names = with_word(arguments.only, [name for name, *_ in CONTENDERS])
    chosen = [contender for contender in CONTENDERS if contender[0] in names]
    rounds, seconds = (1, 0.0) if arguments.quick else (ROUNDS, SECONDS)
    timed = [Timed(made_by, common | own[made_by] | words, seconds) for _, made_by, words in chosen]
    take_rounds(timed, rounds, size)
    return {
        name: {"tokens_per_second": each.per_second("tokens"), "peak_memory_mb": each.answers[-1]["peak_memory_mb"]}
        for (name, *_), each in zip(chosen, timed, strict=True)
    }


def table(rows: dict[str, Any]) -> str:
    """The results of one size, in Markdown."""
    speeds = {name: row["tokens_per_second"] for name, row in rows.items()}
    return speed_table("tokens/s", speeds, peak_memory={n: f"{row['peak_memory_mb']:,} MiB" for n, row in rows.items()})


def tables(results: dict[str, Any]) -> str:
    """All sizes, in Markdown."""
    return "\n\n".join(f"GPT-2 of the size {size}:\n\n{table(rows)}" for size, rows in results["sizes"].items())
