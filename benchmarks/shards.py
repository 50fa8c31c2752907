# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of shards, on a corpus and on ten copies of it: `python -m benchmarks.shards CORPUS`.

Prints, and writes to `benchmarks/results/shards.json`, tokens per second of writing (tokenising on all cores, and
TFRecords) and of reading and masking (the input pipeline of `bert_from_scratch` alone, one reader), and the peak memory
of each, including the processes that tokenise. Each figure comes from a process of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results/shards.json"
VOCABULARY_SIZE, SEQ_LENGTH, BATCH = 8192, 128, 32


def main(corpus: str) -> None:
    """Measures and writes the results."""
    results = {}
    for times in (1, 10):
        with tempfile.TemporaryDirectory() as folder:
            for architecture in ("bert", "roberta"):
                data = f"{folder}/{architecture}"
                for measure in ("write", "read"):
                    command = [
                        sys.executable,
                        "-m",
                        "benchmarks.shards",
                        measure,
                        corpus,
                        str(times),
                        architecture,
                        data,
                    ]
                    answer = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
                    results[f"{measure}, {architecture}, {times} x"] = json.loads(answer.splitlines()[-1])
                    print(f"{measure}, {architecture}, {times} x:", answer.splitlines()[-1], flush=True)
                shutil.rmtree(data)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def write(corpus: str, times: int, architecture: str, data: str) -> dict[str, float]:
    """Writes shards of a corpus that is repeated `times` times."""
    from common.data.byte_pairs import train_byte_pairs
    from common.data.shard_writer import write_shards
    from common.data.shards import open_shards
    from common.data.wordpiece import train_wordpieces

    from common.data.corpora import open_corpus

    train = open_corpus(corpus)["train"]
    vocabulary = {"bert": train_wordpieces, "roberta": train_byte_pairs}[architecture](train, VOCABULARY_SIZE)
    memory, began = PeakMemory(), time.perf_counter()
    repeated = {"train": lambda: (document for _ in range(times) for document in train())}
    write_shards(repeated, vocabulary, SEQ_LENGTH, 0, data, f"{data}/scratch", {})
    seconds = time.perf_counter() - began
    split = open_shards(data).manifest["splits"]["train"]
    return _figures(split["tokens"], seconds, memory.mb)


def read(corpus: str, times: int, architecture: str, data: str) -> dict[str, float]:
    """Reads and masks the shards once."""
    from common.data.shards import open_shards
    from common.data.stream import one_epoch

    from recipes.bert_from_scratch import Config, Scaled, masked_batches

    shards = open_shards(data)
    config = Config(seq_length=SEQ_LENGTH)
    batches = one_epoch(masked_batches(config, shards, "train", Scaled(BATCH, BATCH)), 1)
    memory, began, tokens = PeakMemory(), time.perf_counter(), 0
    for x, _, _ in batches:
        tokens += x["padding_mask"].shape[0] * SEQ_LENGTH
    return _figures(tokens, time.perf_counter() - began, memory.mb)


def _figures(tokens: int, seconds: float, peak: int) -> dict[str, float]:
    return {"tokens": tokens, "tokens_per_second": round(tokens / seconds), "peak_memory_mb": peak}


class PeakMemory(threading.Thread):
    """Watches the resident memory of this process and its children together, in MiB; on Linux."""

    def __init__(self):
        super().__init__(daemon=True)
        self.mb = 0
        self.start()

    def run(self):
        """Looks every 20 ms."""
        own = read_text(Path("/proc/self/cmdline"))
        while True:
            lists = [read_text(task / "children") for task in Path("/proc/self/task").iterdir()]
            processes = [Path("/proc") / process for process in " ".join(lists).split()]
            # A child that has not begun its program yet shares its parent's memory, and adds none.
            begun = [Path("/proc/self"), *(p for p in processes if read_text(p / "cmdline") != own)]
            pages = sum(int((read_text(process / "statm").split() or [0, 0])[1]) for process in begun)
            self.mb = max(self.mb, pages * os.sysconf("SC_PAGE_SIZE") // 2**20)
            time.sleep(0.02)


def read_text(path: Path) -> str:
    """A file's text; empty if its process is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
        measure, corpus, times, architecture, data = sys.argv[1:]
        print(json.dumps({"write": write, "read": read}[measure](corpus, int(times), architecture, data)))
