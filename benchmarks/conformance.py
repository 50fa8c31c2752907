# SPDX-License-Identifier: Apache-2.0
"""What 1, 2 and 4 replicas compute of each feature of Keras, against plain Keras on one device.

It runs all rows of `benchmarks/features.py`, and the programs of `benchmarks/published`. With `--check`, it gives
their models to `keras_replicas.check`, on two replicas, and writes `check.json`: what is equal must be found the same,
what is warned of, different, and what is refused, refused.
"""

import argparse
import collections
import functools
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.machine import ROOT, machine, with_word, write_results
from keras_replicas import UserError

REPLICAS = (1, 2, 4)
CHECKED_ON = 2  # replicas
PROGRAMS_OF_A_PROCESS = 8
# Models that train on replicas, but cannot predict there, as `check` does, too.
PREDICT_IS_REFUSED = ("outputs [batch x time, vocabulary], a loss that adds up", "vision/semantic_image_clustering")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--check", action="store_true", help="what keras_replicas.check finds of each")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="with --check: rows whose name has it; writes nothing"
    )


def main(arguments: argparse.Namespace) -> None:
    """Runs all, prints the table, and writes the file."""
    from tests.conftest import divide_the_cpu

    divide_the_cpu()  # before its first use
    if arguments.check:
        check_all(arguments)
        return
    from benchmarks.features import ROWS, difference
    from benchmarks.published import PROGRAMS

    of = machine(quick=True)
    chosen = itertools.islice(ROWS, 3 if arguments.quick else None)
    rows: dict[str, dict] = {}
    for feature in chosen:
        rows[feature] = {replicas: difference(feature, replicas) for replicas in REPLICAS}
        print(feature, *rows[feature].values(), flush=True)
    published = published_rows([*PROGRAMS][: 2 if arguments.quick else None])
    found = {"rows": rows, "published": published, "machine": of}
    results = json.loads(json.dumps(found))  # with strings as keys
    print(table(results), published_table(results), sep="\n\n")
    if not arguments.quick:
        write_results("conformance", results)


def published_rows(names: Sequence[str]) -> dict[str, dict]:
    """What each published program gives on each number of replicas: a difference or a refusal, and warnings.

    A few programs share a process, whose memory is free at its end: TensorFlow keeps the graphs of all.
    """
    rows: dict[str, dict] = {}
    for first in range(0, len(names), PROGRAMS_OF_A_PROCESS):
        replicas = [str(number) for number in REPLICAS]
        few = names[first : first + PROGRAMS_OF_A_PROCESS]
        command = [sys.executable, "-m", "benchmarks.published", *few, "--json", "--replicas", *replicas]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                rows |= json.loads(line)
        if process.returncode:
            raise SystemExit(f"error: {' '.join(command)} ended with status {process.returncode}")
    return rows


# What was tried.

OUTCOMES = {
    "equal": "are equal as published",
    "warned": "are warned of",
    "refused": "refused",
}


def outcome_of(found: dict) -> str:
    """A key of `OUTCOMES`."""
    if found["refusal"]:
        return "refused"
    return "warned" if found["warnings"] else "equal"


