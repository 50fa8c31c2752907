# SPDX-License-Identifier: Apache-2.0
"""Training speed of every recipe beside its peer, transformers with Accelerate, each at its best, in one run.

Models of the same size with the same batch and dropout, on the same text; the peer also in bfloat16, compiled, and
grouping by length, where that is its own option. Of both sides the fastest contender counts, by its median.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks import causal, fine_tuning, throughput
from benchmarks.machine import existing, machine, write_results
from benchmarks.rounds import PEER, Timed, add_round_arguments, take_rounds
from benchmarks.text import add_text_arguments, prepare_text, temporary_folder
from benchmarks.workers import once

BATCH, SIZE = 32, "tiny"
COMPILED = {"compiler": "inductor"}
OURS = (  # one line per contender: its name, and its own options
    ("fit, one device", {"replicas": 1}),
    ("fit, one device, jit", {"replicas": 1, "jit": True}),
    ("fit, one device, bfloat16", {"replicas": 1, "precision": "mixed_bfloat16"}),
    ("fit, 2 replicas", {"replicas": 2}),
    ("fit, 2 replicas, bfloat16", {"replicas": 2, "precision": "mixed_bfloat16"}),
)
PEERS = (
    ("transformers", {}),
    ("transformers, bfloat16", {"precision": "bf16"}),
    ("transformers, compiled", COMPILED),
    ("transformers, bfloat16, compiled", COMPILED | {"precision": "bf16"}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_text_arguments(parser)
    parser.add_argument("--preset", type=existing, required=True, help="weights to fine-tune, in Hugging Face's format")
    parser.add_argument("--mrpc", type=existing, required=True, help="folder in GLUE's format")
    parser.add_argument("--dropout", type=float, default=0.1, help="of every language model")
    add_round_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    size = SIZE
    if arguments.quick:
        size, arguments.rounds, arguments.seconds, arguments.vocabulary_size = "nano", 1, 0.0, 500
    results: dict[str, Any] = {
        "machine": machine(arguments.quick),
        "size": size,
        "corpus": Path(arguments.corpus).name,
        "recipes": {},
    }
    with temporary_folder() as folder:
        groups = language_models(arguments, size, folder)
        words = {"preset": arguments.preset, "task": "mrpc", "data": arguments.mrpc}
        words |= {"batch_size": fine_tuning.BATCH, "rate": fine_tuning.RATE}
        sides: dict[bool, list[tuple]] = {True: [], False: []}
        for name, module, own in fine_tuning.CONTENDERS:
            sides[name.startswith(PEER)].append((name, f"{module}:trainer", words | own))
        groups.append(("examples", {"text_classifier": sides[False]}, sides[True]))
        for unit, ours, theirs in groups:
            timed = {
                (recipe, name): Timed(function, words, arguments.seconds)
                for recipe, contenders in (ours | {PEER: theirs}).items()
                for name, function, words in contenders
                if arguments.only in name
            }
            take_rounds(list(timed.values()), arguments.rounds, ", ".join(ours))
            for recipe in ours:
                speeds = {name: each.per_second(unit) for (of, name), each in timed.items() if of in (recipe, PEER)}
                results["recipes"][recipe] = {"unit": f"{unit}/s", "speeds": speeds}
            if not arguments.only:
                print(table(results), "\n", flush=True)
    if not arguments.quick and not arguments.only:
        write_results("peers", results)


def language_models(
    arguments: argparse.Namespace, size: str, folder: str
) -> list[tuple[str, dict[str, list[tuple]], list[tuple]]]:
    """What is timed together: the unit, each recipe's contenders (name, function, arguments), and the peer's."""
    Path(folder, "bert").mkdir()
    text = prepare_text(arguments, throughput.SEQ_LENGTH, f"{folder}/bert")
    corpus, length = {"corpus": text["corpus"]}, {"seq_length": throughput.SEQ_LENGTH}
    byte_pairs = {"vocabulary_size": min(arguments.vocabulary_size, 8192)}
    once("benchmarks.text:gpt2_writer", {"folder": folder, "model": size} | corpus | length | byte_pairs)
    common = {"dropout": arguments.dropout, "batch_size": BATCH}
    ours = common | corpus | length | {"model": size}
    bert = ours | {"mask_rate": throughput.MASK_RATE}
    own = {
        "bert_mlm": bert | {"vocabulary": text["vocabulary"]},
        "bert_from_scratch": bert | {"vocabulary_size": text["pieces"], "data": f"{folder}/shards"},
        "causal_lm": ours | byte_pairs,
    }
    contenders = {
        recipe: [(name, throughput.OURS, {"recipe": recipe} | words | way) for name, way in OURS]
        for recipe, words in own.items()
    }
    peers = {
        function: [(name, function, common | {"model": size, "folder": where} | way) for name, way in PEERS]
        for function, where in ((throughput.PEERS, f"{folder}/bert"), (causal.PEERS, folder))
    }
    gpt2 = {"causal_lm": contenders.pop("causal_lm")}
    return [("tokens", contenders, peers[throughput.PEERS]), ("tokens", gpt2, peers[causal.PEERS])]


def table(results: dict[str, Any]) -> str:
    """In Markdown: the fastest contender of each side by its median, and the range of the rounds' ratios."""
    lines = ["| recipe | ours, at its best | the peer, at its best | ratio | range |", "| --- " * 5 + "|"]
    for recipe, found in results["recipes"].items():
        sides = {name: found["speeds"][name] for name in fastest(found["speeds"])}
        medians = [statistics.median(rounds) for rounds in sides.values()]
        ratios = [a / b for a, b in zip(*sides.values(), strict=True)]
        cells = [f"{median:,.0f} {found['unit']}: {name}" for name, median in zip(sides, medians, strict=True)]
        lines.append(
            f"| `{recipe}` | {' | '.join(cells)} | {medians[0] / medians[1]:.2f} x "
            f"| {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    return "\n".join(lines)


def fastest(speeds: dict[str, list[float]]) -> tuple[str, str]:
    """The names of our fastest contender and of the peer's, by the medians of their rounds."""
    ours, theirs = (
        max((n for n in speeds if n.startswith(PEER) == peer), key=lambda name: statistics.median(speeds[name]))
        for peer in (False, True)
    )
    return ours, theirs
