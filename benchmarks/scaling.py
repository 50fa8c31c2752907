# SPDX-License-Identifier: Apache-2.0
"""What 2 replicas and 2 workers make of the cores that one device has, and two workers over links of several speeds.

Same global batch, loop and dtype on all sides. The workers of the second part are in two network namespaces, which
root may make; a step is timed beside its computation alone, and the reduction of as many bytes alone.
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hosts import ADDRESSES, bytes_sent, on, shape, two_hosts
from benchmarks.machine import cores, machine, write_results
from benchmarks.text import add_text_arguments, prepare_text
from benchmarks.workers import Worker, together
from keras_replicas.cluster import worker_config
from keras_replicas.launch import free_addresses

OURS, REDUCER = "benchmarks.ours:trainer", "benchmarks.reducer:reducer"
BATCH = 32  # sequences of 128 tokens in a step, over all replicas
SPEEDS = (None, 1600, 800, 400, 200, 100)  # megabits a second; None: as fast as the kernel copies


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_text_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    model, rounds, seconds = ("nano", 1, 0.0) if arguments.quick else ("tiny", 3, 5.0)
    results: dict[str, Any] = {"machine": machine(arguments.quick), "corpus": Path(arguments.corpus).name}
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        text = prepare_text(arguments, 128, folder)
        options = {"corpus": text["corpus"], "vocabulary": text["vocabulary"], "seq_length": 128}
        options |= {
            "recipe": "bert_mlm",
            "mask_rate": 0.15,
            "model": model,
            "batch_size": BATCH,
        }
        results["ways"] = {
            name: compare(options | {"jit": jit}, rounds, seconds)
            for name, jit in (("float32", False), ("float32, jit", True))
        }
        results["links"] = measure_links(options, (None, 400) if arguments.quick else SPEEDS, rounds, seconds, hosts)
    print(tables(results), flush=True)
    if not arguments.quick:
        write_results("scaling", results)


def compare(options: dict[str, Any], rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """One device, 2 replicas and 2 workers with half the cores each, in turn."""
    with contextlib.ExitStack() as stack:
        groups = {
            "one device": stack.enter_context(together([Worker(OURS, options | {"replicas": 1})])),
            "2 replicas": stack.enter_context(together([Worker(OURS, options | {"replicas": 2})])),
            "2 workers": stack.enter_context(two_workers(OURS, options)),
        }
        steps = {name: rehearse(group, seconds) for name, group in groups.items()}
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in groups}
        for number in range(rounds):
            for name, group in groups.items():
                answers[name].append(ask(group, steps=steps[name]))
                print(f"round {number + 1}: {name} {answers[name][-1]}", file=sys.stderr, flush=True)
    return {
        name: {"tokens_per_second": [round(a["tokens"] / a["seconds"], 1) for a in found]}
        for name, found in answers.items()
    }


def measure_links(
    options: dict[str, Any], speeds: Sequence[int | None], rounds: int, seconds: float, hosts: list[str]
) -> list[dict[str, Any]]:
    """Seconds of steps of two workers, each with half the batch and half the cores, by the speed of their link.

    Returns:
        For each speed, `megabits` per second, lists of seconds, one per round: `computation`, a step of two processes
        that do not talk; `reduction`, of as many bytes as the gradients have, alone; and `step`. Then the bytes that
        a worker `sent` in a step.
    """
    alone = options | {"batch_size": BATCH // 2, "replicas": 1}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        groups = {
            "computation": stack.enter_context(together(Worker(OURS, alone, cores=share) for share in halves())),
            "reduction": stack.enter_context(two_workers(REDUCER, {}, hosts)),
            "step": stack.enter_context(two_workers(OURS, options, hosts, 1)),
        }
        reduced = ask(groups["computation"], steps=2)["bytes_reduced"]
        for megabits in speeds:
            shape(hosts, megabits)
            questions = {name: {"count": reduced // 4} if name == "reduction" else {} for name in groups}
            steps = {name: rehearse(groups[name], seconds / 2, **questions[name]) for name in groups}
            row: dict[str, Any] = {"megabits": megabits} | {name: [] for name in groups}
            for _ in range(rounds):
                for name, group in groups.items():
                    row[name].append(ask(group, steps=steps[name], **questions[name])["seconds"] / steps[name])
            counts = [bytes_sent(hosts[0])]
            for number in (0, steps["step"]):  # with 0, only the steps that are not timed
                ask(groups["step"], steps=number)
                counts.append(bytes_sent(hosts[0]))
            row["sent"] = round((counts[2] - 2 * counts[1] + counts[0]) / steps["step"])
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def two_workers(
    function: str, arguments: dict[str, Any], hosts: Sequence[str] = (), port: int = 0
) -> contextlib.AbstractContextManager[list[Worker]]:
    """Two workers with half the cores each, on this host or on two; for a `with` statement."""
    addresses = [f"{address}:{8888 + port}" for address in ADDRESSES] if hosts else free_addresses(2)
    return together(
        Worker(
            function,
            arguments,
            cores=share,
            environment={"TF_CONFIG": json.dumps(worker_config(addresses, number))},
            prefix=on(hosts[number]) if hosts else (),
        )
        for number, share in enumerate(halves())
    )


def halves() -> list[list[int]]:
    """This process's cores in two parts; a single core is in both."""
    own = cores()
    return [own[: len(own) // 2] or own, own[len(own) // 2 :]]


def rehearse(group: list[Worker], seconds: float, **question: Any) -> int:
    """Has a group do two steps, to compile, and two more; returns how many steps take that many seconds."""
    ask(group, steps=2, **question)
    timed = ask(group, steps=2, **question)
    return min(max(3, math.ceil(seconds * 2 / timed["seconds"])), 2000)


def ask(group: list[Worker], **question: Any) -> dict[str, Any]:
    """Has all workers begin, waits for the last, and returns the slowest one's answer."""
    for worker in group:
        worker.ask(**question)
    return max((worker.answer() for worker in group), key=lambda answer: answer["seconds"])


def tables(results: dict[str, Any]) -> str:
    """The results in Markdown, in two tables."""
    return f"{ways_table(results['ways'])}\n\n{links_table(results['links'])}"


def ways_table(ways: dict[str, Any]) -> str:
    """What the same cores make of one device, 2 replicas and 2 workers, by medians."""
    first, *others = next(iter(ways.values()))
    titles = ["", first, *(title for name in others for title in (name, "of one device"))]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for name, sides in ways.items():
        one, *rest = (statistics.median(side["tokens_per_second"]) for side in sides.values())
        cells = [f"{one:,.0f} tokens/s", *(f"{each:,.0f} | {each / one:.0%}" for each in rest)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def links_table(rows: list[dict[str, Any]]) -> str:
    """Medians of a step of two workers by the speed of their link, and their ratios to the best possible.

    That is the longer of computation and reduction, which a step would take if the one hid the other.
    """
    titles = ["link", "computation", "reduction", "step", "of the longer", "sent by each worker"]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for row in rows:
        of = {name: statistics.median(row[name]) for name in ("computation", "reduction", "step")}
        ms = {name: f"{1e3 * seconds:,.0f} ms" for name, seconds in of.items()}
        link = f"{row['megabits']} Mbit/s" if row["megabits"] else "not throttled"
        ratio = f"{of['step'] / max(of['computation'], of['reduction']):.2f}"
        cells = [link, *ms.values(), ratio, f"{row['sent'] / 1e6:.1f} MB"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