def published_table(results: dict) -> str:
    """One line per published program."""
    lines = [
        "| program | " + " | ".join(f"{n} replica{'s' * (n > 1)}" for n in REPLICAS) + " | why |",
        "| --- " * (2 + len(REPLICAS)) + "|",
    ]
    for name, row in results["published"].items():
        cells = [*map(published_cell, row.values()), reason_of(row[str(CHECKED_ON)])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def published_cell(found: dict) -> str:
    """The difference, unless a warning says that there is one, or "refused"."""
    outcome = outcome_of(found)
    return f"{found['difference']:.1e}" if outcome == "equal" else outcome


def reason_of(found: dict) -> str:
    """Why a program is refused or warned of: what the message begins with, without the advice."""
    if found["refusal"]:
        return found["refusal"].partition(": ")[0]
    if not found["warnings"]:
        return ""
    _, _, reasons = found["warnings"][0].partition(": ")
    return reasons.split("; ")[0].split(". ")[0]


def published_summary(results: dict) -> str:
    """How many programs are equal, warned of and refused on two replicas."""
    counts = collections.Counter(outcome_of(row[str(CHECKED_ON)]) for row in results["published"].values())
    parts = [f"{counts[outcome]} {text}" for outcome, text in OUTCOMES.items()]
    return (
        f"Of {counts.total()} programs published on keras.io, {', '.join(parts[:-1])} and {parts[-1]}: "
        "[what was tried](docs/exactness.md#what-was-tried)."
    )


# The check.


def check_all(arguments: argparse.Namespace) -> None:
    """Gives each row's model to `check`, and prints and writes what it finds."""
    of = machine(quick=True)
    models = models_to_check()
    chosen = with_word(arguments.only, models)
    rows = {name: checked(name, *models[name]) for name in itertools.islice(chosen, 3 if arguments.quick else None)}
    results = {"rows": rows, "machine": of}
    print(check_summary(results))
    if not (arguments.quick or arguments.only):
        write_results("check", results)


def models_to_check() -> dict[str, tuple[Callable, str]]:
    """By the name of a feature or program, a function that makes its model and data, and what `check` is to find."""
    from benchmarks.features import ROWS
    from benchmarks.published import PROGRAMS, model_and_data

    models: dict[str, tuple[Callable, str]] = {}
    for name, row in ROWS.items():
        is_refused = CHECKED_ON in row["refused"] or name in PREDICT_IS_REFUSED
        models[name] = (functools.partial(model_of_row, name), "refused" if is_refused else "same")
    expected = {"equal": "same", "warned": "different", "may be refused": "refused"}
    for name, program in PROGRAMS.items():
        finds = "refused" if name in PREDICT_IS_REFUSED else expected[program.expected]
        models[name] = (functools.partial(model_and_data, name), finds)
    return models


def model_of_row(name: str) -> tuple[Any, ...]:
    """The plain compiled model of a feature, and its data."""
    import keras

    from benchmarks.features import ROWS, batches, from_ragged, ragged_batches
    from keras_replicas import data_parallel

    row = ROWS[name]
    model = row["make"](keras.Model)
    options = {option: value() if callable(value) else value for option, value in row["options"].items()}
    if row["accumulate"] > 1:
        data_parallel(model, accumulate=row["accumulate"])
    model.compile(optimizer=row["optimizer"](), loss=row["loss"](), **options)
    if row["fit"] is from_ragged:
        return model, ragged_batches(*row["data"])
    if len(row["data"]) == 1:  # as a tuple of one tensor
        return model, batches(*row["data"])
    return model, *row["data"]


def checked(name: str, build: Callable, expected: str) -> dict[str, Any]:
    """What `check` finds of a model: "same", "different", "refused", "not checked", or the error."""
    from keras_replicas import check

    began = time.perf_counter()
    try:
        text = str(check(build, replicas=CHECKED_ON))
    except UserError as error:
        text = f"\nREFUSED\nwhy: {error}"
    except Exception as error:
        text = f"\nERROR\nwhy: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    words = {
        "\nTHE SAME": "same",
        "\nDIFFERENT": "different",
        "\nREFUSED": "refused",
        "\nFAILED": "failed",
        "\nNOT CHECKED": "not checked",
    }
    found = next((value for word, value in words.items() if word in text), "error")
    seconds = round(time.perf_counter() - began, 1)
    print(f"{name}: {found}, expected {expected}; {seconds} s", *([] if found == expected else [text]), flush=True)
    return {"found": found, "expected": expected, "text": text, "seconds": seconds}


def check_summary(results: dict) -> str:
    """How often `check` finds what is expected, and what it finds else."""
    rows = results["rows"]
    unlike = {name: row for name, row in rows.items() if row["found"] != row["expected"]}
    counts = collections.Counter(row["found"] for row in rows.values())
    found = ", ".join(f"{number} {what}" for what, number in counts.most_common())
    lines = [f"`check` finds what is expected of {len(rows) - len(unlike)} of {len(rows)} models: {found}."]
    if again := results.get("again"):
        lines.append(
            f"With the code named here, {len(again['rows'])} of them were not as expected, and were measured again "
            f"with the code of {again['commit']}: {again['why']}."
        )
    lines += [f"- {name}: {row['found']}, not {row['expected']}" for name, row in unlike.items()]
    return "\n".join(lines)


# The tables.


def table(results: dict) -> str:
    """One line per feature; for one that is refused, the message."""
    lines = [
        "| feature | " + " | ".join(f"{n} replica{'s' * (n > 1)}" for n in REPLICAS) + " |",
        "| --- " * (1 + len(REPLICAS)) + "|",
    ]
    for feature, found in results["rows"].items():
        cells = [f"{value:.1e}" if isinstance(value, float) else f"refused: {value}" for value in found.values()]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
