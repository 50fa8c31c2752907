# SPDX-License-Identifier: Apache-2.0
"""All that we cannot measure without GPUs, in ten minutes at most: please send us `benchmarks/results/gpu.json`.

It is the doctor's verdict, tokens a second and memory of every recipe on one GPU and on all, of the first without TF32
too, and the time of an all-reduce by NCCL. What does not work is in it too, with the end of what it printed. Without a
GPU, logical devices of the CPU stand for them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, machine, write_results
from benchmarks.waits import RECIPES
from keras_replicas import UserError
from keras_replicas.gpus import gpu_names, visible_gpus

MINUTES = 10
NUMBERS = 25_000_000  # float32, of an all-reduce: 100 MB
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}  # to CUDA's libraries, see docs.nvidia.com/cuda/cublas
SHOWN = ("tokens_per_second", "peak_gpu_memory_mb", "peak_memory_mb", "train_loss")


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    ends = time.monotonic() + 60 * MINUTES
    seen = "import json, tensorflow; print(json.dumps({'gpus': len(tensorflow.config.list_physical_devices('GPU'))}))"
    if visible_gpus() and not output_of([sys.executable, "-c", seen], ends).get("gpus"):
        raise UserError("TensorFlow does not see this machine's GPUs: pip install -e '.[recipes,gpu]'")
    recipes = RECIPES[-1:] if arguments.quick else RECIPES
    options = ("nano", 4) if arguments.quick else ("small", 100)
    numbers, every = NUMBERS // (1000 if arguments.quick else 1), len(visible_gpus()) or 2
    results: dict[str, Any] = {
        "machine": machine(arguments.quick),
        "gpus": gpu_names(),
        "model": options[0],
        "runs": [],
    }
    doctor = [sys.executable, "-m", "keras_replicas", "doctor", "--json"]
    results["doctor"] = output_of(doctor, ends) if not arguments.quick else {}
    reduction = f"import json; from benchmarks.reducer import reducer; print(json.dumps(reducer()(20, {numbers})))"
    results["all-reduce"] = output_of([sys.executable, "-c", reduction], ends) | {"bytes": 4 * numbers}
    for recipe in recipes:
        for replicas in sorted({1, every}):
            for tf32 in (True, False) if results["gpus"] and recipe == RECIPES[0] else (True,):
                found = run(recipe, replicas, tf32, options, ends)
                results["runs"].append({"recipe": recipe, "replicas": replicas, "TF32": tf32} | found)
                print(results["runs"][-1], file=sys.stderr, flush=True)
    if not arguments.quick:
        write_results("gpu", results)
    print(json.dumps(results, indent=2))


def run(recipe: str, replicas: int, tf32: bool, options: tuple[str, int], ends: float) -> dict[str, Any]:
    """What a run of a recipe reports, or its failure."""
    with tempfile.TemporaryDirectory() as folder:
        words = zip(("--replicas", "--model", "--max-steps", "--workdir"), (replicas, *options, folder), strict=True)
        command = [sys.executable, "-m", "recipes", "run", recipe, *(str(word) for pair in words for word in pair)]
        failure = output_of(command, ends, {} if tf32 else NO_TF32)
        file = Path(folder, "results.json")
        found = failure | (json.loads(file.read_text()) if file.exists() else {})
        return {name: found[name] for name in (*SHOWN, "failed") if name in found}


def output_of(command: list[str], ends: float, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The JSON that a command prints, {} if it prints none, or its failure; it is stopped when the time ends."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | (environment or {}),
            capture_output=True,
            text=True,
            timeout=max(1, ends - time.monotonic()),
        )
    except subprocess.TimeoutExpired as stopped:
        said = (stopped.stderr or b"").decode(errors="replace")  # bytes, whatever `text` says
        return {"failed": f"stopped after {MINUTES} minutes in all: {said[-1000:]}"}
    if done.returncode and not done.stdout.startswith("{"):
        return {"failed": (done.stdout + done.stderr)[-1000:]}
    return json.loads(done.stdout) if done.stdout.startswith("{") else {}
