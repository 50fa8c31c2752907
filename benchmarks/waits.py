# SPDX-License-Identifier: Apache-2.0
"""What a user waits for: from Return to the first step, and from the last step to the prompt, of each recipe.

The first run finds nothing cached, the second what the first one cached. Seconds are also told in imports of
TensorFlow, Keras and KerasHub, measured on the same machine in the same round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.faults import steps_in
from benchmarks.goodput import IMPORT, seconds_of
from benchmarks.machine import ROOT, machine, with_word, write_results

ROUNDS, STEPS = 3, 20
PAUSE = 0.02  # seconds between two looks at a run
QUESTIONS = {  # by the recipe whose model answers
    "bert_mlm": ["fill-mask", "A [MASK] of ints."],
    "causal_lm": ["generate", "Returns the"],
    "text_classifier": ["classify", "A text.", "Another."],
}
RECIPES = ("bert_mlm", "bert_from_scratch", "causal_lm", "text_classifier", "glue_controller", "glue_custom_loop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--only", default="", help="recipes whose name contains this; nothing is kept")


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    chosen, of = with_word(arguments.only, RECIPES), machine(arguments.quick)
    imports: list[float] = []
    waits: dict[str, dict[str, list[float]]] = {}
    for _ in range(1 if arguments.quick else ROUNDS):
        imports.append(seconds_of([sys.executable, "-c", IMPORT]))
        for recipe in chosen:
            for name, seconds in waits_for(recipe).items():
                waits.setdefault(recipe, {}).setdefault(name, []).append(round(seconds, 2))
            print(recipe, waits[recipe], file=sys.stderr, flush=True)
    results = {
        "machine": of,
        "imports": [round(seconds, 2) for seconds in imports],
        "waits": waits,
    }
    if not arguments.quick and not arguments.only:
        write_results("waits", results)
    print(table(results))


def waits_for(recipe: str) -> dict[str, float]:
    """The seconds that a recipe's user waits, by what for."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
        first, _ = run(recipe, folder / "runs/first", environment)
        again, end = run(recipe, folder / "runs/again", environment)
        found = {"first step, nothing cached": first, "first step": again, "from the last step to the prompt": end}
        if question := QUESTIONS.get(recipe):
            began = time.monotonic()
            command = [sys.executable, "-m", "recipes", *question]
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
            found[question[0]] = time.monotonic() - began
    return found


def run(recipe: str, workdir: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Does a short run: the seconds until its first step was done, and from its last step to its end."""
    command = [sys.executable, "-m", "recipes", "run", recipe, "--max-steps", str(STEPS), "--workdir", str(workdir)]
    began, times = time.monotonic(), {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            times.setdefault(steps_in(workdir), time.monotonic())
            time.sleep(PAUSE)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {process.stderr.read().decode()}")
    done = [when for steps, when in times.items() if steps]
    return done[0] - began, time.monotonic() - done[-1]


def table(results: dict[str, Any]) -> str:
    """The results in Markdown: seconds, and how many imports they are."""
    imports = statistics.median(results["imports"])
    titles = list(dict.fromkeys(name for waits in results["waits"].values() for name in waits))
    lines = [f"| recipe | {' | '.join(titles)} |", "| --- " * (len(titles) + 1) + "|"]
    for recipe, waits in results["waits"].items():
        medians = {name: statistics.median(seconds) for name, seconds in waits.items()}
        cells = [f"{medians[t]:.1f} s, {medians[t] / imports:.1f} x" if t in medians else "" for t in titles]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"One import of TensorFlow, Keras and KerasHub took {imports:.1f} s."])
