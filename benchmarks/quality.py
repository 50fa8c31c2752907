# SPDX-License-Identifier: Apache-2.0
"""Validation loss by time: the published Keras example's pipeline, and this project's `fit`.

Both are validated on the same masked sequences, for which the clock stops; it runs while they compile. With the
published settings both begin with the same random weights; by Muon, ours begins as the recipe does. Writes
docs/quality.png.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, machine, write_results
from benchmarks.text import add_text_arguments, prepare_text
from benchmarks.workers import once

PUBLISHED, OURS = "published", "ours"
MODEL, MINUTES = "tiny", 8.0  # of training, of each published run
# As the recipe's defaults, but for its model, its rows of 32 and its 2,048 pieces.
MUON = {"optimizer": "muon", "mask_rate": 0.3, "seq_length": 64, "batch_size": 32}
AS_PUBLISHED = {"optimizer": "adamw", "mask_rate": 0.15, "seq_length": 128}
FOR_EVER = 10**6  # steps, or epochs
# One run per line: whose pipeline; learning rate; dropout; the share of the time for which it trains; and what else
# differs. If that is something of ours, the rate rises and decays over that time. The published example has a rate of
# 2e-4 for its 64 lines a step, which are about 10,000 tokens; ours has 4,096.
RUNS = (
    (PUBLISHED, 2e-4, 0.1, 1, {}),
    (OURS, 2e-4, 0.1, 1 / 4, {}),
    (PUBLISHED, 1e-3, 0.0, 1, {"batch_size": 16}),
    (OURS, 2e-3, 0.0, 1 / 16, {"optimizer": "adamw"}),
    (OURS, 7e-3, 0.0, 1 / 4, MUON),
)
BATCHES = {PUBLISHED: 64, OURS: 32}  # per step: lines padded to 512 tokens; sequences
VALIDATION = 32  # batches of 32 sequences
VALIDATIONS = 40  # in a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_text_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    model, minutes = ("nano", 0.1) if arguments.quick else (MODEL, MINUTES)
    import matplotlib  # noqa: F401 - that it is missing should not be found at the end

    results = {
        "machine": machine(arguments.quick),
        "model": model,
        "corpus": Path(arguments.corpus).name,
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        text = prepare_text(arguments, 128, folder)
        words = {"model": model, "corpus": text["corpus"], "vocabulary": text["vocabulary"]}
        once(
            "benchmarks.quality:initial", {"folder": folder, "model": words["model"], "vocabulary": words["vocabulary"]}
        )
        for side, rate, dropout, share, own in RUNS:
            seconds = 60 * minutes * share
            run = {"side": side, "rate": rate, "dropout": dropout, "own": own}
            steps = max(10, int(seconds * _steps_a_second(words | own))) if side == OURS and own else 0
            run |= once("benchmarks.quality:trainer", words | run | {"steps": steps, "folder": folder}, seconds=seconds)
            results["runs"].append(run)
            print(run | {"curve": run["curve"][-1]}, file=sys.stderr, flush=True)
    print(table(results), flush=True)
    if not arguments.quick:
        write_results("quality", results)
        draw(results, ROOT / "docs/quality.png")


def _steps_a_second(options: dict[str, Any]) -> float:
    """The speed of our side, which sets the number of steps over which its learning rate rises and decays."""
    timed = once("benchmarks.ours:trainer", ours_by(options), steps=50)
    return timed["steps"] / timed["seconds"]


def ours_by(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `ours.set_up`, by options that differ from the published example's settings."""
    return {"recipe": "bert_mlm", "batch_size": BATCHES[OURS]} | AS_PUBLISHED | options


def initial(folder: str, model: str, vocabulary: str) -> Callable[[], dict]:
    """A function that writes the random weights with which runs begin."""
    import keras
    import numpy as np

    from benchmarks import keras_example

    def write() -> dict:
        keras.utils.set_random_seed(0)
        task = keras_example.build(model, vocabulary, 0.0, 0.0)
        np.savez(Path(folder, "weights.npz"), *task.get_weights())
        return {}

    return write


def trainer(
    side: str, rate: float, dropout: float, own: dict[str, Any], steps: int, folder: str, **words: str
) -> Callable[..., dict]:
    """A function that trains for some steps or seconds, and returns the curve: pairs of seconds and validation loss.

    Args:
        side: whose pipeline.
        rate, dropout: of the run.
        own: options of ours, or of the published pipeline its `batch_size`.
        steps: those of the run, over which the rate rises and decays; 0 for a constant rate, and to train for seconds.
        folder: with the initial weights.
        words: options of the text and the model.
    """
    import numpy as np

    from benchmarks import keras_example, ours
    from common.training import WarmUpPolynomialDecay

    if side == OURS:
        schedule = WarmUpPolynomialDecay(rate, steps) if steps else rate
        strategy, model, train = ours.set_up(**ours_by(words | own | {"dropout": dropout, "rate": schedule}))
    else:
        model = keras_example.build(words["model"], words["vocabulary"], dropout, rate)
        data = keras_example.lines(words["corpus"], own.get("batch_size", BATCHES[PUBLISHED]))
    if own != MUON:
        with np.load(Path(folder, "weights.npz")) as weights:
            model.set_weights([weights[name] for name in weights.files])
    loss = _validation(model, words)

    def run(seconds: float) -> dict:
        curve = _curve(seconds, steps or math.inf, loss)
        if side == OURS:
            ours.fit(model, strategy, train, FOR_EVER, [curve])
        else:
            model.fit(data, epochs=FOR_EVER, callbacks=[curve], verbose=0)
        return {"curve": curve.points, "steps": curve.steps}

    return run


