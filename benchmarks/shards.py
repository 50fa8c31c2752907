# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of shards, on a corpus and on ten copies of it: `python -m benchmarks.shards CORPUS`.

Prints, and writes to `benchmarks/results/shards.json`, tokens per second of writing (tokenising on all cores, and
TFRecords) and of reading and masking (the input pipeline of `bert_from_scratch` alone, one reader), and the peak memory
of each. Each figure comes from a process of its own.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import peak_memory_mb, write_results
from benchmarks.text import absolute, temporary_folder
from benchmarks.workers import once

VOCABULARY_SIZE, SEQ_LENGTH, BATCH = 8192, 128, 32


def main(corpus: str) -> None:
    """Measures and writes the results."""
    results = {}
    for times, architecture in itertools.product((1, 10), ("bert", "roberta")):
        with temporary_folder() as folder:
            words = {"corpus": absolute(corpus), "times": times, "architecture": architecture, "folder": folder}
            for measure in ("write", "read"):
                found = once(f"benchmarks.shards:{measure}r", words)
                results[f"{measure}, {architecture}, {times} x"] = found
                print(f"{measure}, {architecture}, {times} x:", found, flush=True)
    write_results("shards", results)


def writer(corpus: str, times: int, architecture: str, folder: str) -> Callable[[], dict[str, int]]:
    """A function that writes shards of a corpus that is repeated `times` times; see `benchmarks.workers`."""
    from common.data.byte_pairs import train_byte_pairs
    from common.data.corpora import open_corpus
    from common.data.rows import text_rows, write_rows
    from common.data.vocabulary import encode, train_wordpieces

    opened = open_corpus(corpus)
    train = opened.splits["train"]
    make = train_wordpieces if architecture == "bert" else train_byte_pairs
    tokenizer = make(train, opened.fingerprint, VOCABULARY_SIZE)

    def run() -> dict[str, int]:
        began = time.perf_counter()
        texts = itertools.chain.from_iterable(train() for _ in range(times))
        rows = text_rows(encode(texts, tokenizer), SEQ_LENGTH - 2, after=(tokenizer.end_token_id,))
        write_rows(Path(folder), {"train": rows}, SEQ_LENGTH - 2, tokenizer, {})
        return _figures(folder, time.perf_counter() - began)

    return run


def reader(corpus: str, times: int, architecture: str, folder: str) -> Callable[[], dict[str, int]]:
    """A function that reads and masks the shards once."""
    from common.data.row_folders import open_folder
    from common.log import one_epoch
    from recipes.bert_from_scratch import Config, masked_batches

    rows, tokenizer = open_folder(folder)
    batches = masked_batches(Config(), tokenizer, rows["train"], BATCH, training=True)

    def run() -> dict[str, int]:
        began = time.perf_counter()
        for _ in one_epoch(batches):
            pass
        return _figures(folder, time.perf_counter() - began)

    return run


def _figures(folder: str, seconds: float) -> dict[str, Any]:
    peak, tokens = peak_memory_mb(), json.loads(Path(folder, "manifest.json").read_text())["splits"]["train"]["tokens"]
    return {"tokens": tokens, "tokens_per_second": round(tokens / seconds), "peak_memory_mb": peak}


if __name__ == "__main__":
    main(sys.argv[1])
