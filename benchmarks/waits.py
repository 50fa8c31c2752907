# SPDX-License-Identifier: Apache-2.0
"""Measures what a user waits for, in two tables.

`waits` is of the recipes: from Return to the first step, and from the last step to the prompt. The
first run finds nothing cached, the second what the first one cached. Seconds are also given in
imports of TensorFlow, Keras and KerasHub, measured on the same machine in the same round.

`first_steps` is of kinds of models: see `benchmarks/first_steps.py`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import first_steps
from benchmarks.faults import steps_in
from benchmarks.goodput import IMPORT, seconds_of
from benchmarks.machine import RESULTS, ROOT, machine, with_word, write_results

ROUNDS, STEPS = 3, 20
PAUSE = 0.02  # seconds between two looks at a run
QUESTIONS = {  # by the recipe whose model answers
    "bert_mlm": ["fill-mask", "A [MASK] of ints."],
    "causal_lm": ["generate", "Returns the"],
    "text_classifier": ["classify", "A text.", "Another."],
}
RECIPES = (
    "bert_mlm",
    "bert_from_scratch",
    "causal_lm",
    "text_classifier",
    "glue_controller",
    "glue_custom_loop",
)
TABLES = {"waits": RECIPES, "first_steps": first_steps.MODELS}


class RunTimes(NamedTuple):
    """Seconds of a run: to the end of its first step, and from its last step to its end."""

    first_step: float
    end: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    of_table = "measure this table alone, and leave the other as it is"
    parser.add_argument("--table", choices=TABLES, help=of_table)
    of_only = "recipes and models whose name contains this; nothing is kept"
    parser.add_argument("--only", default="", help=of_only)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    names = TABLES[arguments.table] if arguments.table else (*RECIPES, *first_steps.MODELS)
    chosen = with_word(arguments.only, names)
    recipes = [name for name in chosen if name in RECIPES]
    models = [name for name in chosen if name in first_steps.MODELS]
    if arguments.quick and not arguments.only:
        models = models[:1]
    rounds = 1 if arguments.quick else ROUNDS
    measured_on = machine(arguments.quick)
    results: dict[str, Any] = {}
    if recipes:
        results = {"machine": measured_on} | measure_recipes(recipes, rounds)
        print(table(results), flush=True)
    if models:
        seconds = first_steps.measure(models, rounds)
        results["first_steps"] = {"machine": measured_on, "seconds": seconds}
        print(first_steps.table(results["first_steps"]), flush=True)
    if not arguments.quick and not arguments.only:
        kept = json.loads((RESULTS / "waits.json").read_text())
        write_results("waits", kept | results)


def measure_recipes(recipes: list[str], rounds: int) -> dict[str, Any]:
    """Returns the seconds of each round: of the imports, and of each recipe's waits."""
    imports: list[float] = []
    waits: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        imports.append(round(seconds_of([sys.executable, "-c", IMPORT]), 2))
        for recipe in recipes:
            for name, seconds in waits_for(recipe).items():
                waits.setdefault(recipe, {}).setdefault(name, []).append(round(seconds, 2))
            print(recipe, waits[recipe], file=sys.stderr, flush=True)
    return {"imports": imports, "waits": waits}


def waits_for(recipe: str) -> dict[str, float]:
    """Returns the seconds that a recipe's user waits, by what for."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = folder / "cache"
        environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "recipes", "run", recipe, "--max-steps", str(STEPS)]
        first = time_run(command, folder / "runs/first", environment)
        again = time_run(command, folder / "runs/again", environment)
        found = {
            "first step, nothing cached": first.first_step,
            "first step": again.first_step,
            "from the last step to the prompt": again.end,
        }
        if question := QUESTIONS.get(recipe):
            began = time.monotonic()
            command = [sys.executable, "-m", "recipes", *question]
            subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
            found[question[0]] = time.monotonic() - began
    return found


def time_run(
    command: list[str],
    workdir: Path,
    environment: dict[str, str],
    cwd: Path = ROOT,
) -> RunTimes:
    """Does a run of a recipe, and times it from outside, by the lines of its `steps.jsonl`.

    Args:
        command: without `--workdir`.
        workdir: folder that the run makes.
        environment: all variables of the process.
        cwd: folder in which it starts.

    Raises:
        RuntimeError: when the run fails, with the end of its log.
    """
    command = [*command, "--workdir", str(workdir)]
    times: dict[int, float] = {}  # by the number of steps done, when that was first seen
    began = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=log,
        ) as process,
    ):
        try:
            while process.poll() is None:
                times.setdefault(steps_in(workdir), time.monotonic())
                time.sleep(PAUSE)
        finally:
            process.kill()  # after Ctrl-C; a process that has ended is left alone
            process.wait()
        ended = time.monotonic()
        if process.returncode:
            log.seek(0)
            words = " ".join(command)
            raise RuntimeError(f"{words} ended with {process.returncode}: {log.read()[-3000:]}")
    done = [when for steps, when in times.items() if steps]
    return RunTimes(first_step=done[0] - began, end=ended - done[-1])


def table(results: dict[str, Any]) -> str:
    """Returns the recipes' results in Markdown: seconds, and how many imports they are."""
    imports = statistics.median(results["imports"])
    titles: list[str] = []
    for waits in results["waits"].values():
        titles += [name for name in waits if name not in titles]
    lines = [f"| recipe | {' | '.join(titles)} |", "| --- " * (len(titles) + 1) + "|"]
    for recipe, waits in results["waits"].items():
        cells = dict.fromkeys(titles, "")
        for name, rounds in waits.items():
            seconds = statistics.median(rounds)
            cells[name] = f"{seconds:.1f} s, {seconds / imports:.1f} x"
        lines.append(f"| `{recipe}` | {' | '.join(cells.values())} |")
    lines += ["", f"One import of TensorFlow, Keras and KerasHub took {imports:.1f} s."]
    return "\n".join(lines)
