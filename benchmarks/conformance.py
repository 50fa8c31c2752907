# SPDX-License-Identifier: Apache-2.0
"""What 1, 2 and 4 replicas compute of each feature of Keras, against plain Keras on one device.

It runs all rows of `benchmarks/features.py`.
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

    of = machine(quick=True)
    chosen = itertools.islice(ROWS, 3 if arguments.quick else None)
    rows: dict[str, dict] = {}
    for feature in chosen:
        rows[feature] = {replicas: difference(feature, replicas) for replicas in REPLICAS}
        print(feature, *rows[feature].values(), flush=True)
    results = json.loads(json.dumps({"rows": rows, "machine": of}))  # with strings as keys
    print(table(results))
    if not arguments.quick:
        write_results("conformance", results)


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
