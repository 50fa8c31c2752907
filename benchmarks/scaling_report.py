# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.scaling` found, as tables and as a picture."""

import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.links import Link, Reduction


def tables(results: dict[str, Any]) -> str:
    """The results in Markdown: three tables, and how far the model was off."""
    return "\n\n".join([ways_table(results), link_table(results), extrapolation_table(results)])


def ways_table(results: dict[str, Any]) -> str:
    """What the same cores make of one device, 2 replicas and 2 workers."""
    lines = ["| | one device | 2 replicas | of one device | 2 workers, half the cores each | of one device |"]
    lines.append("| --- " * 6 + "|")
    for name, ways in results["ways"].items():
        one, replicas, workers = (statistics.median(way["tokens_per_second"]) for way in ways.values())
        lines.append(
            f"| {name} | {one:,.0f} tokens/s | {replicas:,.0f} | {replicas / one:.0%} "
            f"| {workers:,.0f} | {workers / one:.0%} |"
        )
    return "\n".join(lines)


def link_table(results: dict[str, Any]) -> str:
    """A step of two workers by the speed of their link, measured and modelled."""
    link, fitted, held_out = results["link"], Link(**results["fitted"]), results["held_out"]
    megabytes = link["bytes_reduced"] / 1e6
    lines = [
        f"| link, {megabytes:.1f} MB reduced a step | step | modelled | error | sent by each worker |",
        "| --- " * 5 + "|",
    ]
    for row in link["steps"]:
        bandwidth = row["megabits"] * 1e6 / 8 if row["megabits"] else math.inf
        measured = statistics.median(row["seconds"])
        modelled = link["compute"] + fitted.seconds(Reduction(link["bytes_reduced"], 2, bandwidth))
        name = f"{row['megabits']} Mbit/s" if row["megabits"] else "not throttled"
        name += ", held out" if row["megabits"] == held_out["megabits"] else ""
        lines.append(
            f"| {name} | {1e3 * measured:,.0f} ms | {1e3 * modelled:,.0f} ms "
            f"| {modelled / measured - 1:+.1%} | {row['sent'] / 1e6:.1f} MB |"
        )
    return "\n".join(lines)


def extrapolation_table(results: dict[str, Any]) -> str:
    """The efficiency that the model gives many replicas."""
    efficiency = results["extrapolated"]["efficiency"]
    replicas = _replicas(results)
    lines = [
        "| extrapolated | " + " | ".join(f"{n:,} replicas" for n in replicas) + " |",
        "| --- " * (1 + len(replicas)) + "|",
    ]
    for gigabits, row in efficiency.items():
        lines.append(f"| {gigabits} Gbit/s | " + " | ".join(f"{row[str(n)]:.1%}" for n in replicas) + " |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """The measured steps beside the model, and what it gives many replicas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    link, fitted, replicas = results["link"], Link(**results["fitted"]), _replicas(results)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    shaped = [row for row in link["steps"] if row["megabits"]]
    speeds = [row["megabits"] for row in shaped]
    curve = [min(speeds) * 1.1**i for i in range(int(math.log(max(speeds) / min(speeds), 1.1)) + 2)]
    modelled = [link["compute"] + fitted.seconds(Reduction(link["bytes_reduced"], 2, m * 1e6 / 8)) for m in curve]
    left.plot(curve, [1e3 * s for s in modelled], color="gray", label="model")
    for held_out, style, label in ((False, "o", "measured, fitted"), (True, "s", "measured, held out")):
        rows = [row for row in shaped if (row["megabits"] == results["held_out"]["megabits"]) == held_out]
        times = [1e3 * statistics.median(row["seconds"]) for row in rows]
        left.plot([row["megabits"] for row in rows], times, style, label=label)
    left.set(xscale="log", xlabel="link, Mbit/s", ylabel="step, ms", title="Two workers, measured")
    left.set_ylim(bottom=0)
    for gigabits, row in results["extrapolated"]["efficiency"].items():
        right.plot(replicas, [100 * row[str(n)] for n in replicas], "o--", label=f"{gigabits} Gbit/s")
    each = f"{results['extrapolated']['sequences']} sequences of 128 a replica, {link['compute'] * 1e3:.0f} ms"
    title = f"Extrapolated by the model, not measured:\n{each}"
    right.set(xscale="log", xlabel="replicas", ylabel="share of a step spent computing, %", title=title, ylim=(0, 102))
    right.set_xticks(replicas, [f"{n:,}" for n in replicas])
    right.minorticks_off()
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _replicas(results: dict[str, Any]) -> list[int]:
    return [int(n) for n in next(iter(results["extrapolated"]["efficiency"].values()))]
