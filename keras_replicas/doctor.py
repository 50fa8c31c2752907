# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_replicas doctor`: verifies on this machine that N replicas compute what one device would.

Small models of Keras's layers train for 20 steps, the last of which has fewer examples than replicas. The measure is
plain Keras on one device.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import keras_replicas as kr
from keras_replicas.gpus import gpu_names
from keras_replicas.private import CHECKED_VERSIONS

EXAMPLES, BATCH, LENGTH, CLASSES, WORDS = 155, 8, 10, 3, 40
# Relative differences, by the Euclidean norm, that float32 may leave: of all weights, and of each tensor of them.
BOUNDS = {"loss of every step": 1e-6, "weights": 1e-6, "every weight": 1e-5, "evaluate": 1e-6, "predict": 1e-6}
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, 6)).astype(np.float32)
Y = RANDOM.integers(0, CLASSES, EXAMPLES)
IDS = RANDOM.integers(1, WORDS, (EXAMPLES, LENGTH)).astype(np.int32)
MASKED = (RANDOM.uniform(size=IDS.shape) < 0.3).astype(np.float32)  # the weight of each label


class TiedModel(keras.Model):
    """A masked language model whose table of embeddings is its output layer too."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(WORDS, 12)
        self.hidden = keras.layers.Dense(12, activation="gelu")
        self.norm = keras.layers.LayerNormalization()

    def call(self, ids):
        """Logits, [batch, length, words]."""
        hidden = self.norm(self.hidden(self.table(ids)))
        return hidden @ ops.transpose(ops.convert_to_tensor(self.table.embeddings))


def causal() -> keras.Model:
    """A causal language model."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 12)(ids)
    x += keras.layers.MultiHeadAttention(2, 6, use_bias=False)(x, x, use_causal_mask=True)
    return keras.Model(ids, keras.layers.Dense(WORDS)(x))


def dense(*layers: keras.layers.Layer) -> keras.Model:
    """A classifier with these layers inside."""
    return keras.Sequential([keras.layers.Dense(12, activation="tanh"), *layers, keras.layers.Dense(CLASSES)])


MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[np.ndarray, ...]]] = {
    "classifier": (dense, (X, Y)),
    "masked, with a tied table": (TiedModel, (IDS, (IDS + 1) % WORDS, MASKED)),
    "causal": (causal, (IDS, np.roll(IDS, -1, axis=1))),
    "BatchNormalization": (lambda: dense(keras.layers.BatchNormalization()), (X, Y)),
}
OPTIMIZERS = {"SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "Adam": lambda: keras.optimizers.Adam(0.01)}


class Way(NamedTuple):
    """How a model is trained."""

    name: str
    replicas: int
    optimizer: str = "SGD"
    accumulate: int = 1
    options: dict[str, Any] = {}  # of `compile`


WITHOUT_TABLES = ("classifier", "BatchNormalization")
WAYS = (Way("2 replicas", 2), Way("4 replicas", 4), Way("2 replicas, Adam", 2, "Adam"))
MORE = {  # ways in which one model is trained too
    "masked, with a tied table": (
        Way("2 replicas, XLA", 2, options={"jit_compile": True}),
        Way("2 replicas, accumulate=2", 2, accumulate=2),
    ),
    "BatchNormalization": (Way("2 replicas, 7 steps a call", 2, options={"steps_per_execution": 7}),),
}


class Steps(keras.callbacks.Callback):
    """Keeps the loss of every step."""

    def __init__(self):
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        """Takes the losses of the steps since the last call."""
        self.losses += self.model.step_values["loss"].tolist()


def train(make: Callable[[], keras.Model], data: tuple[np.ndarray, ...], way: Way, strategy: Any) -> dict[str, Any]:
    """Trains a model of ours; returns numbers by name."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[way.optimizer](), loss, **way.options)
        model = kr.data_parallel(model, accumulate=way.accumulate)
    steps, batches = Steps(), kr.Batches(part_of(data, way), BATCH, shuffle=False)
    model.fit(batches, epochs=1, verbose=0, callbacks=[steps])
    return {"loss of every step": steps.losses} | outcome(model, data)


def reference(make: Callable[[], keras.Model], data: tuple[np.ndarray, ...], way: Way) -> dict[str, Any]:
    """The same by plain Keras on one device."""
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(OPTIMIZERS[way.optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = part_of(data, way)
    steps = [slice(start, start + BATCH) for start in range(0, len(tf.nest.flatten(rows)[0]), BATCH)]
    batches = [rows_of(rows, step) for step in steps]
    losses = [model.train_on_batch(*batch, return_dict=True)["loss"] for batch in batches]
    return {"loss of every step": losses} | outcome(model, data)


def part_of(data: tuple[np.ndarray, ...], way: Way) -> tuple[np.ndarray, ...]:
    """The rows to train on: `accumulate` divides full batches only."""
    return rows_of(data, slice(EXAMPLES // BATCH * BATCH)) if way.accumulate > 1 else data


def rows_of(data: Any, rows: slice) -> Any:
    """Some rows of each array."""
    return keras.tree.map_structure(lambda array: array[rows], data)


def outcome(model: keras.Model, data: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """What a trained model has and computes."""
    scores = model.evaluate(*data[:2], BATCH, 0, *data[2:], return_dict=True)
    predicted = model.predict(data[0], BATCH, verbose=0)
    return {"weights": model.get_weights(), "evaluate": scores["loss"], "predict": predicted}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Relative differences, by the names of `BOUNDS`."""
    found = {name: max(relative(a, b) for a, b in pairs(ours[name], theirs[name])) for name in ours}
    found["every weight"] = found["weights"]
    away = np.concatenate([np.ravel(np.subtract(a, b)) for a, b in pairs(ours["weights"], theirs["weights"])])
    size = np.concatenate([np.ravel(b) for b in theirs["weights"]])
    return found | {"weights": float(np.linalg.norm(away) / np.linalg.norm(size))}


def pairs(ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    """The arrays and numbers of two structures."""
    return [*zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True)]


def relative(ours: Any, theirs: Any) -> float:
    """The difference of two arrays or numbers, relative to the second."""
    return float(np.linalg.norm(np.subtract(ours, theirs)) / (np.linalg.norm(theirs) or 1.0))


def rows(models: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Trains every model in every way, and yields a row for each."""
    most = 2 if len(tf.config.list_physical_devices("GPU")) in (2, 3) else 4  # several GPUs are not split
    kr.make_strategy(most)  # so that fewer can be asked for later
    for name, (make, data) in models.items():
        plain: dict[tuple, Any] = {}
        for way in (*WAYS, *MORE.get(name, ())):
            if way.replicas > most:
                continue
            key = way.optimizer, way.accumulate
            if key not in plain:
                # Of a table, plain Keras's Adam squares the gradients of a row one by one.
                tables = way.optimizer == "Adam" and name not in WITHOUT_TABLES
                one = tf.distribute.get_strategy()
                plain[key] = train(make, data, way, one) if tables else reference(make, data, way)
            ours = train(make, data, way, kr.make_strategy(way.replicas))
            yield row(f"{name}: {way.name}", differences(ours, plain[key]))
    yield row("resumed after an interruption, against undisturbed", {"weights": resumed()}, {"weights": 0.0})


def row(check: str, measured: dict[str, float], bounds: dict[str, float] = BOUNDS) -> dict[str, Any]:
    """One line of the result."""
    passed = all(value <= bounds[name] for name, value in measured.items())
    return {"check": check, "measured": measured, "bounds": bounds, "passed": passed}


def resumed() -> float:
    """How far a run that was interrupted in the middle of an epoch ends from one that was not."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.steps_done == 25:
                raise KeyboardInterrupt

    def fit(folder, *callbacks):
        keras.utils.set_random_seed(0)
        with kr.make_strategy(2).scope():
            model = dense(keras.layers.Dropout(0.3))
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            kr.data_parallel(model)
        model.fit(X, Y, BATCH, 2, verbose=0, callbacks=[kr.Checkpoints(folder, every=3), *callbacks])
        return model.get_weights()

    with tempfile.TemporaryDirectory() as folder:
        undisturbed = fit(f"{folder}/a")
        try:
            fit(f"{folder}/b", Interrupt())
        except KeyboardInterrupt:
            return max(relative(a, b) for a, b in pairs(fit(f"{folder}/b"), undisturbed))
    return float("inf")


def worker(folder: str) -> None:
    """What each of several workers runs: trains the models; the chief writes the outcome."""
    strategy = kr.make_strategy(1)
    for number, (make, data) in enumerate(MODELS.values()):
        found = train(make, data, Way("workers", 1), strategy)
        if kr.is_chief():
            leaves = tf.nest.flatten(found)
            np.savez(f"{folder}/{number}.npz", **{f"{i:03}": leaf for i, leaf in enumerate(leaves)})


def rows_of_workers(count: int) -> Iterator[dict[str, Any]]:
    """Trains on several workers of this machine, and yields a row for each model."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "keras_replicas", "launch", "--workers", str(count), "--log-dir", folder]
        ended = subprocess.run([*launch, "-m", "keras_replicas.doctor", folder], capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"training on {count} workers ended with {ended.returncode}: {ended.stderr}")
        for number, (name, (make, data)) in enumerate(MODELS.items()):
            theirs = reference(make, data, WAYS[0])
            with np.load(f"{folder}/{number}.npz") as file:
                ours = tf.nest.pack_sequence_as(theirs, [file[leaf] for leaf in sorted(file.files)])
            yield row(f"{name}: {count} workers", differences(ours, theirs))


def machine() -> dict[str, str]:
    """What the figures depend on, and whether the package versions are checked ones."""
    found = {name: importlib.metadata.version(name) for name in CHECKED_VERSIONS}
    versions = {
        name: f"{version} ({'checked' if version.startswith(f'{CHECKED_VERSIONS[name]}.') else 'NOT CHECKED'})"
        for name, version in found.items()
    }
    system = f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores"
    return {"system": system, "GPUs": "; ".join(gpu_names()) or "none", **versions}


def doctor(as_json: bool = False, workers: int = 1, models: dict[str, Any] = MODELS) -> int:
    """Prints the machine, and a row for each check as it is done, or one JSON object; returns 1 if a check fails."""
    began, about, found = time.perf_counter(), machine(), []
    if not as_json:
        print(*(f"{name:12} {value}" for name, value in about.items()), sep="\n", flush=True)
    every: list[Iterable[dict]] = [rows(models), *([rows_of_workers(workers)] if workers > 1 else [])]
    for each in (each for part in every for each in part):
        found.append(each)
        if not as_json:
            shown = ", ".join(f"{name} {value:.0e}" for name, value in each["measured"].items())
            print(f"{'PASS' if each['passed'] else 'FAIL'}  {each['check']}: {shown}", flush=True)
    passed, seconds = all(each["passed"] for each in found), round(time.perf_counter() - began, 1)
    if as_json:
        print(json.dumps({"machine": about, "checks": found, "passed": passed, "seconds": seconds}, indent=2))
    else:
        print(f"{'all passed' if passed else 'FAILED'}, in {seconds:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":  # started by `rows_of_workers`
    worker(sys.argv[1])
