# SPDX-License-Identifier: Apache-2.0
"""Memory of training: what a replica takes, by model and options, beside what `--dry-run` predicts.

Each figure is the peak of a process of its own (Linux: VmHWM, which starts over with each program), less what
TensorFlow, the text and the rest of the program take: the peak of a process that trains the smallest model on a batch
of one sequence, without the part that is predicted for that model.
"""

import argparse
import re
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, write_results
from benchmarks.scaling import two_workers
from benchmarks.text import add_text_arguments, prepare_text, temporary_folder
from benchmarks.workers import once

BERT, CAUSAL = "bert_mlm", "causal_lm"
COMMON = {"batch_size": 32, "seq_length": 128, "precision": "float32", "replicas": 1}
SMALLEST = {"model": "nano", "batch_size": 1}
STEPS = 4
# One line per row: its name, the recipe, and what differs from `COMMON`.
ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("BERT-tiny, 32 sequences of 128", BERT, {"model": "tiny"}),
    ("64 sequences", BERT, {"model": "tiny", "batch_size": 64}),
    ("64 sequences, `--accumulate 4`", BERT, {"model": "tiny", "batch_size": 64, "accumulate": 4}),
    ("8 sequences of 512", BERT, {"model": "tiny", "batch_size": 8, "seq_length": 512}),
    ("`--precision mixed_bfloat16`", BERT, {"model": "tiny", "precision": "mixed_bfloat16"}),
    ("`--optimizer muon`", BERT, {"model": "tiny", "optimizer": "muon"}),
    ("`--jit`", BERT, {"model": "tiny", "jit": True}),
    ("two replicas, for each", BERT, {"model": "tiny", "batch_size": 64, "replicas": 2}),
    ("BERT-mini", BERT, {"model": "mini"}),
    ("BERT-small", BERT, {"model": "small"}),
    ("BERT-base, 8 sequences", BERT, {"model": "base", "batch_size": 8}),
    ("GPT-2 of the size small, 16 sequences", CAUSAL, {"model": "small", "batch_size": 16}),
    ("the same, LoRA of rank 8", CAUSAL, {"model": "small", "batch_size": 16, "lora_rank": 8}),
)
WORKERS = {"a worker of two": True, "the same, freed memory not kept": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_text_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    rows = ROWS
    if arguments.quick:
        arguments.vocabulary_size = 500
        rows = tuple((name, recipe, own | {"model": "nano"}) for name, recipe, own in (ROWS[0], ROWS[-1]))
    with temporary_folder() as folder:
        text = prepare_text(arguments, COMMON["seq_length"], folder)
        results: dict[str, Any] = {"machine": machine(), "pieces": text["pieces"], "rows": {}, "workers": {}}
        bert = {"corpus": text["corpus"], "vocabulary": text["vocabulary"]}
        causal = {"corpus": text["corpus"], "vocabulary_size": min(arguments.vocabulary_size, 8192)}

        def options(recipe: str, own: dict[str, Any]) -> dict[str, Any]:
            given = COMMON | (bert if recipe == BERT else causal) | own
            if "lora_rank" in own:  # adapters need a preset, here of random weights
                given["preset"] = f"{folder}/preset"
                words = {name: value for name, value in given.items() if name in ("seq_length", "model", *causal)}
                once("benchmarks.ours_causal:writer", {"folder": folder} | words)
                del given["model"]
            return {"recipe": recipe} | given

        rest = {}
        for recipe in (BERT, CAUSAL):
            found = once("benchmarks.memory:peak", options(recipe, SMALLEST))
            rest[recipe] = found["peak_mb"] - found["state_mb"] - found["activations_mb"]
        for name, recipe, own in rows:
            found = once("benchmarks.memory:peak", options(recipe, own))
            results["rows"][name] = found | {"rest_mb": rest[recipe]}
            print(name, results["rows"][name], flush=True)
        for name, keep in WORKERS.items():
            with two_workers("benchmarks.memory:peak", options(BERT, rows[0][2]) | {"keep": keep}) as group:
                for worker in group:
                    worker.ask()
                results["workers"][name] = max((worker.answer() for worker in group), key=itemgetter("peak_mb"))
            results["workers"][name]["rest_mb"] = rest[BERT]
    print(table(results), flush=True)
    if not arguments.quick:
        write_results("memory", results)


def peak(recipe: str, batch_size: int, keep: bool = True, **options: Any) -> Callable[[], dict[str, float]]:
    """A function that trains a few steps of a recipe; it returns its process's peak, and a plan's figures.

    Args:
        recipe: `bert_mlm` or `causal_lm`.
        batch_size: sequences in a step, over the replicas of all workers; the plan's figures are for one replica.
        keep: whether a worker keeps freed memory.
        options: of the recipe.
    """
    import keras_replicas.strategy
    from common.run.plan import memory_of_a_replica

    if not keep:
        keras_replicas.strategy.keep_freed_memory = lambda: None

    def train() -> dict[str, float]:
        if recipe == BERT:
            from benchmarks import ours

            config = ours.configured(**options)
            strategy, model, batches = ours.set_up(config, batch_size, 1e-4)
            batch = next(iter(batches(0)()))
            ours.fit(model, strategy, batches, STEPS, [])
        else:
            from benchmarks import ours_causal

            strategy, model, batches = ours_causal.set_up(batch_size, **options)
            batch = next(iter(batches("train", 0)))
            ours_causal.fit(model, strategy, batches, STEPS, [])
        state, activations = memory_of_a_replica(model, batch)
        return {
            "peak_mb": peak_memory_mb(),
            "local_replicas": len(strategy.extended.worker_devices),
            "state_mb": state / 2**20,
            "activations_mb": activations / 2**20,
        }

    return train


def peak_memory_mb() -> int:
    """The most memory that this process has held, in MiB; on Linux."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) // 2**10


def table(results: dict[str, Any]) -> str:
    """The results in Markdown, per replica."""
    lines = [f"BERT's vocabulary has {results['pieces']:,} word pieces.", ""]
    lines += ["| | peak of the process | for the replica | predicted | error |", "| --- " * 5 + "|"]
    for name, row in (results["rows"] | results["workers"]).items():
        measured = (row["peak_mb"] - row["rest_mb"]) / row["local_replicas"]
        predicted = row["state_mb"] + row["activations_mb"]
        lines.append(
            f"| {name} | {row['peak_mb']:,} MiB | {measured:,.0f} MiB | {predicted:,.0f} MiB "
            f"| {predicted / measured - 1:+.0%} |"
        )
    return "\n".join(lines)
