# SPDX-License-Identifier: Apache-2.0
"""What 2 replicas and 2 workers make of the cores that one device has, and a model of what many would make of theirs.

Same global batch, loop and number format on all sides. For the model, two workers train over a link of several speeds,
between two network namespaces (which root may make); one speed is held out to test it. Writes docs/scaling.png.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.hosts import ADDRESSES, bytes_sent, on, shape, two_hosts
from benchmarks.links import Reduction, fit_link
from benchmarks.machine import ROOT, cores, machine, write_results
from benchmarks.scaling_report import draw, tables
from benchmarks.text import add_step_arguments, prepare_text, temporary_folder
from benchmarks.workers import Worker, together
from common.devices.cluster import worker_config
from recipes._launch import free_addresses

OURS, REDUCER = "benchmarks.ours:trainer", "benchmarks.reducer:reducer"
SPEEDS = (None, 1600, 800, 400, 200, 100)  # megabits a second; None: as fast as the kernel copies
HELD_OUT = 400  # of them, which the model is not fitted to
COUNTS = (1, 250_000, 1_000_000, 4_000_000)  # float32 numbers in a bare reduction
RINGS = (2, 3, 4, 6, 8)  # workers on this host that add up one number, by which a round's latency is told
REPLICAS = tuple(2**i for i in range(3, 11))
GIGABITS = (10, 100, 400)  # links to which the model is taken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_step_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    if arguments.quick:
        arguments.model, arguments.rounds, arguments.seconds, arguments.vocabulary_size = "nano", 1, 0.0, 500
    results: dict[str, Any] = {"machine": machine()}
    with temporary_folder() as folder:
        text = prepare_text(arguments, 128, folder)
        options = {
            "model": arguments.model,
            "corpus": text["corpus"],
            "vocabulary": text["vocabulary"],
            "seq_length": 128,
        }
        options |= {"precision": "float32", "batch_size": arguments.batch_size}
        results |= {"model": arguments.model, "batch": arguments.batch_size, "pieces": text["pieces"]}
        results["ways"] = {
            name: compare(options | {"jit": jit}, arguments)
            for name, jit in (("float32", False), ("float32, jit", True))
        }
        results["link"] = measure_link(options, arguments)
    results |= extrapolate(results["link"], arguments.batch_size // 2)
    print(tables(results), flush=True)
    if not arguments.quick:
        write_results("scaling", results)
        draw(results, ROOT / "docs/scaling.png")


def compare(options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One device, 2 replicas and 2 workers with half the cores each, in turn."""
    with contextlib.ExitStack() as stack:
        groups = {
            "one device": stack.enter_context(together([Worker(OURS, options | {"replicas": 1})])),
            "2 replicas": stack.enter_context(together([Worker(OURS, options | {"replicas": 2})])),
            "2 workers": stack.enter_context(two_workers(OURS, options)),
        }
        steps = {name: rehearse(group, arguments.seconds) for name, group in groups.items()}
        answers = {name: [] for name in groups}
        for number in range(arguments.rounds):
            for name, group in groups.items():
                answers[name].append(ask(group, steps=steps[name]))
                print(f"round {number + 1}: {name} {answers[name][-1]}", file=sys.stderr, flush=True)
    return {
        name: {
            "tokens_per_second": [round(a["tokens"] / a["seconds"], 1) for a in found],
            "step_ms": [round(1e3 * a["seconds"] / a["steps"], 2) for a in found],
            "bytes_reduced": found[0]["bytes_reduced"],
        }
        for name, found in answers.items()
    }


