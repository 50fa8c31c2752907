# SPDX-License-Identifier: Apache-2.0
"""Writes the README's tables from the files in `benchmarks/results/`: `python -m benchmarks.readme`."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def parity_table(doctor: dict) -> str:
    """What `python -m recipes doctor --json` measured, a line a check."""
    checks: dict[str, dict[str, str]] = {}
    bounds = {}
    for row in doctor["checks"]:
        checks.setdefault(row["check"], {})[row["measure"]] = f"{row['measured']:.1e}"
        bounds[row["measure"]] = row["bound"]
    measures = list(bounds)[:4]  # of the ways to compute the same; other checks have one of their own
    lines = [
        "| against one device | "
        + " | ".join(f"{measure} (bound {bounds[measure]:.0e})" for measure in measures)
        + " |",
        "| --- " * (1 + len(measures)) + "|",
        *(
            f"| {check} | " + " | ".join(found.values()) + " |"
            for check, found in checks.items()
            if measures[0] in found
        ),
        "",
        "| check | measured | bound |",
        "| --- | --- | --- |",
        *(
            f"| {check}: {measure} | {value} | {bounds[measure]:.0e} |"
            for check, found in checks.items()
            for measure, value in found.items()
            if measure not in measures
        ),
    ]
    return "\n".join(lines)


def with_tables(readme: str) -> str:
    """The README with its tables as the results have them, each between `<!-- name -->` and `<!-- end -->`."""
    tables = {"doctor": parity_table(json.loads((RESULTS / "doctor.json").read_text()))}
    for name, table in tables.items():
        readme = re.sub(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", rf"\g<1>{table}\g<2>", readme, flags=re.DOTALL)
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
