# SPDX-License-Identifier: Apache-2.0
"""Peak memory of training, by the batch, the sequences' length, and the size of the corpus.

Each figure is of a process of its own (Linux: VmHWM, which begins anew with a program). Text is tokenised beforehand,
by another process.
"""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, write_results
from benchmarks.text import add_text_arguments, prepare_text, temporary_folder
from benchmarks.workers import once

BATCHES, LENGTHS, TIMES = (8, 16, 32, 64, 128), (64, 128, 256, 512), (1, 4, 16)
BATCH, LENGTH = 32, 128  # of what is not varied
STEPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_text_arguments(parser)
    parser.add_argument("--model", default="tiny", help="size")


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    batches, lengths, times = BATCHES, LENGTHS, TIMES
    if arguments.quick:
        arguments.model, arguments.vocabulary_size = "nano", 500
        batches, lengths, times = (8,), (64,), (1, 2)
    results: dict[str, Any] = {"machine": machine(), "model": arguments.model, "rows": []}
    own = {"model": arguments.model, "precision": "float32", "replicas": 1}

    def add(varied: str, text: dict[str, Any], batch: int, length: int, shards: str = "", **noted: Any) -> None:
        options = {
            "batch_size": batch,
            "seq_length": length,
            "corpus": text["corpus"],
            "vocabulary": text["vocabulary"],
        }
        peak = once("benchmarks.memory:peak", own | options | {"shards": shards})
        sizes = {"batch": batch, "length": length, "tokens": text["tokens"], "shards": bool(shards)}
        results["rows"].append({"varied": varied} | sizes | noted | peak)
        print(results["rows"][-1], flush=True)

    with temporary_folder() as folder:
        text = prepare_text(arguments, LENGTH, folder)
        results["pieces"] = text["pieces"]
        for batch in batches:
            add("batch", text, batch, LENGTH)
        for length in lengths:
            prepare_text(arguments, length, folder)  # so that it is in the cache
            add("length", text, BATCH, length)
        os.environ["XDG_CACHE_HOME"] = folder  # texts that nobody will want again
        for number in times:
            again = argparse.Namespace(**vars(arguments) | {"corpus": f"{folder}/{number}.txt"})
            again.vocabulary = text["vocabulary"]
            once("benchmarks.memory:repeater", {"corpus": text["corpus"], "times": number, "path": again.corpus})
            larger = prepare_text(again, LENGTH, folder)
            once("benchmarks.memory:sharder", {"length": LENGTH, "folder": f"{folder}/{number}"} | _words(larger))
            add("corpus", larger, BATCH, LENGTH)
            add("corpus", larger, BATCH, LENGTH, f"{folder}/{number}")
    print(table(results), flush=True)
    if not arguments.quick:
        write_results("memory", results)


def peak(shards: str, batch_size: int, **options: Any) -> Callable[[], dict[str, int]]:
    """Trains a few steps, on sequences in memory or from shards, and tells this process's peak."""
    from benchmarks import ours
    from recipes import bert_from_scratch

    def train() -> dict[str, int]:
        if shards:
            import functools

            scratch = {name: value for name, value in options.items() if name != "vocabulary"}
            config = bert_from_scratch.Config(**ours.AS_OTHERS | scratch, epochs=ours.FOR_EVER)
            written = bert_from_scratch.open_shards(shards)
            strategy = ours.make_strategy(1)
            with strategy.scope():
                model = bert_from_scratch.build_model(config, written.vocabulary, 1e-4)

            def batches(first_step: int):
                scaled = bert_from_scratch.Scaled(batch_size, batch_size)
                given = config, written, scaled, "train", first_step
                return functools.partial(bert_from_scratch.masked_batches, *given)
        else:
            config = ours.configured(**options)
            strategy, model, batches = ours.set_up(config, batch_size, 1e-4)
        ours.fit(model, strategy, batches, STEPS, [])
        return {"peak_mb": peak_memory_mb()}

    return train


def peak_memory_mb() -> int:
    """The most memory that this process has held, in MiB; on Linux."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) // 2**10


def repeater(corpus: str, times: int, path: str) -> Callable[[], dict]:
    """Writes a corpus's training text so many times to a file."""
    from common.data.corpora import open_corpus

    def write() -> dict:
        with Path(path).open("w", encoding="utf-8") as file:
            for _ in range(times):
                for document in open_corpus(corpus)["train"]():
                    file.write(document.replace("\n\n", "\n") + "\n\n")
        return {}

    return write


def sharder(corpus: str, vocabulary: str, length: int, folder: str) -> Callable[[], dict]:
    """Writes a corpus's shards."""
    from common.data.corpora import open_corpus
    from common.data.shard_writer import write_shards
    from common.data.wordpiece import load_wordpieces

    def write() -> dict:
        write_shards(open_corpus(corpus), load_wordpieces(vocabulary), length, 0, folder, f"{folder}/scratch", {})
        return {}

    return write


def _words(text: dict[str, Any]) -> dict[str, str]:
    return {name: text[name] for name in ("corpus", "vocabulary")}


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| sequences in a step | tokens in a sequence | tokens in the corpus | peak memory |", "| --- " * 4 + "|"]
    for row in results["rows"]:
        where = ", in shards" if row["shards"] else ""
        lines.append(f"| {row['batch']} | {row['length']} | {row['tokens']:,}{where} | {row['peak_mb']:,} MiB |")
    return "\n".join(lines)
