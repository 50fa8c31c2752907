# SPDX-License-Identifier: Apache-2.0
"""One process of `keras_tests`: runs files of Keras's tests in one way, and keeps how each test ended."""

import argparse
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import json
import os
import re
import signal
import sys
import time
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.keras_tests import AGAIN, ALL_COUNT, METHODS, PLAIN, read, record_name

SECONDS = 600  # for a test
MEMORY_GIB = 5  # that the process may hold before the next test


class Outcomes:
    """A plugin of pytest that chooses tests, notes how each ended, and ends those that take too long."""

    def __init__(self, only: str):
        self.only = only
        self.file = ""
        self.record = Path()
        self.chosen: Callable[[str, str], bool] = lambda name, test: True
        self.current: dict[str, Any] = {}
        self.scope: Callable = contextlib.nullcontext

    def begin_file(self, file: str, record: Path, chosen: Callable[[str, str], bool]) -> None:
        """Prepares for the tests of a file."""
        self.file, self.record, self.chosen = file, record, chosen

    def note(self, **what: Any) -> None:
        """Adds a line to the file's record."""
        with open(self.record, "a") as out:
            out.write(json.dumps(what) + "\n")

    def pytest_collection_modifyitems(self, items):
        """Leaves out what is not to be run."""
        done = {line["test"] for line in read(self.record) if "outcome" in line}
        names = {item: self._name(item) for item in items}
        items[:] = [
            item
            for item in items
            if names[item] not in done and re.search(self.only, names[item]) and self.chosen(names[item], item.name)
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        """Begins each test alike, and sets two alarms: the second for code that hears no signals."""
        import keras

        name = self._name(item)
        self.note(test=name)
        self.current = {"outcome": "passed", "trains": self.file == ALL_COUNT}
        began = time.perf_counter()
        keras.utils.set_random_seed(0)
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(SECONDS)
        faulthandler.dump_traceback_later(SECONDS + 60, exit=True)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            self.note(test=name, seconds=round(time.perf_counter() - began, 2), **self.current)
            if _held_gib() > MEMORY_GIB:
                os._exit(AGAIN)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self):
        """A test that is a function has no `setUp`, which would enter the scope."""
        with self.scope():
            return (yield)

    def pytest_runtest_logreport(self, report):
        """Keeps the outcome, and what went wrong."""
        if report.outcome != "passed" and self.current["outcome"] != "failed":
            self.current["outcome"] = report.outcome
        if report.failed and "error" not in self.current:
            self.current["error"] = _first_lines(report)
            self.current["details"] = str(report.longrepr)[-4000:]

    def _name(self, item) -> str:
        return f"{self.file}::{item.nodeid.split('::', 1)[1]}"


def run_files(files: list[str], way: str, folder: Path, chosen: dict[str, list[str]], only: str, source: Path) -> None:
    """Runs those tests of the files that their records lack."""
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_DEFAULT_DTYPE_BITS": "32"}
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401 - TensorFlow must not be imported before it
    if importlib.util.find_spec("jax") is None:
        sys.modules["jax"] = types.ModuleType("jax")  # files import it, for tests of another backend
    outcomes = Outcomes(only)
    _prepare(way, outcomes)
    for file in files:
        record = folder / record_name(file)
        if any("finished" in line for line in read(record)):
            continue
        copy = folder / "copies" / file.replace("/", "__")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((source / file).read_text())
        outcomes.begin_file(file, record, _chooser(file, way, chosen[file]))
        # Other styles of traceback parse the code, which Python 3.11 cannot do where JAX is told of its garbage.
        options = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "--no-header", "--tb=native", "-W", "ignore"]
        code = pytest.main([*options, str(copy)], plugins=[outcomes])
        known = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        outcomes.note(finished=file, **({} if code in known else {"broken": int(code)}))


def _chooser(file: str, way: str, chosen: list[str]) -> Callable[[str, str], bool]:
    """Plain Keras runs tests whose names begin with one of these; the other ways, those that trained then."""
    if file == ALL_COUNT:
        return lambda name, test: True
    if way == PLAIN:
        return lambda name, test: test.startswith(tuple(chosen))
    return lambda name, test: name in chosen


def _prepare(way: str, outcomes: Outcomes) -> None:
    """The devices, the trainer, and the scope of each test."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
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
    if way == PLAIN:
        for name in ("compile", *METHODS):
            defines = next(base for base in trainer.TensorFlowTrainer.__mro__ if name in vars(base))
            setattr(defines, name, _noting(getattr(defines, name), outcomes))
    replicas = re.search(r"\d", way)
    if replicas:
        _put_tests_in_scope(["CPU:0", "CPU:1"][: int(replicas[0])], outcomes)
    gc.freeze()  # half a million objects of what is imported, which each garbage collection would look at


def _noting(method: Callable, outcomes: Outcomes) -> Callable:
    """The method, which tells that the test trains."""

    @functools.wraps(method)
    def noting(*args, **kwargs):
        outcomes.current["trains"] = True
        return method(*args, **kwargs)

    return noting


def _put_tests_in_scope(devices: list[str], outcomes: Outcomes) -> None:
    """After the `setUp` of Keras's test case, which leaves every scope; of other tests, around the body."""
    import tensorflow as tf
    from keras.src import testing

    set_up, call = testing.TestCase.setUp, unittest.TestCase._callTestMethod

    @contextlib.contextmanager
    def scope():
        reduce = tf.distribute.ReductionToOneDevice()
        entered = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduce).scope()
        entered.__enter__()
        try:
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # the test itself has left every scope
                entered.__exit__(None, None, None)

    def set_up_in_scope(self):
        set_up(self)
        entered = scope()
        entered.__enter__()
        self.addCleanup(entered.__exit__, None, None, None)

    def call_in_scope(self, method):
        with contextlib.nullcontext() if isinstance(self, testing.TestCase) else scope():
            return call(self, method)

    testing.TestCase.setUp = set_up_in_scope
    unittest.TestCase._callTestMethod = call_in_scope
    outcomes.scope = scope


def _first_lines(report) -> str:
    """What an error says first."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [line.strip() for line in str(crash.message if crash else report.longrepr).split("\n") if line.strip()]
    return " ".join(lines[:4])[:300]


def _held_gib() -> float:
    return int(re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20


def _too_long(*_):
    raise TimeoutError(f"took longer than {SECONDS} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way")
    parser.add_argument("folder", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    chosen_of = json.load(sys.stdin)
    run_files(list(chosen_of), given.way, given.folder, chosen_of, given.only, given.source)
