# SPDX-License-Identifier: Apache-2.0
"""Keras's own tests that train, by Keras's trainer and by ours: without a strategy, with one replica, with two.

    python -m benchmarks keras_tests

takes the test files of the installed Keras that call `fit`, `evaluate`, `predict`, one of the `*_on_batch` methods, or
`run_layer_test`, which trains a layer; but not those of other backends. It runs copies of them six times: by Keras and
by ours, each as they are, and with each test's body inside the scope of a `MirroredStrategy` of one replica and of two.
Copies, because what is defined in them is then a user's, not Keras's. Ours is the trainer of `keras_replicas.model` in
the place of Keras's among the bases of `keras.Model`.

What counts are all tests of the trainer's own file, and those of the other files that compile a model or call one of
these methods when plain Keras runs them. Each begins with the same seed. One that takes longer than ten minutes fails,
and so does one that ends its process. A process that holds much memory is followed by another.

`pip install -e '.[test]'` has the packages that most tests want, JAX and Grain; some want PyTorch or Orbax. Results go
to `benchmarks/results/keras_tests.json`.
"""

import argparse
import ast
import collections
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, cores, machine, write_results

OTHER_BACKENDS = ("backend/jax/", "backend/torch/", "backend/numpy/", "backend/openvino/")
PLAIN = "keras, no strategy"
METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
ALL_COUNT = "trainers/trainer_test.py"  # of the others, tests that compile a model or call one of the methods
STRATEGIES = ("no strategy", "1 replica", "2 replicas")
WAYS = tuple(f"{whose}, {strategy}" for whose in ("keras", "ours") for strategy in STRATEGIES)
TWO = WAYS[-1]
AGAIN = 75  # exit code of a process that holds much memory
CHUNKS = 5  # of the files of each way, but for those that have a process each
# Why tests that Keras's trainer passes do not pass with ours, by parts of their names.
REASONS = {
    "test_retracing": "counts how often Python runs a model's own `train_step`; ours runs it on a few examples first",
    "test_steps_per_execution_steps_per_epoch_match_multi_epoch": "asserts that an epoch of 5 steps, 2 a call, has 6; "
    "ours has 5",
}


def source() -> Path:
    """The folder of the installed Keras's source; Keras is not imported."""
    return Path(importlib.util.find_spec("keras").submodule_search_locations[0], "src")


def find_files() -> dict[str, list[str]]:
    """The test files that train, by their path in Keras's source; of each, the test functions that may train."""
    found = {}
    for path in sorted(source().rglob("*_test.py")):
        file = path.relative_to(source()).as_posix()
        if not file.startswith(OTHER_BACKENDS):
            tests = tests_that_may_train(ast.parse(path.read_text()))
            if tests:
                found[file] = sorted(tests)
    return found


def tests_that_may_train(tree: ast.Module) -> set[str]:
    """Those that call one of the methods, or name a function or class of their file that may train."""
    nodes = collections.defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] += ast.walk(node)
    trains = {
        name
        for name, inner in nodes.items()
        for node in inner
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {*METHODS, "run_layer_test"}
    }
    named = {name: {getattr(node, "attr", getattr(node, "id", "")) for node in inner} for name, inner in nodes.items()}
    while more := {name for name in named if name not in trains and named[name] & trains}:
        trains |= more
    return {name for name in (nodes if "setUp" in trains else trains) if name.startswith("test")}


def run(ways: tuple[str, ...], files: dict[str, list[str]], folder: Path, only: str = "", processes: int = 1) -> None:
    """Runs what the folder's records lack; plain Keras without a strategy must have run, but for the trainer's file."""
    if PLAIN not in ways:
        trained = {name for name, of in outcomes(PLAIN, folder).items() if of["trains"]}
        files = {file: sorted(name for name in trained if name.startswith(f"{file}::")) for file in files}
        files = {file: chosen for file, chosen in files.items() if chosen or file == ALL_COUNT}
    jobs = [(way, chunk) for chunk in chunks(files) for way in ways]
    with ThreadPoolExecutor(processes) as pool:
        done = [pool.submit(_run_chunk, way, chunk, folder, only) for way, chunk in jobs]
        for each in done:
            each.result()


def chunks(files: dict[str, list[str]]) -> list[dict[str, list[str]]]:
    """The files by process; the trainer's and those that set up TensorFlow anew have one each."""
    alone = [file for file in files if file == ALL_COUNT or "_reset_context" in (source() / file).read_text()]
    rest = sorted((file for file in files if file not in alone), key=lambda file: -(source() / file).stat().st_size)
    together = [rest[first::CHUNKS] for first in range(CHUNKS)]
    return [{file: files[file] for file in chunk} for chunk in [*([file] for file in alone), *together] if chunk]


def outcomes(way: str, folder: Path) -> dict[str, dict[str, Any]]:
    """How each test ended, by name; the folder is that of `run`."""
    lines = [line for record in sorted((folder / way).glob("*.jsonl")) for line in read(record)]
    return {line["test"]: line for line in lines if "outcome" in line}


