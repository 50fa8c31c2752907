# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_replicas doctor`: verifies on this machine that N replicas compute what one device does.

Plain Keras trains small models on one device; ours trains them from the same weights on the same batches, the last of
which does not divide evenly among the replicas. What differs is compared with what float32 may leave.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.checkpoints import Checkpoints
from keras_replicas.cluster import is_chief
from keras_replicas.comparison import BOUNDS, OPTIMIZERS, Trained, compared, train
from keras_replicas.doctor_models import BATCH, EPOCHS, EVEN, Case, cases, classifier
from keras_replicas.errors import UserError
from keras_replicas.gpus import gpu_names, gpu_shares
from keras_replicas.model import data_parallel
from keras_replicas.private import CHECKED_VERSIONS, VERSIONS
from keras_replicas.strategy import make_strategy
from keras_replicas.workers import exchange

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def doctor(
    options: argparse.Namespace,
    more: dict[str, Case] | None = None,
    module: str = "keras_replicas.doctor",
    packages: dict[str, str] | None = None,
) -> int:
    """Prints the machine and a row for each check as it is done, or one JSON object in the end.

    Args:
        options: `json`, `replicas` and `workers` of the command line.
        more: further models to train.
        module: what the workers run, which calls `work` with the same models.
        packages: further packages, with their tested versions.

    Returns:
        The exit status, 1 if a check fails.

    Raises:
        UserError: when there are fewer GPUs than workers, or the devices cannot be divided so.
    """
    began = time.perf_counter()
    gpus = gpu_names()
    gpu_shares(options.workers)
    tf.get_logger().setLevel("ERROR")  # else it warns of the many small models that are traced
    machine = describe_machine(gpus, CHECKED_VERSIONS | (packages or {}))
    say = print if not options.json else lambda *_, **__: None
    say("\n".join(f"{name:12} {value}" for name, value in machine.items()), flush=True)
    counts = [options.replicas] if options.replicas else [2, 4][: 1 if len(gpus) in (2, 3) else 2]
    make_strategy(max(counts), deterministic=bool(gpus))  # so that fewer can be asked for later
    checks: list[dict[str, Any]] = []
    width = 66
    say(f"\n{'':{width}}" + "".join(f"{measure.split()[0]:>10}" for measure in BOUNDS))
    say(f"{'bound':{width}}" + "".join(f"{bound:10.0e}" for bound in BOUNDS.values()), flush=True)
    for name, measured in rows(cases() | (more or {}), counts, options.workers, module):
        found = [
            {"check": name, "measure": measure, "measured": value, "bound": bound, "passed": value <= bound}
            for measure, (value, bound) in measured.items()
        ]
        checks += found
        figures = "".join(f"{measured[measure][0]:10.1e}" if measure in measured else " " * 10 for measure in BOUNDS)
        say(f"{name:{width}}{figures}  {'PASS' if all(row['passed'] for row in found) else 'FAIL'}", flush=True)
    passed = all(row["passed"] for row in checks)
    seconds = round(time.perf_counter() - began, 1)
    say(f"{'all passed' if passed else 'FAILED'}, in {seconds:.0f} s")
    if options.json:
        for row in checks:
            row["measured"] = row["measured"] if math.isfinite(row["measured"]) else None
        print(json.dumps({"machine": machine, "checks": checks, "passed": passed, "seconds": seconds}, indent=2))
    return 0 if passed else 1


