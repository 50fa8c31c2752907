# SPDX-License-Identifier: Apache-2.0
"""What 1, 2 and 4 replicas compute of each feature of Keras, against plain Keras on one device.

It runs all rows of `benchmarks/features.py`, and the programs of `benchmarks/published` that have a `train_step` or
`test_step` of their own.
"""

import argparse
import itertools
import json

from benchmarks.machine import machine, write_results

REPLICAS = (1, 2, 4)


def main(arguments: argparse.Namespace) -> None:
    """Runs all, prints the table, and writes the file."""
    from tests.conftest import divide_the_cpu

    divide_the_cpu()  # before its first use
    from benchmarks.features import ROWS, difference
    from benchmarks.published import PROGRAMS

    of = machine(quick=True)
    chosen = itertools.islice(ROWS, 3 if arguments.quick else None)
    rows: dict[str, dict] = {}
    for feature in chosen:
        rows[feature] = {replicas: difference(feature, replicas) for replicas in REPLICAS}
        print(feature, *rows[feature].values(), flush=True)
    programs = [name for name, program in PROGRAMS.items() if program.has_own_step]
    published = {name: published_row(name) for name in (programs[:2] if arguments.quick else programs)}
    found = {"rows": rows, "published": published, "machine": of}
    results = json.loads(json.dumps(found))  # with strings as keys
    print(table(results), published_table(results), sep="\n\n")
    if not arguments.quick:
        write_results("conformance", results)


def published_row(name: str) -> dict[int, dict]:
    """What a published program gives on each number of replicas: a difference or a refusal, and whether it warned."""
    from benchmarks.published import compare

    row = {}
    for replicas in REPLICAS:
        found = compare(name, replicas)
        row[replicas] = {
            "difference": found.difference,
            "refusal": found.refusal,
            "is_warned": bool(found.warnings),
        }
    print(name, *row.values(), flush=True)
    return row


def published_table(results: dict) -> str:
    """One line per published program with a `train_step`."""
    lines = [
        "| program | " + " | ".join(f"{n} replica{'s' * (n > 1)}" for n in REPLICAS) + " |",
        "| --- " * (1 + len(REPLICAS)) + "|",
    ]
    for name, row in results["published"].items():
        lines.append(f"| {name} | {' | '.join(map(published_cell, row.values()))} |")
    return "\n".join(lines)


def published_cell(found: dict) -> str:
    """The difference, unless a warning says that there is one, or "refused"."""
    if found["refusal"]:
        return "refused"
    return "warned" if found["is_warned"] else f"{found['difference']:.1e}"


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
