# SPDX-License-Identifier: Apache-2.0
"""How fast the input pipeline is by itself, and how long training waits for it.

Waiting is the time in `next(iterator)`, in a loop of `next` and the model's own `train_step`. The same steps on a
single batch, read once, show what the pipeline costs in all, including its use of the cores.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.machine import machine, write_results
from benchmarks.text import add_step_arguments, prepare_text, temporary_folder
from benchmarks.workers import Worker, together

WAYS = (("one device", {"replicas": 1}), ("2 replicas", {"replicas": 2}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_step_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    if arguments.quick:
        arguments.model, arguments.rounds, arguments.seconds, arguments.vocabulary_size = "nano", 1, 0.0, 500
    results: dict[str, Any] = {
        "machine": machine(arguments.quick),
        "model": arguments.model,
        "batch": arguments.batch_size,
    }
    with temporary_folder() as folder:
        text = prepare_text(arguments, 128, folder)
        options = {"model": arguments.model, "corpus": text["corpus"], "vocabulary": text["vocabulary"]}
        options |= {"recipe": "bert_mlm", "batch_size": arguments.batch_size, "seq_length": 128, "mask_rate": 0.15}
        makers = [
            ("benchmarks.input:pipeline", options),
            *(("benchmarks.input:waiter", options | own) for _, own in WAYS),
        ]
        with together(Worker(*maker) for maker in makers) as workers:
            steps = [_steps(worker, arguments.seconds) for worker in workers]
            rounds = []
            for number in range(arguments.rounds):
                rounds.append([worker(steps=n) for worker, n in zip(workers, steps, strict=True)])
                print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    alone, *waiting = zip(*rounds, strict=True)
    results["pipeline"] = {
        f"{unit}_per_second": [round(answer[unit] / answer["seconds"]) for answer in alone]
        for unit in ("sequences", "tokens")
    }
    results["waiting"] = {name: list(answers) for (name, _), answers in zip(WAYS, waiting, strict=True)}
    print(table(results), flush=True)
    if not arguments.quick:
        write_results("input", results)


def _steps(worker: Worker, seconds: float) -> int:
    worker(steps=2)
    return min(max(3, math.ceil(seconds * 10 / worker(steps=10)["seconds"])), 10_000)


def pipeline(**options: Any) -> Callable[..., dict[str, float]]:
    """A function that reads and masks a given number of batches, for one device."""
    from benchmarks import ours

    _, _, data = ours.set_up(**options, replicas=1)

    def run(steps: int) -> dict[str, float]:
        iterator, tokens = iter(data.iter_from_step(0, ours.ONE_PART)), 0
        for _ in range(10):  # more than wait in its queues
            next(iterator)
        began = time.perf_counter()
        for _ in range(steps):
            tokens += int(next(iterator)[0]["padding_mask"].numpy().sum())
        return {"seconds": time.perf_counter() - began, "sequences": steps * data.batch_size, "tokens": tokens}

    return run


def waiter(**options: Any) -> Callable[..., dict[str, float]]:
    """A function that trains on new batches, then as many steps on one batch, and times the wait for the new ones."""
    import tensorflow as tf

    from benchmarks import ours

    strategy, model, data = ours.set_up(**options)
    ours.fit(model, strategy, data, 1, [])  # builds the loss, which a step alone does not

    @tf.function(autograph=False, reduce_retracing=True)
    def train(batch):
        values = strategy.run(model.train_step, args=(batch,))
        return strategy.experimental_local_results(values["loss"])[0]

    def run(steps: int) -> dict[str, float]:
        iterator = iter(ours.distribute(strategy, data))
        for _ in range(2):
            batch = next(iterator)
            train(batch).numpy()
        waited, began = 0.0, time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(iterator)
            waited += time.perf_counter() - asked
            train(batch).numpy()
        seconds, began = time.perf_counter() - began, time.perf_counter()
        del iterator  # and with it, what it prepares
        for _ in range(steps):
            train(batch).numpy()
        held = time.perf_counter() - began
        return {"steps": steps, "seconds": seconds, "waited": waited, "seconds_on_one_batch": held}

    return run


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    sequences, tokens = (statistics.median(results["pipeline"][f"{u}_per_second"]) for u in ("sequences", "tokens"))
    lines = [
        f"The pipeline alone: {sequences:,.0f} sequences/s, {tokens:,.0f} tokens/s.",
        "",
        "| | step | data stall | of the step | total cost of the pipeline |",
        "| --- " * 5 + "|",
    ]
    for name, answers in results["waiting"].items():
        step, wait, held = (
            statistics.median(1e3 * a[what] / a["steps"] for a in answers)
            for what in ("seconds", "waited", "seconds_on_one_batch")
        )
        lines.append(f"| {name} | {step:.1f} ms | {wait:.2f} ms | {wait / step:.1%} | {(step - held) / step:+.1%} |")
    return "\n".join(lines)
