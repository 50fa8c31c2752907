# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_replicas doctor`: verifies on this machine that N replicas compute what one device does.

It gives small models to `check`, and interrupts a run.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.checking import check
from keras_replicas.checkpoints import Checkpoints
from keras_replicas.doctor_models import batch_norm, causal, masked
from keras_replicas.gpus import gpu_names
from keras_replicas.model import data_parallel
from keras_replicas.private import CHECKED_VERSIONS, VERSIONS
from keras_replicas.strategy import make_strategy


def doctor(options: argparse.Namespace, *more: Callable[[], tuple], **packages: str) -> int:
    """Prints the machine and a row for each check as it is done, or one JSON object in the end.

    Args:
        options: `json` and `replicas` of the command line.
        *more: further functions for `check`.
        **packages: further packages, with their tested versions.

    Returns:
        The exit status, 1 if a check fails.

    Raises:
        UserError: when the devices cannot be divided so.
    """
    began = last = time.perf_counter()
    gpus = gpu_names()
    tf.get_logger().setLevel("ERROR")  # else it warns of the many small models that are traced
    machine = describe_machine(gpus, CHECKED_VERSIONS | packages)
    say = print if not options.json else lambda *_, **__: None
    say("\n".join(f"{name:12} {value}" for name, value in machine.items()), end="\n\n", flush=True)
    counts = [options.replicas] if options.replicas else [2, 4][: 1 if len(gpus) in (2, 3) else 2]
    make_strategy(max(counts), deterministic=bool(gpus))  # so that fewer can be asked for later
    checks: list[dict[str, Any]] = []
    for name, passed, found, largest in rows([masked, causal, batch_norm, *more], counts):
        now = time.perf_counter()
        say(f"{'PASS' if passed else 'FAIL'}  {name}, {now - last:.0f} s: {found}", flush=True)
        last, finite = now, largest if math.isfinite(largest) else None
        checks.append({"check": name, "passed": passed, "found": found, "largest_difference": finite})
    passed = all(row["passed"] for row in checks)
    seconds = round(last - began, 1)
    say(f"{'all passed' if passed else 'FAILED'}, in {seconds:.0f} s")
    if options.json:
        print(json.dumps({"machine": machine, "checks": checks, "passed": passed, "seconds": seconds}, indent=2))
    return 0 if passed else 1


def rows(models: list[Callable[[], tuple]], counts: list[int]) -> Iterator[tuple[str, bool, str, float]]:
    """Each check's name, whether it passed, what was found, and the largest relative difference."""
    for count, build in [(counts[0], build) for build in models] + [(count, models[0]) for count in counts[1:]]:
        result = check(build, replicas=count, steps=4)
        yield f"{build.__name__}, {count} replicas", result.same, result.text.partition("\n")[2], result.difference
    away = resumed(counts[0])
    found = f"DIFFERENT by {away:.0e}" if away else "THE SAME to the bit"
    yield "masked, interrupted in the middle of an epoch", not away, found, away


def resumed(replicas: int) -> float:
    """How far a run that was interrupted in the middle of an epoch ends from one that was not."""

    def fit(folder: str, seed: int = 0, steps: int = 0) -> np.ndarray:
        def interrupt(*_, **__):
            if model.steps_done == steps:
                raise KeyboardInterrupt

        keras.utils.set_random_seed(seed)
        with make_strategy(replicas).scope():
            model, x, y, weight = masked()
            data_parallel(model)
        kill = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
        callbacks = [Checkpoints(folder, every=3), kill]
        model.fit(x, y, 8, epochs=2, verbose=0, callbacks=callbacks, sample_weight=weight)
        return np.concatenate([np.ravel(weight) for weight in model.get_weights()])

    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(KeyboardInterrupt):
            fit(f"{folder}/interrupted", steps=14)
        away = fit(f"{folder}/interrupted", seed=1) - fit(f"{folder}/undisturbed")
    return float(np.linalg.norm(away))


def describe_machine(gpus: list[str], packages: dict[str, str]) -> dict[str, str]:
    """What the figures depend on, and whether the versions of packages are the tested ones."""
    return {
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "CPU": f"{os.cpu_count()} cores, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "GPUs": "; ".join(gpus) or "none",
        **{package: _version(package, tested) for package, tested in packages.items()},
    }


def _version(package: str, tested: str) -> str:
    version = VERSIONS.get(package) or importlib.metadata.version(package)
    is_tested = any(version.startswith(f"{minor}.") for minor in tested.split(", "))
    return f"{version} ({'tested' if is_tested else f'NOT TESTED; tested with {tested}'})"
