# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of the checked-out code, "after", with that of another commit, "before".

Each recipe trains on two replicas, one process at a time, with copies of both sides' files and the
packages of this environment. A row is how many times as fast as before the checked-out code is: the
median of the rounds' ratios, and its 95 % interval. A row whose whole interval lies below 0.97 is
slower, and the exit status is then 1. It takes about 40 minutes on two cores, and writes no file.
"""

import argparse
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import CODE, ROOT, git, with_word
from benchmarks.waits import RECIPES, time_run
from keras_replicas import UserError

ROUNDS, STEPS = 10, 100
LEAST_ROUNDS = 6  # that a 95 % interval needs
REHEARSAL_STEPS = 2  # of a run that fills the caches, and is not counted
CONFIDENCE = 0.95
SLOWER = 0.97  # a row is slower if the whole interval of its ratio lies below
BEFORE, AFTER = "before", "after"
TRAINING, FIRST_STEP = "training", "first step"
ROWS = [f"{recipe}, {measure}" for recipe in RECIPES for measure in (TRAINING, FIRST_STEP)]
# Starts `python -m recipes` in a folder, and fails where its modules come from elsewhere, as from
# the editable install of this environment.
START = """
import pathlib, runpy, sys
import common, keras_replicas, recipes

folder = sys.argv.pop(1)
for module in (common, keras_replicas, recipes):
    found = pathlib.Path(module.__file__).resolve()
    if found.parent.parent != pathlib.Path(folder):
        sys.exit(f"{module.__name__} is {found}, not in {folder}")
runpy.run_module("recipes", run_name="__main__", alter_sys=True)
"""


class Plan(NamedTuple):
    """How many rounds there are, and the steps and other options of each run."""

    rounds: int
    steps: int
    options: tuple[str, ...]


class Pair(NamedTuple):
    """What was measured of a row in one round: steps per second, or seconds to the first step."""

    before: float
    after: float


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


class Speedup(NamedTuple):
    """How many times as fast as before a row is: the median over the rounds, and its interval."""

    median: float
    interval: Interval

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval lies below `SLOWER`."""
        return self.interval.high < SLOWER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("before", metavar="BEFORE", help="the other commit: a hash, branch or tag")
    of_rounds = f"at least {LEAST_ROUNDS}; {ROUNDS} by default"
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=of_rounds)
    parser.add_argument("--only", default="", help="rows whose name contains this")