def rows(
    cases: dict[str, Case], counts: list[int], workers: int, module: str
) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    """Each check's name, and what is measured, with its bound."""
    plain: dict[tuple[str, str], Trained] = {}
    few, most = counts[0], counts[-1]
    for name, case in cases.items():
        # SGD shows a gradient that is too large by a factor, which Adam hides.
        ways: dict[str, list[tuple[int, dict[str, Any]]]] = {"adam": [(few, {})]}
        ways["sgd"] = [(most, {}), *((few, options) for options in case.ways)]
        for optimizer in OPTIMIZERS:
            plain[name, optimizer] = train(case, optimizer)
            for replicas, options in ways[optimizer]:
                if BATCH % (replicas * options.get("accumulate", 1)) and "accumulate" in options:
                    continue  # it must divide each replica's part
                reference, given = plain[name, optimizer], case
                if "accumulate" in options:
                    given = case._replace(data={argument: values[:EVEN] for argument, values in case.data.items()})
                    reference = train(given, optimizer)
                ours = train(given, optimizer, make_strategy(replicas), **options)
                told = [name, optimizer, f"{replicas} replicas", *(f"{key}={value}" for key, value in options.items())]
                yield ", ".join(told), compared(ours, reference)
    yield (
        "classifier with dropout, interrupted, to the bit",
        {"weights": (resumed(cases["classifier"], counts[0]), 0.0)},
    )
    if workers > 1:
        for (name, optimizer), ours in by_workers(workers, module).items():
            yield f"{name}, {optimizer}, {workers} workers", compared(ours, plain[name, optimizer])


def resumed(case: Case, replicas: int) -> float:
    """How far a run that was interrupted in the middle of an epoch ends from one that was not."""

    def fit(folder: str, interrupt: int = 0) -> np.ndarray:
        keras.utils.set_random_seed(0)
        with make_strategy(replicas).scope():
            model = data_parallel(classifier(0.3))
            model.compile("adam", case.loss)
        callbacks = [Checkpoints(folder, every=3), *([Interrupt(interrupt)] if interrupt else [])]
        model.fit(**case.data, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        return np.concatenate([np.ravel(weight) for weight in model.get_weights()])

    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(KeyboardInterrupt):
            fit(f"{folder}/interrupted", interrupt=14)
        return float(np.abs(fit(f"{folder}/interrupted") - fit(f"{folder}/undisturbed")).max())


class Interrupt(keras.callbacks.Callback):
    """Ends `fit` at a step, as a kill does."""

    def __init__(self, step: int):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        """Raises `KeyboardInterrupt`."""
        if self.model.steps_done == self.step:
            raise KeyboardInterrupt


def by_workers(count: int, module: str) -> dict[tuple[str, str], Trained]:
    """What several processes train together, by model and optimizer.

    Raises:
        UserError: with the end of their log, when they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "keras_replicas", "launch", "--workers", str(count), "--log-dir", folder]
        done = subprocess.run([*launch, "-m", module, folder], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"the workers ended with status {done.returncode}: {' '.join(done.stderr.split())[-2000:]}")
        trained = pickle.loads(Path(folder, "trained").read_bytes())
        return {key: Trained(*values) for key, values in trained.items()}


def work(folder: str, cases: dict[str, Case]) -> None:
    """What a worker does: it trains with the others, and the chief writes the file `trained` to a folder."""
    strategy = make_strategy(deterministic=bool(gpu_names()))
    trained = {
        (name, optimizer): tuple(train(case, optimizer, strategy))
        for name, case in cases.items()
        for optimizer in OPTIMIZERS
    }
    if is_chief():
        Path(folder, "trained").write_bytes(pickle.dumps(trained))
    exchange({})  # before one leaves


def describe_machine(gpus: list[str], packages: dict[str, str]) -> dict[str, str]:
    """What the figures depend on, and whether the versions of packages are the tested ones."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text().split() if cpu.exists() else []
    return {
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "CPU": f"{os.cpu_count()} cores: {' '.join(feature for feature in CPU_FEATURES if feature in flags)}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "GPUs": "; ".join(gpus) or "none",
        **{package: _version(package, tested) for package, tested in packages.items()},
    }


def _version(package: str, tested: str) -> str:
    version = VERSIONS.get(package) or importlib.metadata.version(package)
    is_tested = any(version.startswith(f"{minor}.") for minor in tested.split(", "))
    return f"{version} ({'tested' if is_tested else f'NOT TESTED; tested with {tested}'})"


if __name__ == "__main__":
    work(sys.argv[1], cases())
