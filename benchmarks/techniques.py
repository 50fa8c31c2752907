# SPDX-License-Identifier: Apache-2.0
"""What helps a small model learn in little time: one technique after the other, against the defaults of `bert_mlm`.

Each run is the recipe's own, with one option, or one of its functions, in another way; several seeds each. Every
run has a core to itself, and as many run at once as there are cores. Writes docs/techniques.png.
"""

import argparse
import contextlib
import functools
import io
import json
import math
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import RESULTS, ROOT, cores, machine, write_results
from benchmarks.text import temporary_folder
from benchmarks.workers import Worker, together

BATCH = 32  # sequences in a step of the default run, which has 2 replicas
RATE = 5e-3 * math.sqrt(2)
POINTS = 60  # of a curve


class Technique(NamedTuple):
    """What differs from the defaults."""

    name: str
    options: dict[str, Any] = {}  # of the recipe
    change: str = ""  # a function of this module, that puts something else in the place of the recipe's functions
    arguments: dict[str, Any] = {}  # of that function
    seeds: int = 0  # at least so many


DEFAULT = Technique("the defaults", seeds=5)
TECHNIQUES = (
    DEFAULT,
    Technique("AdamW", {"optimizer": "adamw", "learning_rate": RATE / 10}, seeds=5),
    Technique("AdamW, three times the rate", {"optimizer": "adamw", "learning_rate": RATE / 3.3}),
    Technique("LAMB", {"optimizer": "lamb", "learning_rate": RATE}),
    Technique("learning rate times 0.7", {"learning_rate": RATE * 0.7}),
    Technique("learning rate times 1.4", {"learning_rate": RATE * 1.4}),
    Technique("Muon: all attention heads as one matrix", change="muon", arguments={"one_matrix": True}),
    Technique("Muon for the head's dense layer too", change="muon", arguments={"exclude_layers": ["logits"]}),
    Technique("Muon: momentum 0.9", change="muon", arguments={"momentum": 0.9}),
    Technique("Muon: 3 Newton-Schulz iterations", change="muon", arguments={"ns_steps": 3}),
    Technique("Muon: one rate for AdamW's part", change="muon", arguments={"adam_lr_ratio": 1.0}),
    Technique("position embeddings from BERT's noise", change="initial", arguments={"positions": 0.02}),
    Technique("position embeddings from noise five times as large", change="initial", arguments={"positions": 0.1}),
    Technique("kernels by 1/sqrt(inputs)", change="initial", arguments={"kernels": True}),
    Technique("untied head", change="untied"),
    Technique("mask rate 0.15", {"mask_rate": 0.15}),
    Technique("mask rate 0.4", {"mask_rate": 0.4}),
    Technique("mask rate falling from 0.4 to 0.15", change="batches", arguments={"rates": [0.4, 0.15]}),
    Technique("half the batch", {"batch_size": BATCH // 2, "learning_rate": RATE / math.sqrt(2)}),
    Technique("twice the batch", {"batch_size": BATCH * 2, "learning_rate": RATE * math.sqrt(2)}),
    Technique("half the batch in the first half", change="ramp"),
    Technique("sequences of 32", {"seq_length": 32, "batch_size": BATCH * 2}),
    Technique("sequences of 128", {"seq_length": 128, "batch_size": BATCH // 2}),
    Technique("sequences of 32 in the first half", change="batches", arguments={"shorter": True}),
    Technique("no warm-up", {"warmup": 0.0}),
    Technique("warm-up of 30 %", {"warmup": 0.3}),
    Technique("cosine decay", change="schedule", arguments={"name": "cosine"}),
    Technique("stable rate, decay in the last 30 %", change="schedule", arguments={"name": "stable"}),
    Technique("no weight decay", {"weight_decay": 0.0}),
    Technique("weight decay 0.1", {"weight_decay": 0.1}),
    Technique("no clipping", {"clip_norm": 0.0}),
    Technique("dropout 0.1", {"dropout": 0.1}),
    Technique("z-loss of 1e-4", change="z_loss"),
    Technique("moving average of the weights", change="muon", arguments={"use_ema": True, "ema_momentum": 0.98}),
    Technique("vocabulary size 2,048", {"vocabulary_size": 2048}),
    Technique("vocabulary size 8,192", {"vocabulary_size": 8192}),
)
DRAWN = (  # curves of the picture
    DEFAULT.name,
    "AdamW",
    "position embeddings from BERT's noise",
    "mask rate 0.15",
    "half the batch",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--seeds", type=int, default=3, help="runs of each technique")
    parser.add_argument("--resume", action="store_true", help="keep the runs in the results, and do those that lack")
    parser.add_argument("--only", default="", help="techniques whose name contains this, and the defaults")


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the results."""
    chosen = [each for each in TECHNIQUES if each is DEFAULT or arguments.only in each.name]
    if arguments.quick:
        chosen = [each._replace(options={"max_steps": 3, "model": "nano"} | each.options, seeds=1) for each in chosen]
        arguments.seeds = 1
    path = RESULTS / "techniques.json"
    runs = json.loads(path.read_text())["runs"] if arguments.resume else []
    done = {(run["technique"], run["seed"]) for run in runs}
    seeds = range(max(arguments.seeds, *(each.seeds for each in chosen)))
    jobs = [(each, seed) for seed in seeds for each in chosen if seed < max(arguments.seeds, each.seeds)]
    jobs = [(each, seed) for each, seed in jobs if (each.name, seed) not in done]
    free: queue.Queue[int] = queue.Queue()
    for core in cores():
        free.put(core)

    def measure(job: tuple[Technique, int]) -> None:
        technique, seed = job
        core = free.get()
        try:
            options = technique._asdict() | {"seed": seed}
            with together([Worker("benchmarks.techniques:trainer", options, cores=[core])]) as [worker]:
                run = worker()
        finally:
            free.put(core)
        print(f"{technique.name}, seed {seed}: {run['below']:.3f} nats below", file=sys.stderr, flush=True)
        with writing:
            runs.append({"technique": technique.name, "seed": seed} | run)
            if not arguments.quick:
                write_results("techniques", results)

    results, writing = {"machine": machine(), "runs": runs}, threading.Lock()
    with ThreadPoolExecutor(len(cores())) as pool:
        list(pool.map(measure, jobs))
    print(table(results), flush=True)
    if not arguments.quick:
        draw(results, ROOT / "docs/techniques.png")


def trainer(
    name: str, options: dict[str, Any], change: str, arguments: dict[str, Any], seeds: int, seed: int
) -> Callable[[], dict[str, Any]]:
    """A function that does one run of the recipe; see `benchmarks.workers`."""
    from recipes import bert_mlm

    defaults = {"replicas": 1, "batch_size": BATCH, "learning_rate": RATE, "seed": seed}
    if change:
        globals()[change](bert_mlm, **arguments)
    bert_mlm.FitLog = Timed = _timed(bert_mlm.FitLog)

    def run() -> dict[str, Any]:
        with temporary_folder() as folder:
            config = bert_mlm.Config(workdir=folder, **defaults | options)
            with contextlib.redirect_stdout(io.StringIO()):
                results = bert_mlm.train_and_evaluate(config)
            losses = [json.loads(line)["loss"] for line in Path(folder, "steps.jsonl").read_text().splitlines()]
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


def muon(recipe, one_matrix: bool = False, **settings) -> None:
    """Muon with other settings."""
    import tensorflow as tf

    from common.training import optimizers

    class Muon(optimizers.Muon):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | settings)

        def _update_kernels(self, grads_and_vars, learning_rate):
            if not one_matrix:
                super()._update_kernels(grads_and_vars, learning_rate)
                return
            for gradient, variable in grads_and_vars:
                momentum = self.momentums[self._get_variable_index(variable)]
                self.assign_add(momentum, gradient + momentum * (self.momentum - 1))
                matrix = tf.reshape(gradient + momentum * self.momentum, [_inputs(variable.shape), -1])
                update = self.lr_adjust(learning_rate * self.zeropower_via_newtonschulz5(matrix, self.ns_steps))
                self.assign_sub(variable, tf.reshape(update, variable.shape))

    optimizers.Muon = Muon


def initial(recipe, positions: float = 0.0, kernels: bool = False) -> None:
    """Position embeddings from noise of that standard deviation, or kernels by 1/sqrt(inputs)."""
    import numpy as np

    make = recipe.masked_lm_from_size

    def masked_lm_from_size(*args):
        model = make(*args)
        for variable in model.trainable_variables:
            if positions and variable.path.endswith("position_embedding/embeddings"):
                variable.assign(np.random.normal(scale=positions, size=variable.shape))
            if kernels and variable.path.endswith("kernel"):
                variable.assign(np.random.normal(scale=_inputs(variable.shape) ** -0.5, size=variable.shape))
        return model

    recipe.masked_lm_from_size = masked_lm_from_size


def _inputs(shape) -> int:
    """Of a dense kernel, or of one of KerasHub's attention: a query's [width, heads, columns], or an output's."""
    return shape[0] * shape[1] if len(shape) == 3 and shape[0] < shape[2] else shape[0]


def untied(recipe) -> None:
    """An output layer with weights of its own."""
    from keras_hub.src.models.bert import bert_masked_lm

    tied = bert_masked_lm.MaskedLMHead
    bert_masked_lm.MaskedLMHead = lambda token_embedding, **kwargs: tied(token_embedding=None, **kwargs)


def batches(recipe, rates: list[float] = (0.3, 0.3), shorter: bool = False) -> None:
    """Other training batches: a mask rate that changes by the line, or first sequences of half the length."""
    import tensorflow as tf

    own = recipe.masked_batches

    def masked_batches(config, vocabulary, sequences, scaled, split, *first_step, **shard):
        if split != "train":
            return own(config, vocabulary, sequences, scaled, split, *first_step, **shard)
        rule = recipe.MaskingRule.of(vocabulary)
        examples, size = len(sequences[split]), scaled.global_batch_size
        last = recipe.steps_per_epoch(examples, size) * config.epochs * size

        def make_batch(positions, halved):
            epochs, numbers = recipe.locate(positions, examples, size, config.seed)
            ids = recipe.read_sequences(sequences[split], numbers, rule.pad_id, trim=False)
            if halved:
                ids, epochs = tf.reshape(ids, [-1, config.seq_length // 2]), tf.repeat(epochs, 2)
                numbers = tf.repeat(numbers, 2) * 2 + tf.tile(tf.constant([0, 1], tf.int64), [size])
            rate = rates[0] + (rates[1] - rates[0]) * tf.cast(positions[0] / last, tf.float32)
            return recipe.mask_tokens(ids, recipe.mask_seeds(config.seed, epochs, numbers), rule, rate)

        middle = last // size // 2 * size if shorter else 0
        parts = [
            tf.data.Dataset.range(*part).batch(size).map(functools.partial(make_batch, halved=halved)).prefetch(8)
            for part, halved in (((0, middle), True), ((middle, last), False))
        ]
        return parts[0].concatenate(parts[1])

    recipe.masked_batches = masked_batches


def ramp(recipe) -> None:
    """Half the batch, twice as often, for the first half of the text."""
    import tensorflow as tf

    own, whole_steps = recipe.masked_batches, recipe.steps_per_epoch

    def steps_per_epoch(examples, size):
        steps = whole_steps(examples, size)
        return steps if examples < 5000 else steps * 3 // 2  # validation has fewer

    def masked_batches(config, vocabulary, sequences, scaled, split, *first_step, **shard):
        data = own(config, vocabulary, sequences, scaled, split, *first_step, **shard)
        if split != "train":
            return data
        middle = whole_steps(len(sequences[split]), scaled.global_batch_size) * config.epochs // 2

        def halves(*batch):
            return tf.data.Dataset.from_tensor_slices(
                tf.nest.map_structure(lambda leaf: tf.stack(tf.split(leaf, 2)), batch)
            )

        return data.take(middle).flat_map(halves).concatenate(data.skip(middle))

    recipe.masked_batches, recipe.steps_per_epoch = masked_batches, steps_per_epoch


def schedule(recipe, name: str) -> None:
    """Another decay of the learning rate."""
    import keras

    def cosine(peak, warmup, total):
        return keras.optimizers.schedules.CosineDecay(0.0, total - warmup, warmup_target=peak, warmup_steps=warmup)

    class Stable(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, peak, warmup, total):
            self.peak, self.warmup, self.total = peak, warmup, total

        def __call__(self, step):
            step = keras.ops.cast(step, "float32")
            left = (self.total - step) / (0.3 * self.total)
            return self.peak * keras.ops.minimum(1.0, keras.ops.minimum((step + 1) / (self.warmup + 1), left))

    recipe.WarmUpPolynomialDecay = {"cosine": cosine, "stable": Stable}[name]


def z_loss(recipe) -> None:
    """A penalty on the logits' log of the sum of exponentials, in the gradient alone: the loss stays comparable."""
    import tensorflow as tf

    class WithZ(recipe.CrossEntropy):
        def call(self, y_true, y_pred):
            z = 1e-4 * tf.reduce_logsumexp(y_pred, axis=-1) ** 2
            return super().call(y_true, y_pred) + z - tf.stop_gradient(z)

    recipe.CrossEntropy = WithZ


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
    """Curves of training."""
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
