# SPDX-License-Identifier: Apache-2.0
"""What a kill a minute costs: two workers that lose one at random, again and again, and a run that loses none.

Both runs are of `bert_mlm` with a checkpoint every 25 steps, do as many steps, and must end with the same bits.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.faults import children, same_bits, steps_in, until, weights_of
from benchmarks.machine import ROOT, machine, write_results

OPTIONS = ("--epochs", "1000", "--checkpoint-every", "25")
TO_CALIBRATE = 300  # steps
MINUTES, EVERY = 10.0, 60.0  # of the run that loses no worker; seconds to the next SIGKILL, on average
PAUSE = 0.05  # seconds between two looks at a run
IMPORT = "import tensorflow, keras, keras_hub"


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    minutes, every = (0.3, 20.0) if arguments.quick else (MINUTES, EVERY)
    of = machine(arguments.quick)
    imports = statistics.median(seconds_of([sys.executable, "-c", IMPORT]) for _ in range(3))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(folder / "calibration", TO_CALIBRATE)
        found = json.loads((folder / "calibration/results.json").read_text())
        steps = round(60 * minutes * found["steps"] / found["seconds"])
        undisturbed, _ = run(folder / "undisturbed", steps)
        disturbed, kills = run(folder / "disturbed", steps, random.Random(1), every)
        runs = folder / "undisturbed", folder / "disturbed"
        lines, others = ((run / "steps.jsonl").read_text().splitlines() for run in runs)
        results = {
            "machine": of,
            "steps": steps,
            "import_seconds": round(imports, 1),
            "undisturbed_seconds": round(undisturbed),
            "disturbed_seconds": round(disturbed),
            "goodput": round(undisturbed / disturbed, 3),
            "kills": kills,
            "steps_that_differ": sum(line != other for line, other in zip(lines, others, strict=True)),
            "identical": same_bits(*map(weights_of, runs)),
        }
    print(tables(results))
    if results["steps_that_differ"] or not results["identical"]:
        raise SystemExit(1)
    if not arguments.quick:
        write_results("goodput", results)


def run(workdir: Path, steps: int, chance: random.Random | None = None, every: float = 0.0) -> tuple[float, list[dict]]:
    """Does a run whose workers are killed by `chance`, if that is given: its seconds, and its kills.

    A kill has the last `step` that was done before, the `worker`, and the seconds until that step was `reached` again.
    """
    words = ["launch", "--workers", "2", "--max-restarts", "1000", "--log-dir", f"{workdir}-logs", "bert_mlm", *OPTIONS]
    command = [sys.executable, "-m", "recipes", *words, "--max-steps", str(steps), "--workdir", str(workdir)]
    kills: list[dict[str, Any]] = []
    began = time.monotonic()
    due = began + chance.expovariate(1 / every) if chance else float("inf")
    with (
        Path(f"{workdir}.log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as launcher,
    ):
        while launcher.poll() is None:
            time.sleep(PAUSE)
            now, done = time.monotonic(), steps_in(workdir)
            for kill in kills:
                if kill["reached"] is None and done > kill["step"]:
                    kill["reached"] = round(now - kill["at"], 1)
            if chance and now >= due:
                due = now + chance.expovariate(1 / every)
                workers = children(launcher.pid)
                if len(workers) == 2:  # else they are being started
                    worker = chance.randrange(2)
                    os.kill(workers[worker], signal.SIGKILL)
                    until(lambda gone=workers: not any(Path(f"/proc/{each}").exists() for each in gone))
                    kills.append({"at": now, "step": steps_in(workdir), "worker": worker, "reached": None})
    if launcher.returncode:
        raise RuntimeError(f"the run ended with {launcher.returncode}: {Path(f'{workdir}.log').read_text()[-2000:]}")
    for kill in kills:
        kill["at"] = round(kill["at"] - began, 1)
    return time.monotonic() - began, kills


def seconds_of(command: list[str]) -> float:
    """How long a command takes."""
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - began


def tables(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    reached = [kill["reached"] for kill in results["kills"] if kill["reached"] is not None]
    rows = {
        "steps, on two workers": f"{results['steps']:,}",
        "without a kill": f"{results['undisturbed_seconds']:,} s",
        f"with {len(results['kills'])} kills": f"{results['disturbed_seconds']:,} s",
        "goodput, the share of time that was productive": f"{results['goodput']:.3f}",
        "from a kill until its step was reached again": f"median {statistics.median(reached or [0]):.1f} s",
        "the import of TensorFlow, Keras and KerasHub": f"{results['import_seconds']} s",
        "steps whose line differs": str(results["steps_that_differ"]),
        "weights": "identical to the bit" if results["identical"] else "different",
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