def main(arguments: argparse.Namespace) -> None:
    """Measures and prints the table; exits with status 1 if a row is slower."""
    rows = with_word(arguments.only, ROWS)
    if arguments.rounds < LEAST_ROUNDS:
        raise UserError(f"--rounds {arguments.rounds}: give at least {LEAST_ROUNDS}")
    before = resolve_commit(ROOT, arguments.before)
    after = resolve_commit(ROOT, "HEAD")
    changed = git("status", "--porcelain", "--", *CODE)
    plan = Plan(rounds=arguments.rounds, steps=STEPS, options=("--replicas", "2"))
    if arguments.quick:
        plan = Plan(rounds=1, steps=10, options=("--replicas", "2", "--model", "nano"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_commit(ROOT, before, folder / BEFORE)
        copy_working_tree(ROOT, folder / AFTER)
        pairs = measure(rows, plan, folder)
    speedups = {row: speedup_of(row, pairs[row]) for row in rows}
    print(table(pairs, speedups))
    and_changes = " with changes that are not committed" if changed else ""
    print(f"\nBefore: {before[:12]}. After: {after[:12]}{and_changes}.")
    slower = [row for row in rows if speedups[row].is_slower]
    if slower:
        print(f"Slower than before: {'; '.join(slower)}.")
        raise SystemExit(1)
    print("No row is slower.")


def resolve_commit(root: Path, name: str) -> str:
    """Returns the full hash of a commit of the clone at `root`.

    Raises:
        UserError: when `root` is no clone, or has no such commit.
    """
    clone = git("rev-parse", "--show-toplevel", root=root)
    if not clone or Path(clone).resolve() != root.resolve():
        raise UserError(f"{root} is not a git clone: run this in a clone of the project")
    found = git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", root=root)
    if not found:
        raise UserError(f"there is no commit {name}: `git log` shows those of this clone")
    return found


def copy_commit(root: Path, commit: str, folder: Path) -> None:
    """Writes the files of a commit of the clone at `root` to a folder."""
    command = ["git", "-C", str(root), "archive", "--format=zip", commit]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)


def copy_working_tree(root: Path, folder: Path) -> None:
    """Copies the files of a clone as they are now, without those that git ignores, to a folder."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", root=root)
    for name in names.split("\0"):
        source = root / name
        if source.is_file():  # not deleted
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def measure(rows: Sequence[str], plan: Plan, folder: Path) -> dict[str, list[Pair]]:
    """Runs the recipes of the rows on both sides in turn.

    Args:
        rows: some of `ROWS`.
        plan: of the runs.
        folder: has the files of both sides, in the folders `BEFORE` and `AFTER`.

    Returns:
        For each row, the measurements of each round.
    """
    recipes = list(dict.fromkeys(row.split(", ")[0] for row in rows))
    pairs: dict[str, list[Pair]] = {row: [] for row in rows}
    for recipe in recipes:
        for side in (BEFORE, AFTER):
            run(recipe, plan._replace(steps=REHEARSAL_STEPS), folder / side)
    for number in range(plan.rounds):
        for recipe in recipes:
            found = {side: run(recipe, plan, folder / side) for side in turns(number)}
            for measured in (TRAINING, FIRST_STEP):
                row = f"{recipe}, {measured}"
                if row not in pairs:
                    continue
                pair = Pair(found[BEFORE][measured], found[AFTER][measured])
                pairs[row].append(pair)
                print(f"round {number + 1}: {row}: {pair}", file=sys.stderr, flush=True)
    return pairs


def turns(number: int) -> tuple[str, str]:
    """Returns the order of the sides in a round: the one that was last is first in the next."""
    return (AFTER, BEFORE) if number % 2 else (BEFORE, AFTER)


def run(recipe: str, plan: Plan, code: Path) -> dict[str, float]:
    """Runs a recipe with the code of one side.

    The time of training is the one that the run writes to `results.json`, which leaves out the
    first step, evaluation and checkpoints. The time to the first step is from the start of the
    process to the first line of `steps.jsonl`.

    Returns:
        `TRAINING`, in steps per second, and `FIRST_STEP`, in seconds.
    """
    cache = code.with_name(f"{code.name}-cache")
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(code)}
    command = [sys.executable, "-c", START, str(code), "run", recipe, *plan.options]
    command += ["--max-steps", str(plan.steps)]
    with tempfile.TemporaryDirectory(dir=code.parent) as name:
        workdir = Path(name, "run")
        times = time_run(command, workdir, environment, cwd=code)
        results = json.loads((workdir / "results.json").read_text())
    timed_steps = results["steps"] - 1
    return {TRAINING: timed_steps / results["seconds"], FIRST_STEP: times.first_step}


def speedup_of(row: str, pairs: Sequence[Pair]) -> Speedup:
    """Returns how many times as fast as before a row is."""
    if row.endswith(FIRST_STEP):  # seconds: fewer are faster
        ratios = [pair.before / pair.after for pair in pairs]
    else:
        ratios = [pair.after / pair.before for pair in pairs]
    return Speedup(statistics.median(ratios), median_interval(ratios))


def median_interval(values: Sequence[float]) -> Interval:
    """Returns a 95 % confidence interval for the median of what the values are a sample of.

    It reaches from the k-th smallest to the k-th largest value. k is the largest number for which
    fewer than k of n values lie below the median with a probability of at most 2.5 %, by the
    binomial distribution: of 10 values, the interval is from the second smallest to the second
    largest. It assumes no distribution. Of fewer than 6 values, it is infinite.

    Source: H. A. David and H. N. Nagaraja, Order Statistics, third edition, 2003, section 7.1.
    """
    count = len(values)
    rank = 0
    probability = 1 / 2**count  # that at most `rank` values lie below the median
    while probability <= (1 - CONFIDENCE) / 2:
        rank += 1
        probability += math.comb(count, rank) / 2**count
    if rank == 0:
        return Interval(-math.inf, math.inf)
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[count - rank])


def table(pairs: dict[str, list[Pair]], speedups: dict[str, Speedup]) -> str:
    """Returns the medians of both sides and the speedups in Markdown."""
    titles = ["row", "before", "after", "times as fast", "95 % interval", ""]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for row, speedup in speedups.items():
        unit = "s" if row.endswith(FIRST_STEP) else "steps/s"
        before = statistics.median(pair.before for pair in pairs[row])
        after = statistics.median(pair.after for pair in pairs[row])
        low, high = speedup.interval
        cells = [
            row,
            f"{before:.2f} {unit}",
            f"{after:.2f} {unit}",
            f"{speedup.median:.2f} x",
            f"{low:.2f} to {high:.2f}" if math.isfinite(high) else "too few rounds",
            "slower" if speedup.is_slower else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
