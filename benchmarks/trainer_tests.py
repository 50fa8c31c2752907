# SPDX-License-Identifier: Apache-2.0
"""Keras's own tests of `fit` and the rest, with and without a strategy, by Keras's trainer and by ours.

    python -m benchmarks trainer_tests

runs a copy of the installed Keras's `trainer_test.py` three times, each in a process of its own: as it is; with each
test's body inside the scope of a `MirroredStrategy` of two replicas; and so again with the trainer of
`keras_replicas.model` in the place of Keras's. A copy, because what is defined in it is then a user's, not Keras's. A
test that takes longer than ten minutes fails. `pip install -e '.[test]'` has the packages that most tests want, JAX and
Grain; three need PyTorch. Results go to `benchmarks/results/trainer_tests.json`.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

from benchmarks.machine import machine

RESULTS = Path(__file__).parent / "results" / "trainer_tests.json"
WAYS = ("keras, no strategy", "keras, 2 replicas", "ours, 2 replicas")
SECONDS = 600  # for a test
PASSED_AT_LEAST = 155  # by the last way, of 173, without PyTorch; tests/test_keras_trainer.py holds it
# Why tests that pass without a strategy do not pass with ours, by the beginning of their names.
REASONS = {
    "test_steps_per_execution_steps_per_epoch_match_multi_epoch": "asserts that an epoch of 5 steps, 2 a call, has 6; "
    "ours has 5",
}


class Outcomes:
    """A plugin of pytest that notes how each test ended, and ends those that take too long."""

    def __init__(self):
        self.of: dict[str, dict[str, str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        """Sets the alarm."""
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(SECONDS)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report):
        """Notes the outcome, and the first line of what went wrong."""
        name = report.nodeid.split("::", 1)[1]
        if report.when == "call" or report.outcome != "passed":
            self.of[name] = {"outcome": report.outcome}
            if report.failed:
                self.of[name]["error"] = str(report.longrepr.reprcrash.message).split("\n")[0][:200]


def run_tests(way: str) -> dict[str, dict[str, str]]:
    """Runs the tests in this process; returns the `outcome` and `error` of each, by name."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if importlib.util.find_spec("jax") is None:
        sys.modules["jax"] = types.ModuleType("jax")  # the file imports it, for tests of another backend
    from keras.src import testing
    from keras.src.backend.tensorflow import trainer
    from keras.src.models.model import Model
    from tensorflow.python.data.ops import multi_device_iterator_ops

    distribute = tf.distribute.Strategy.experimental_distribute_dataset
    on_device = multi_device_iterator_ops._create_device_dataset
    # The threads that tune data sets, and their copies on the devices, can take a minute to end.
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    tf.distribute.Strategy.experimental_distribute_dataset = lambda strategy, dataset, options=None: distribute(
        strategy, dataset.with_options(untuned), options
    )
    multi_device_iterator_ops._create_device_dataset = lambda *arguments: on_device(*arguments).with_options(untuned)
    if way.startswith("ours"):
        from keras_replicas.model import Trainer

        Model.__bases__ = tuple(Trainer if base is trainer.TensorFlowTrainer else base for base in Model.__bases__)
        trainer.TensorFlowTrainer = Trainer
    if "2 replicas" in way:
        reduce = tf.distribute.ReductionToOneDevice()
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=reduce)
        set_up = testing.TestCase.setUp

        def in_scope(self):
            set_up(self)
            scope = strategy.scope()
            scope.__enter__()
            self.addCleanup(scope.__exit__, None, None, None)

        testing.TestCase.setUp = in_scope
    outcomes = Outcomes()
    # Other styles of traceback parse the code, which Python 3.11 cannot do where JAX is told of its garbage.
    options = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "--no-header", "--tb=native", *sys.argv[2:]]
    with tempfile.TemporaryDirectory() as folder:
        path = shutil.copy(importlib.util.find_spec("keras.src.trainers.trainer_test").origin, folder)
        if pytest.main([*options, path], plugins=[outcomes]) > pytest.ExitCode.TESTS_FAILED:
            raise SystemExit("pytest itself failed")
    return outcomes.of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This benchmark has no options of its own."""


def main(arguments: argparse.Namespace) -> None:
    """Runs all, prints the counts, and writes the file."""
    results = {}
    chosen = ["-k", "test_fit_flow"] if arguments.quick else []
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.trainer_tests", way, *chosen]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[way] = json.loads(done.stdout.splitlines()[-1])
    passed = {way: [name for name, of in results[way].items() if of["outcome"] == "passed"] for way in WAYS}
    plain = passed[WAYS[0]]
    for way in WAYS:
        print(f"{way:20} {sum(name in plain for name in passed[way])} of {len(plain)}")
    others = {
        way: {
            name: _reason(way, name) or results[way][name].get("error", "") for name in plain if name not in passed[way]
        }
        for way in WAYS
    }
    for name, reason in others[WAYS[2]].items():
        print(f"  {name}: {reason}")
    report = {way: {"passed": sum(name in plain for name in passed[way]), "not passed": others[way]} for way in WAYS}
    if not arguments.quick:
        found = {"tests": len(results[WAYS[0]]), "machine": machine(), **report}
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")


def line(results: dict) -> str:
    """What docs/exactness.md says of the results."""
    plain, theirs, ours = (results[way]["passed"] for way in WAYS)
    return (
        f"Of Keras's tests of its own trainer, copied as a user's file, {plain} pass without a strategy; "
        f"{theirs} of them with two replicas, {ours} with ours."
    )


def _reason(way: str, name: str) -> str:
    known = REASONS if way == WAYS[2] else {}
    return next((reason for start, reason in known.items() if f"::{start}" in name), "")


def _too_long(*_):
    raise TimeoutError(f"took longer than {SECONDS} s")


if __name__ == "__main__":
    print("\n" + json.dumps(run_tests(sys.argv[1])))