def record_name(file: str) -> str:
    """The name of the file where the outcomes of a test file's tests are kept."""
    return file.replace("/", "__").replace(".py", ".jsonl")


def read(record: Path) -> list[dict[str, Any]]:
    """The lines of a record."""
    if not record.exists():
        return []
    return [json.loads(line) for line in record.read_text().splitlines()]


def _run_chunk(way: str, files: dict[str, list[str]], folder: Path, only: str) -> None:
    """Runs the files in a process, and what is left in another one if it ends before."""
    records = folder.resolve() / way
    records.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.keras_process", way, str(records), str(source()), "--only", only]
    with open(records / f"{record_name(next(iter(files)))}.log", "a") as log:
        while True:
            done = subprocess.run(command, cwd=ROOT, input=json.dumps(files), text=True, stdout=log, stderr=log)
            if done.returncode == 0:
                break
            if done.returncode != AGAIN and not _note_crash(records, files, done.returncode):
                raise SystemExit(f"a process failed before its first test:\n{Path(log.name).read_text()[-3000:]}")
    broken = [file for file in files if "broken" in read(records / record_name(file))[-1]]
    if broken and way != PLAIN:  # plain Keras's process has shown that what these files import is there
        raise SystemExit(f"pytest itself failed in {', '.join(broken)}:\n{Path(log.name).read_text()[-3000:]}")


def _note_crash(records: Path, files: dict[str, list[str]], code: int) -> bool:
    """Whether there is a test in which the process ended; it has failed."""
    for file in files:
        last = read(records / record_name(file))[-1:]
        if last and "test" in last[0] and "outcome" not in last[0]:
            crash = {**last[0], "outcome": "failed", "trains": True, "error": f"the process ended with code {code}"}
            with open(records / record_name(file), "a") as out:
                out.write(json.dumps(crash) + "\n")
            return True
    return False


def report(of: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The counts, and the tests that ours loses, from the outcomes by way."""
    counted = {name for name, each in of[PLAIN].items() if each["trains"]}
    passed = {
        way: {name for name in counted if of[way].get(name, {}).get("outcome") == "passed"} for way in WAYS if way in of
    }
    of_trainer = {name for name in counted if name.startswith(ALL_COUNT)}
    lost = {
        strategy: {
            name: reason(of, f"ours, {strategy}", name)
            for name in sorted(passed[f"keras, {strategy}"] - passed[f"ours, {strategy}"])
        }
        for strategy in STRATEGIES
    }
    return {
        "files": len({name.split("::")[0] for name in counted}),
        "tests": len(counted),
        "trainer": {way: len(passed[way] & of_trainer & passed[PLAIN]) for way in passed},
        "all": {way: len(passed[way] & passed[PLAIN]) for way in passed},
        "lost": lost,
        "others on 2 replicas": {
            name: reason(of, TWO, name) for name in sorted(passed[PLAIN] - passed[TWO] - passed["keras, 2 replicas"])
        },
    }


def reason(of: dict[str, dict[str, dict[str, Any]]], way: str, name: str) -> str:
    """Why a test does not pass: what is known, or what the error says."""
    known = next((why for part, why in REASONS.items() if part in name), None)
    each = of[way].get(name, {"outcome": "not run"})
    return known or each.get("error") or each["outcome"]


def line(results: dict[str, Any]) -> str:
    """What the README says of the results."""
    passed = results["trainer"]
    return (
        f"Of {passed[PLAIN]} tests of Keras's own trainer that pass without a strategy, "
        f"{passed['keras, 2 replicas']} pass on two replicas by Keras, {passed[TWO]} by ours."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--only", default="", metavar="REGEX", help="only tests whose name matches; nothing is kept")


def main(arguments: argparse.Namespace) -> None:
    """Runs all, prints the counts and what ours loses, and writes the file."""
    of, began = machine(), time.perf_counter()
    only = arguments.only or ("TestTrainer::test_fit_flow" if arguments.quick else "")
    files = {file: tests for file, tests in find_files().items() if file == ALL_COUNT or not arguments.quick}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run((PLAIN,), files, folder, only, len(cores()))
        run(WAYS[1:], files, folder, only, len(cores()))
        found = report({way: outcomes(way, folder) for way in WAYS})
    print(f"{found['tests']} tests in {found['files']} files; passed, of those of the trainer and of all:")
    for way in WAYS:
        print(f"  {way:20} {found['trainer'][way]:5} {found['all'][way]:6}")
    for strategy, tests in found["lost"].items():
        print(f"Passed by Keras's trainer with {strategy}, not by ours: {len(tests)}")
        for name, why in tests.items():
            print(f"  {name}: {why}")
    print(f"Passed by Keras's without a strategy, by neither with 2 replicas: {len(found['others on 2 replicas'])}")
    for name, why in found["others on 2 replicas"].items():
        print(f"  {name}: {why}")
    if not only:
        minutes = round((time.perf_counter() - began) / 60)
        write_results("keras_tests", {"machine": of, "minutes": minutes, **found})
