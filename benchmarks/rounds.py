# SPDX-License-Identifier: Apache-2.0
"""Contenders that are timed in turn, round after round, so that a busy moment of the machine falls on all of them.

Each is in a process of its own; only one computes at a time.
"""

import argparse
import math
import statistics
import sys
from typing import Any

from benchmarks.workers import Worker, together

ROUNDS, SECONDS = 5, 8.0  # that every contender is timed, and of its steps in a round, about
PEER = "transformers"  # how the names of its contenders begin


def add_only_argument(parser: argparse.ArgumentParser) -> None:
    """The option for which contenders to time."""
    parser.add_argument("--only", default="", help="contenders whose name contains this; nothing is kept")


class Timed:
    """A contender, and the answers of its rounds.

    Args:
        function, arguments: see `workers.Worker`.
        seconds: how long a round should last, about.
    """

    def __init__(self, function: str, arguments: dict[str, Any], seconds: float):
        self.function, self.arguments, self.seconds = function, arguments, seconds
        self.answers, self.worker, self.steps = [], None, 0

    def __str__(self):
        return f"{self.function} {self.arguments}: {self.answers[-1]}"

    def round(self, workers: list[Worker], stays: bool) -> None:
        """Takes its turn; starts its process if there is none. The first time, a rehearsal sets the number of steps."""
        if self.worker is None:
            self.worker = Worker(self.function, self.arguments)
            workers.append(self.worker)
        if not self.steps:
            rehearsed = self.worker(steps=2)
            self.steps = max(3, math.ceil(self.seconds * rehearsed["steps"] / rehearsed["seconds"]))
        self.answers.append(self.worker(steps=self.steps))
        if not stays:
            self.worker.close()
            workers.remove(self.worker)
            self.worker = None

    def per_second(self, what: str) -> list[float]:
        """For each round, how many per second there were of something that its answers count."""
        return [round(answer[what] / answer["seconds"], 2) for answer in self.answers]


def take_rounds(contenders: list[Timed], rounds: int, title: str, stay: bool = True) -> None:
    """Times every contender in each round.

    Args:
        contenders: they keep what they measured.
        rounds: how many.
        title: of the lines that show the progress.
        stay: whether their processes stay from round to round; if not, only one is in memory at a time.
    """
    with together([]) as workers:
        for number in range(rounds):
            for each in contenders:
                each.round(workers, stay)
                print(f"{title}, round {number + 1}: {each}", file=sys.stderr, flush=True)


def speed_table(unit: str, speeds: dict[str, list[float]], **columns: dict[str, str]) -> str:
    """Speeds in Markdown: median and range over the rounds, and ratios of medians to the best of transformers.

    Args:
        unit: of the speeds, such as `tokens/s`.
        speeds: of each contender, in each round.
        columns: further ones, by title: the cell of each contender.
    """
    medians = {name: statistics.median(rounds) for name, rounds in speeds.items()}
    best = max((median for name, median in medians.items() if name.startswith(PEER)), default=math.nan)
    digits = 0 if max(medians.values(), default=0.0) >= 1000 else 1
    titles = ["contender", unit, "range", "vs. best of transformers", *(name.replace("_", " ") for name in columns)]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for name, rounds in speeds.items():
        low, median, high = (f"{speed:,.{digits}f}" for speed in (min(rounds), medians[name], max(rounds)))
        cells = [
            name,
            median,
            f"{low} to {high}",
            f"{medians[name] / best:.2f} x",
            *(c[name] for c in columns.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
