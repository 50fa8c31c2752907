"""One process, one TensorFlow: the CPU as four logical devices, so that tests can ask for 1, 2 or 4 replicas."""

import ast
import atexit
import functools
import gc
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Before the first import of Keras and TensorFlow; children of the tests inherit them.
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="recipes-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# Ignored in the background of a script, it would be by what the tests start too.
signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


def pytest_configure(config):
    if not config.getoption("numprocesses", None):  # else this process starts others, which run the tests
        divide_the_cpu()


def divide_the_cpu():
    import keras  # noqa: F401
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    gc.freeze()  # half a million objects of what is imported, which each garbage collection would look at


@functools.cache
def collective_strategy():
    """Two replicas that reduce by collectives. A process can have but one: the numbers of two would clash."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


sys.path.insert(0, str(ROOT))


def python(*words, **options) -> subprocess.CompletedProcess:
    """A finished process of this interpreter, in the root if not told otherwise."""
    options = {"cwd": ROOT} | options
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **options)


def wait_until(condition, what: str | Path):
    """Waits ten minutes at most for a condition; then fails with what it is, or with the text of a log."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, what.read_text() if isinstance(what, Path) and what.exists() else what
        time.sleep(0.05)


def on_replicas(*layers, strategy=None, optimizer="sgd", loss="mse", accumulate=1, **options):
    """A compiled data-parallel model of layers without variables yet, on two replicas; its optimizer by a function."""
    import keras

    from keras_replicas import data_parallel, make_strategy

    with (strategy or make_strategy(2)).scope():
        model = data_parallel(keras.Sequential, accumulate=accumulate)(list(layers))
        model.compile(optimizer if isinstance(optimizer, str) else optimizer(), loss, **options)
    return model


def assert_same(ours, theirs, rtol=0.0, atol=0.0):
    """As many arrays, with the same numbers, or within a tolerance."""
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol, atol)


def slow(*values):
    """Of a test's parameters, those that are not in the quick tier."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def long(*values):
    """Of a test's parameters, those that run before a release."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def interrupt_at(step):
    """A callback that ends `fit` after that step, as a kill does."""
    import keras

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.steps_done >= step:
                raise KeyboardInterrupt

    return Interrupt()


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of each file in a folder, by its path there."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def imported(code: str, package: str = "") -> set[str]:
    """The modules that code imports, and, as `module.name`, what it takes from them; no relative ones if no package."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= {module, *(f"{module}.{each.name}" for each in node.names)}
    return names


@pytest.fixture(scope="session")
def no_tensorflow(tmp_path_factory) -> dict[str, str]:
    """The environment of a process in which importing TensorFlow fails."""
    folder = tmp_path_factory.mktemp("no_tensorflow")
    (folder / "tensorflow.py").write_text("raise ImportError('TensorFlow must not be imported')")
    return os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.fixture(scope="session")
def wikitext(tmp_path_factory) -> Path:
    """A folder in WikiText's form, with a test split: lines of LICENSE, the same with every version of Python."""
    folder = tmp_path_factory.mktemp("wikitext")
    lines = [line.strip() for line in (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines() if line.strip()]
    draw = random.Random(0).random  # of all that Python draws, this one never changes
    for name, articles in (("train", 10), ("valid", 2), ("test", 1)):
        with (folder / f"wiki.{name}.tokens").open("w", encoding="utf-8") as file:
            for number in range(articles):
                text = "\n".join(lines[int(len(lines) * draw())] for _ in range(10 + int(30 * draw())))
                file.write(f" = Article {number} = \n \n {text.replace(' is ', ' <unk> ')}\n")
    return folder


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Makes the program answer with some words; the machine that runs this has no GPU."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def answer(*lines, status=0):
        command = tmp_path / "nvidia-smi"
        command.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {status}\n")
        command.chmod(0o755)

    return answer


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The cache of a test's own, which is not made yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/keras-data-parallel-recipes"


# Tests that may be skipped, by node id. Anything else that is skipped fails the run where CI is set.
MAY_BE_SKIPPED = {
    # This needs leave to mount a file system, which containers often do not have.
    "tests/test_checkpoints.py::test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so",
    # And these to make network namespaces.
    "tests/test_schedulers.py::test_the_pods_of_the_manifest_train_together",
    "tests/test_faults.py::test_a_run_ends_as_if_nothing_had_happened[network cut between two hosts]",
}


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not reporter:  # one of several processes, which report to the first
        return
    skipped = {report.nodeid for report in reporter.stats.get("skipped", [])} - MAY_BE_SKIPPED
    if skipped and os.environ.get("CI"):
        reporter.write_line(f"skipped, and not on the list in tests/conftest.py: {sorted(skipped)}", red=True)
        session.exitstatus = 1
