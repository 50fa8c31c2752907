# SPDX-License-Identifier: Apache-2.0
"""How fast the input pipeline is by itself, and how long training waits for it.

Waiting is the time in `next(iterator)`, in a loop of `next` and the model's own `train_step`.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, write_results
from benchmarks.text import add_text_arguments, prepare_text
from benchmarks.workers import Worker, together

WAYS = (("one device", {"replicas": 1}), ("2 replicas", {"replicas": 2}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_text_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    model, rounds, seconds = ("nano", 1, 0.0) if arguments.quick else ("tiny", 3, 5.0)
    results: dict[str, Any] = {"machine": machine(arguments.quick), "corpus": Path(arguments.corpus).name}
    with tempfile.TemporaryDirectory() as folder:
        text = prepare_text(arguments, 128, folder)
        options = {"model": model, "corpus": text["corpus"], "vocabulary": text["vocabulary"]}
        options |= {"recipe": "bert_mlm", "batch_size": 32, "seq_length": 128, "mask_rate": 0.15}
        makers = [
            ("benchmarks.input:pipeline", options),
            *(("benchmarks.input:waiter", options | own) for _, own in WAYS),
        ]
        with together(Worker(*maker) for maker in makers) as workers:
            steps = [_steps(worker, seconds) for worker in workers]
            answers = []
            for number in range(rounds):
                answers.append([worker(steps=n) for worker, n in zip(workers, steps, strict=True)])
                print(f"round {number + 1}: {answers[-1]}", file=sys.stderr, flush=True)
    alone, *waiting = zip(*answers, strict=True)
    results["pipeline"] = {"tokens_per_second": [round(answer["tokens"] / answer["seconds"]) for answer in alone]}
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
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    return run


def waiter(**options: Any) -> Callable[..., dict[str, float]]:
    """A function that trains on new batches, and times the wait for them."""
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
        return {"steps": steps, "seconds": time.perf_counter() - began, "waited": waited}

    return run


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    tokens = statistics.median(results["pipeline"]["tokens_per_second"])
    lines = [
        f"The pipeline alone: {tokens:,.0f} tokens/s.",
        "",
        "| | step | data stall | of the step |",
        "| --- " * 4 + "|",
    ]
    for name, answers in results["waiting"].items():
        step, wait = (statistics.median(1e3 * a[what] / a["steps"] for a in answers) for what in ("seconds", "waited"))
        lines.append(f"| {name} | {step:.1f} ms | {wait:.2f} ms | {wait / step:.1%} |")
    return "\n".join(lines)