def _validation(model, words: dict[str, str]) -> Callable[[], float]:
    """A function that gives the mean loss of a model over the masked tokens of the validation sequences."""
    import keras
    import tensorflow as tf

    from common.log import one_epoch
    from recipes.bert_mlm import Config, make_datasets

    _, data = make_datasets(Config(seq_length=AS_PUBLISHED["seq_length"], **words), 32)
    batches = list(one_epoch(data["validation"]).take(VALIDATION))

    @tf.function(reduce_retracing=True)
    def total(x, y, weight):
        losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=False), from_logits=True)
        return tf.reduce_sum(losses * weight), tf.reduce_sum(weight)

    def mean() -> float:
        losses, labels = zip(*(total(*batch) for batch in batches), strict=True)
        return float(sum(losses) / sum(labels))

    return mean


def _curve(budget: float, last_step: float, loss: Callable[[], float]):
    import keras

    class Curve(keras.callbacks.Callback):
        """Validates now and then, with the clock stopped, and ends the `fit` at its last step, or when time is up."""

        def on_train_begin(self, logs=None):
            self.points, self.steps, self.stopped = [(0.0, loss())], 0, 0.0
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            now = time.perf_counter()
            seconds = now - self.began - self.stopped
            over = self.steps >= last_step if last_step < math.inf else seconds >= budget
            if seconds >= self.points[-1][0] + budget / VALIDATIONS or over:
                self.points.append((round(seconds, 2), loss()))
                self.stopped += time.perf_counter() - now
                self.model.stop_training = over

    return Curve()


def compare(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """For the same learning rate, and for each side's best: when ours reaches the loss at the end of the published run.

    The best run of each side is the one that ends lowest.

    Returns:
        For each, the `loss` at the end of the published run, after `published` seconds; `ours`, the seconds after which
        ours has it first (infinite for never); and `ratio`, how many times sooner that is.
    """
    compared = {}
    for name in ("the same learning rate", "each at its best"):
        published, ours = (
            [run["curve"] for run in results["runs"] if run["side"] == side][
                : 1 if name.startswith("the same") else None
            ]
            for side in (PUBLISHED, OURS)
        )
        seconds, loss = min((curve[-1] for curve in published), key=lambda point: point[1])
        best = min(ours, key=lambda curve: curve[-1][1])
        reached = min((at for at, found in best if found <= loss), default=math.inf)
        compared[name] = {"loss": loss, "published": seconds, "ours": reached, "ratio": seconds / reached}
    return compared


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| pipeline | learning rate | dropout | steps | seconds | validation loss |", "| --- " * 6 + "|"]
    for run in results["runs"]:
        seconds, loss = run["curve"][-1]
        rate = f"{run['rate']:g}, {'with decay' if _decays(run) else 'constant'}"
        numbers = f"{run['steps']:,} | {seconds:,.0f} | {loss:.3f} |"
        lines.append(f"| {_name(run)} | {rate} | {run['dropout']} | {numbers}")
    lines.append("")
    for name, found in compare(results).items():
        when = (
            f"reaches it after {found['ours']:,.0f} s, {found['ratio']:.1f} times faster"
            if found["ratio"]
            else "does not"
        )
        lines.append(
            f"- {name}: the published pipeline ends at {found['loss']:.3f} after {found['published']:,.0f} s; "
            f"ours {when}."
        )
    return "\n".join(lines)


def _name(run: dict[str, Any]) -> str:
    if run["side"] == PUBLISHED:
        return f"published, {run['own'].get('batch_size', BATCHES[PUBLISHED])} lines"
    return "ours, Muon, rows of 64" if run["own"] == MUON else "ours, AdamW"


def _decays(run: dict[str, Any]) -> bool:
    return run["side"] == OURS and bool(run["own"])


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws the curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run in results["runs"]:
        seconds, losses = zip(*run["curve"], strict=True)
        label = f"{_name(run)}, {run['rate']:g}{', decays' if _decays(run) else ''}, dropout {run['dropout']:g}"
        axes.plot([s / 60 for s in seconds], losses, "-" if run["side"] == OURS else "--", label=label)
    title = f"BERT-{results['model']}, {results['corpus']}"
    axes.set(xlabel="minutes of training", ylabel="validation loss, nats per masked token", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
