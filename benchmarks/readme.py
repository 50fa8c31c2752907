# SPDX-License-Identifier: Apache-2.0
"""Writes the README's tables from the files in `benchmarks/results/`: `python -m benchmarks.readme`."""

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import benchmarks.input
from benchmarks import memory, quality, scaling, throughput
from common.results import report

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


def faults_table(rows: list[dict]) -> str:
    """What `python -m benchmarks.faults` saw, a line a fault."""
    lines = [
        "| fault | runs | same to the bit | steps done again | all ended after | left behind |",
        "| --- " * 6 + "|",
    ]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        runs = [row for row in rows if row["fault"] == fault]
        again = [row["at_step"] - row["went_on_from"] for row in runs]
        seconds = [row["noticed"] for row in runs]
        same = sum(row["identical"] for row in runs)
        left = sum(len(row["left"]) for row in runs) or "nothing"
        lines.append(
            f"| {fault} | {len(runs)} | {same} | {min(again)} to {max(again)} "
            f"| {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s | {left} |"
        )
    return "\n".join(lines)


def shards_table(results: dict[str, dict]) -> str:
    """What `python -m benchmarks.shards` measured, a line a measure and tokenizer."""
    lines = ["| what | tokens/s | at ten times the corpus | peak memory | at ten times |", "| --- " * 5 + "|"]
    for what in dict.fromkeys(name.rsplit(", ", 1)[0] for name in results):
        once, ten = (results[f"{what}, {times} x"] for times in (1, 10))
        speeds = " | ".join(f"{row['tokens_per_second']:,}" for row in (once, ten))
        memory = " | ".join(f"{row['peak_memory_mb']:,} MiB" for row in (once, ten))
        lines.append(f"| {what} | {speeds} | {memory} |")
    return "\n".join(lines)


def wikitext_table(summary: dict) -> str:
    """What `python -m benchmarks.wikitext` read of a run: its report, and the sentences it fills."""
    guesses = [
        f"| {sentence} | " + ", ".join(f"{guess['token_str']} {guess['score']:.2f}" for guess in found) + " |"
        for sentence, found in summary["filled"].items()
    ]
    return "\n".join(
        [
            f"```text\n{report(summary['results'])}\n```",
            "",
            "| sentence | guesses, with their probabilities |",
            "| --- | --- |",
            *guesses,
        ]
    )


def throughput_table(results: dict) -> str:
    """What `python -m benchmarks throughput` measured, a table a size."""
    parts = []
    for size, one in results["sizes"].items():
        single, half = (f"{one['peak_flops'][dtype] / 1e9:,.0f}" for dtype in ("float32", "bfloat16"))
        parts.append(
            f"BERT-{size}, {one['pieces']:,} pieces, {one['flops_per_token'] / 1e6:,.1f} MFLOP a token; "
            f"the machine's peak is {single} GFLOP/s in float32, {half} in bfloat16:"
        )
        parts.append(throughput.table(one))
    return "\n\n".join([*parts, hardware_line(results)])


def with_machine(table: Callable[[dict], str]) -> Callable[[dict], str]:
    """A benchmark's own table, and what it was measured on."""
    return lambda results: f"{table(results)}\n\n{hardware_line(results)}"


def hardware_line(results: dict) -> str:
    """What a benchmark's figures were measured on."""
    hardware, versions = results["machine"]["hardware"], results["machine"]["versions"]
    features = ", ".join(hardware["features"][-2:])
    packages = ", ".join(f"{name} {versions[name]}" for name in ("tensorflow", "keras", "torch") if name in versions)
    return f"{hardware['cpu']}, {hardware['cores']} cores ({features}), {hardware['memory_gb']} GiB; {packages}."


# Of `python -m benchmarks NAME`.
MEASURED = {
    "throughput": throughput_table,
    "scaling": with_machine(scaling.tables),
    "memory": with_machine(memory.table),
    "input": with_machine(benchmarks.input.table),
    "quality": with_machine(quality.table),
}


def with_tables(readme: str) -> str:
    """The README with its tables as the results have them, each between `<!-- name -->` and `<!-- end -->`."""
    faults = (RESULTS / "faults.jsonl").read_text().splitlines()
    tables = {
        "doctor": parity_table(_results("doctor")),
        "faults": faults_table([json.loads(line) for line in faults]),
        "bert_mlm": f"```text\n{report(_results('bert_mlm'))}\n```",
        "shards": shards_table(_results("shards")),
        "wikitext": wikitext_table(_results("wikitext-2")),
    }
    tables |= {name: table(_results(name)) for name, table in MEASURED.items() if f"<!-- {name} -->" in readme}
    for name, table in tables.items():
        readme = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{table}\n\g<2>", readme, flags=re.DOTALL)
    return readme


def _results(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
