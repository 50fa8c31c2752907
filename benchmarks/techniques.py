# SPDX-License-Identifier: Apache-2.0
"""What helps a small model learn in little time: one technique after the other, against BERT-tiny by `bert_mlm`.

Each run is the recipe's own, with one option, or one of its functions, in another way; several seeds each. Every
run has a core to itself, and as many run at once as there are cores. Writes docs/techniques.png.
"""

import argparse
import contextlib
import io
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import ROOT, machine, write_results
from benchmarks.text import temporary_folder
from benchmarks.workers import on_a_core_each

BASE = {"model": "tiny", "seq_length": 64, "vocabulary_size": 4096, "epochs": 3}
BATCH = 32  # sequences in a step
RATE = 5e-3 * math.sqrt(2)
POINTS = 60  # of a curve


class Technique(NamedTuple):
    """What differs from the defaults."""

    name: str
    options: dict[str, Any] = {}  # of the recipe
    change: str = ""  # a function of `benchmarks.changes`
    arguments: dict[str, Any] = {}  # of that function
    seeds: int = 0  # at least this many


DEFAULT = Technique("the defaults", seeds=5)
TECHNIQUES = (
    DEFAULT,
    Technique("AdamW", {"learning_rate": RATE / 10}, "adamw", seeds=5),
    Technique("AdamW, three times the rate", {"learning_rate": RATE / 3.3}, "adamw"),
    Technique("learning rate times 1.4", {"learning_rate": RATE * 1.4}),
    Technique("Muon: momentum 0.9", change="muon_class", arguments={"momentum": 0.9}),
    Technique("Muon: 3 Newton-Schulz iterations", change="muon_class", arguments={"ns_steps": 3}),
    Technique("position embeddings from BERT's noise", change="initial", arguments={"positions": 0.02}),
    Technique("kernels by 1/sqrt(inputs)", change="initial", arguments={"kernels": True}),
    Technique("untied head", change="untied"),
    Technique("mask rate 0.15", {"mask_rate": 0.15}),
    Technique("mask rate 0.4", {"mask_rate": 0.4}),
    Technique("mask rate falling from 0.4 to 0.15", change="mask_rates", arguments={"first": 0.4, "last": 0.15}),
    Technique("half the batch", {"batch_size": BATCH // 2, "learning_rate": RATE / math.sqrt(2)}),
    Technique("twice the batch", {"batch_size": BATCH * 2, "learning_rate": RATE * math.sqrt(2)}),
    Technique("half the batch in the first half", change="ramp"),
    Technique("sequences of 32 in the first half", change="short_first", arguments={"seq_length": 32}),
    Technique("no warm-up", {"warmup": 0.0}),
    Technique("cosine decay", change="schedule", arguments={"name": "cosine"}),
    Technique("stable rate, decay in the last 30 %", change="schedule", arguments={"name": "stable"}),
    Technique("no weight decay", change="muon", arguments={"weight_decay": 0.0}),
    Technique("no clipping", change="muon", arguments={"clip_norm": None}),
    Technique("z-loss of 1e-4", change="z_loss"),
    Technique("moving average of the weights", change="muon_class", arguments={"use_ema": True, "ema_momentum": 0.98}),
    Technique("vocabulary size 2,048", {"vocabulary_size": 2048}),
    Technique("vocabulary size 8,192", {"vocabulary_size": 8192}),
)
DRAWN = (  # curves of the picture
    DEFAULT.name,
    "AdamW, three times the rate",
    "position embeddings from BERT's noise",
    "mask rate 0.15",
    "twice the batch",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--seeds", type=int, default=3, help="runs of each technique")
    parser.add_argument("--only", default="", help="techniques whose name contains this, and the defaults")


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    chosen = [each for each in TECHNIQUES if each is DEFAULT or arguments.only in each.name]
    if arguments.quick:
        chosen = [each._replace(options={"max_steps": 3, "model": "nano"} | each.options, seeds=1) for each in chosen]
        arguments.seeds = 1
    seeds = range(max(arguments.seeds, *(each.seeds for each in chosen)))
    jobs = [(each, seed) for seed in seeds for each in chosen if seed < max(arguments.seeds, each.seeds)]
    results: dict[str, Any] = {"machine": machine(arguments.quick), "runs": []}
    given = [("benchmarks.techniques:trainer", technique._asdict() | {"seed": seed}) for technique, seed in jobs]
    for index, run in on_a_core_each(given):
        technique, seed = jobs[index]
        print(f"{technique.name}, seed {seed}: {run['below']:.3f} nats below", file=sys.stderr, flush=True)
        results["runs"].append({"technique": technique.name, "seed": seed} | run)
    print(table(results), flush=True)
    if not arguments.quick and not arguments.only:
        write_results("techniques", results)
        draw(results, ROOT / "docs/techniques.png")


def trainer(
    name: str, options: dict[str, Any], change: str, arguments: dict[str, Any], seeds: int, seed: int
) -> Callable[[], dict[str, Any]]:
    """A function that does one run of the recipe; see `benchmarks.workers`."""
    from benchmarks import changes
    from recipes import bert_mlm

    defaults = BASE | {"replicas": 1, "batch_size": BATCH, "learning_rate": RATE, "seed": seed}
    if change:
        getattr(changes, change)(bert_mlm, **arguments)
    bert_mlm.RunLog = Timed = _timed(bert_mlm.RunLog)

    def run() -> dict[str, Any]:
        with temporary_folder() as folder:
            config = bert_mlm.Config(workdir=f"{folder}/run", **defaults | options)
            with contextlib.redirect_stdout(io.StringIO()):
                results = bert_mlm.train_and_evaluate(config)
            losses = [json.loads(line)["loss"] for line in Path(config.workdir, "steps.jsonl").read_text().splitlines()]
        return {
            "steps": results["steps"],
            "loss": results["val_loss"],
            "below": results["val_unigram_loss"] - results["val_loss"],
            "bits_per_character": results["val_bits_per_character"],
            "processor_seconds": Timed.seconds,
            "peak_memory_mb": results["peak_memory_mb"],
            "curve": [round(loss, 4) for loss in _means(losses)],
        }

    return run


def _timed(log: type) -> type:
    class Timed(log):
        """Counts the processor time of all steps but the first."""

        seconds = began = 0.0

        def on_train_batch_begin(self, batch, logs=None):
            super().on_train_batch_begin(batch, logs)
            Timed.began = time.process_time()

        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if self.step > 1:
                Timed.seconds += time.process_time() - self.began

    return Timed


def _means(losses: list[float]) -> Iterator[float]:
    size = max(1, len(losses) // POINTS)
    return (statistics.mean(losses[start : start + size]) for start in range(0, len(losses), size))


def table(results: dict[str, Any]) -> str:
    """The results in Markdown: mean and standard deviation over the seeds, the best first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        groups.setdefault(run["technique"], []).append(run)
    base = groups[DEFAULT.name]
    lines = [
        "| technique | seeds | nats below the unigram baseline | bits per character | time | memory |",
        "| --- " * 6 + "|",
    ]

    def mean(runs, name):
        return statistics.mean(run[name] for run in runs)

    def spread(runs, name):
        return f" ± {statistics.stdev(run[name] for run in runs):.3f}" if len(runs) > 1 else ""

    for name, runs in sorted(groups.items(), key=lambda group: mean(group[1], "bits_per_character")):
        shown = [f"{mean(runs, column):.3f}{spread(runs, column)}" for column in ("below", "bits_per_character")]
        ratios = [mean(runs, column) / mean(base, column) for column in ("processor_seconds", "peak_memory_mb")]
        shown += [f"{ratio:.2f}" for ratio in ratios]
        lines.append(f"| {f'**{name}**' if runs is base else name} | {len(runs)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws curves of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run in results["runs"]:
        if run["technique"] in DRAWN and run["seed"] == 0:
            share = [100 * (i + 0.5) / len(run["curve"]) for i in range(len(run["curve"]))]
            axes.plot(share, run["curve"], label=f"{run['technique']}: ends {run['below']:.2f} below")
    axes.set(xlabel="% of the run", ylabel="training loss, nats per masked token", ylim=(3, 8))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
