# SPDX-License-Identifier: Apache-2.0
"""What a figure depends on: machine, packages, code."""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from keras_replicas import UserError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
CODE = ("keras_replicas", "common", "recipes")  # on which results depend
PACKAGES = ("tensorflow", "keras", "keras-hub", "tokenizers", "numpy", "torch", "transformers", "accelerate")
PACKAGES += ("tf2onnx", "onnxruntime", "ai-edge-litert")
FEATURES = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # that matmuls use


def machine(quick: bool = False) -> dict[str, Any]:
    """The machine, its peak speed of matrix products unless `quick`, the packages' versions, and the commit."""
    from benchmarks.workers import once  # which imports this module

    information = _read("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", information)
    flags = re.search(r"flags\s*: (.*)", information)
    installed = {distribution.name.lower().replace("_", "-") for distribution in importlib.metadata.distributions()}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "hardware": {
            "cpu": model[1] if model else platform.machine(),
            "cores": len(cores()),
            "features": [name for name in FEATURES if flags and name in flags[1].split()],
            "memory_gb": round(memory / 2**30),
        },
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES if name in installed},
        "commit": commit(),
    } | ({} if quick else {"tflops": once("benchmarks.machine:products", {})})


def commit() -> str:
    """The last commit that changed the code, with `+` where there are changes since that are not committed."""
    found = git("log", "-1", "--abbrev=12", "--format=%h", "--", *CODE)
    return found + ("+" if git("status", "--porcelain", "--", *CODE) else "")


def of_this_code(commit: str) -> bool:
    """Whether a commit's code is the last one's; false where git knows none such, as one with `+`."""
    words = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "HEAD", "--", *CODE]
    return not subprocess.run(words, stderr=subprocess.DEVNULL).returncode


def existing(word: str) -> str:
    """The name of an existing file or folder, or an empty one; for the type of an option."""
    if word and not Path(word).exists():
        raise argparse.ArgumentTypeError(f"no file or folder {word}")
    return word


def with_word(word: str, names: Iterable[str]) -> list[str]:
    """The names that contain a word, of `--only`.

    Raises:
        UserError: when none does.
    """
    chosen = [name for name in names if word in name]
    if not chosen:
        raise UserError(f"--only {word}: there are {'; '.join(names)}")
    return chosen


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def write_results(name: str, results: dict[str, Any]) -> None:
    """Writes `benchmarks/results/NAME.json`."""
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")


def unfinished_rows(name: str) -> list[dict[str, Any]]:
    """The rows of `benchmarks/results/NAME.jsonl.unfinished` that are of this code; the others leave the file."""
    path = RESULTS / f"{name}.jsonl.unfinished"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if of_this_code(json.loads(line)["commit"])]
    path.write_text("".join(kept))
    return [json.loads(line) for line in kept]


def add_row(name: str, row: dict[str, Any]) -> None:
    """Adds a row to `benchmarks/results/NAME.jsonl.unfinished`."""
    with (RESULTS / f"{name}.jsonl.unfinished").open("a") as file:
        file.write(json.dumps(row) + "\n")


def finish_rows(name: str) -> None:
    """Makes the rows, now that all are there, `benchmarks/results/NAME.jsonl`."""
    (RESULTS / f"{name}.jsonl.unfinished").replace(RESULTS / f"{name}.jsonl")


def code_of(rows: list[dict[str, Any]]) -> str:
    """The commits whose code made the rows, as the line below a table."""
    return f"Code of {' and '.join(sorted({row['commit'] for row in rows}))}."


def products() -> Callable[[], dict[str, float]]:
    """A function that multiplies squares of 2,048 numbers a side: the most TFLOP/s, by type of number."""
    import tensorflow as tf

    def measure() -> dict[str, float]:
        found = {}
        for kind in ("float32", "bfloat16"):
            square, seconds = tf.ones([2048, 2048], kind), math.inf
            for _ in range(20):
                began = time.perf_counter()
                float(tf.matmul(square, square)[0, 0])  # waits for a GPU
                seconds = min(seconds, time.perf_counter() - began)
            found[kind] = round(2 * 2048**3 / seconds / 1e12, 2)
        return found

    return measure


def peak_memory_mb() -> int:
    """The most memory that this process has held, in MiB; on Linux, where it starts over with each program."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) // 2**10


def git(*words: str, root: Path = ROOT) -> str:
    """Returns what a git command prints; an empty string where it fails or git is missing."""
    command = ["git", "-C", str(root), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