def measure_link(options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Times of two workers over links of several speeds.

    Returns:
        `compute`, seconds of a step of two processes that do not talk, each with half the batch and half the cores;
        `bytes_reduced` in a step; `steps` and `reductions`, rows of `megabits`, the `count` of numbers in a bare
        reduction, `seconds` of each round, and bytes that a worker `sent`; and `rings` of other numbers of workers.
    """
    half = options | {"batch_size": arguments.batch_size // 2, "replicas": 1}
    rows: dict[str, list[dict[str, Any]]] = {"steps": [], "reductions": []}
    speeds, apart = (None, 800, HELD_OUT) if arguments.quick else SPEEDS, []
    with (
        two_hosts() as hosts,
        together(Worker(OURS, half, cores=share) for share in halves()) as silent,
        two_workers(OURS, options, hosts) as trainers,
        two_workers(REDUCER, {}, hosts, 1) as adders,
    ):
        number = rehearse(silent, arguments.seconds / 2)
        for megabits in speeds:
            shape(hosts, megabits)
            apart += [ask(silent, steps=number) for _ in range(arguments.rounds)]
            rows["steps"].append({"megabits": megabits} | over_link(hosts[0], trainers, arguments))
            print(rows["steps"][-1], file=sys.stderr, flush=True)
            for count in COUNTS:
                row = {"megabits": megabits, "count": count}
                rows["reductions"].append(row | over_link(hosts[0], adders, arguments, count=count))
                print(rows["reductions"][-1], file=sys.stderr, flush=True)
    rows["rings"] = [reduce_in_ring(size, arguments) for size in (RINGS[:1] if arguments.quick else RINGS)]
    compute = statistics.median(a["seconds"] / a["steps"] for a in apart)
    return {"compute": compute, "bytes_reduced": apart[0]["bytes_reduced"]} | rows


def reduce_in_ring(replicas: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds in which so many workers on this host add up one number."""
    with ring(REDUCER, {}, free_addresses(replicas)) as group:
        steps = rehearse(group, arguments.seconds / 2, count=1)
        answers = [ask(group, steps=steps, count=1) for _ in range(arguments.rounds)]
    return {"megabits": None, "replicas": replicas, "count": 1, "seconds": [a["seconds"] / steps for a in answers]}


def over_link(host: str, group: list[Worker], arguments: argparse.Namespace, **question: Any) -> dict[str, Any]:
    """Seconds of a step in each round, and bytes that the host sent for a step."""
    steps = rehearse(group, arguments.seconds / 2, **question)
    answers = [ask(group, steps=steps, **question) for _ in range(arguments.rounds)]
    before = bytes_sent(host)
    ask(group, steps=0, **question)
    between = bytes_sent(host)
    ask(group, steps=steps, **question)
    return {
        "seconds": [a["seconds"] / steps for a in answers],
        "sent": round((bytes_sent(host) - between - (between - before)) / steps),
    }


def extrapolate(link: dict[str, Any], sequences: int) -> dict[str, Any]:
    """Fits the model, tests it at the speed that was held out, and takes it to many replicas."""

    def reduction(row: dict[str, Any]) -> Reduction:
        reduced = 4 * row["count"] if "count" in row else link["bytes_reduced"]
        return Reduction(reduced, row.get("replicas", 2), row["megabits"] * 1e6 / 8 if row["megabits"] else math.inf)

    def measured(row: dict[str, Any]) -> tuple[Reduction, float, float]:
        return reduction(row), statistics.median(row["seconds"]), 0.0 if "count" in row else link["compute"]

    rows = link["steps"] + link["reductions"] + link["rings"]
    fitted = fit_link(measured(row) for row in rows if row["megabits"] != HELD_OUT)
    held_out = next(row for row in link["steps"] if row["megabits"] == HELD_OUT)
    predicted = link["compute"] + fitted.seconds(reduction(held_out))
    efficiency = {
        f"{gigabits}": {
            f"{n}": fitted.efficiency(link["compute"], Reduction(link["bytes_reduced"], n, gigabits * 1e9 / 8))
            for n in REPLICAS
        }
        for gigabits in GIGABITS
    }
    return {
        "fitted": dataclasses.asdict(fitted),
        "held_out": {"megabits": HELD_OUT, "measured": statistics.median(held_out["seconds"]), "predicted": predicted},
        "extrapolated": {"sequences": sequences, "efficiency": efficiency},
    }


def two_workers(function: str, arguments: dict[str, Any], hosts: Sequence[str] = (), port: int = 0):
    """Two workers with half the cores each, on this host or on two; for a `with` statement."""
    addresses = [f"{address}:{8888 + port}" for address in ADDRESSES] if hosts else free_addresses(2)
    return ring(function, arguments, addresses, halves(), hosts)


@contextlib.contextmanager
def ring(
    function: str, arguments: dict[str, Any], addresses: list[str], shares=None, hosts=()
) -> Iterator[list[Worker]]:
    """Workers that know of each other, each with its share of the cores, or all."""
    with together(
        Worker(
            function,
            arguments,
            cores=shares[number] if shares else None,
            environment={"TF_CONFIG": json.dumps(worker_config(addresses, number))},
            prefix=on(hosts[number]) if hosts else (),
        )
        for number in range(len(addresses))
    ) as workers:
        yield workers


def halves() -> list[list[int]]:
    """This process's cores in two parts; of a single one, it twice."""
    own = cores()
    return [own[: len(own) // 2] or own, own[len(own) // 2 :]]


def rehearse(group: list[Worker], seconds: float, **question: Any) -> int:
    """Lets them do two steps, which compiles what is to be, and two more; returns how many take so many seconds."""
    ask(group, steps=2, **question)
    timed = ask(group, steps=2, **question)
    return min(max(3, math.ceil(seconds * 2 / timed["seconds"])), 2000)


def ask(group: list[Worker], **question: Any) -> dict[str, Any]:
    """Has all of them begin, and waits for the last."""
    for worker in group:
        worker.ask(**question)
    return max((worker.answer() for worker in group), key=lambda answer: answer["seconds"])
