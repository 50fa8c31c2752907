"""The arithmetic of the benchmarks, and that they run; their figures are measured by hand, on a quiet machine."""

import argparse
import ast
import json
import subprocess
import sys
import tomllib

import pytest

from benchmarks import gpu, keras_tests, versions
from benchmarks import machine as machine_module
from keras_replicas import UserError
from keras_replicas.private import CHECKED_VERSIONS


@pytest.mark.slow
def test_what_a_reader_with_gpus_is_asked_for_runs_on_cpus():
    command = [sys.executable, "-m", "benchmarks", "gpu", "--quick"]
    found = json.loads(subprocess.run(command, cwd=machine_module.ROOT, capture_output=True, check=True).stdout)
    assert [run["replicas"] for run in found["runs"]] == [1, 2] and found["all-reduce"]["seconds"] > 0
    assert all(run["tokens_per_second"] > 0 and run["peak_memory_mb"] > 100 for run in found["runs"])


@pytest.mark.slow
def test_gpus_that_tensorflow_does_not_see_are_refused(nvidia_smi):
    nvidia_smi("GPU 0: NVIDIA H100")
    with pytest.raises(UserError, match="TensorFlow does not see this machine's GPUs"):
        gpu.main(argparse.Namespace(quick=True))


def test_a_recipe_is_timed_on_the_batches_that_it_trains_on():
    from benchmarks.ours import trainer

    options = {"corpus": "LICENSE", "vocabulary_size": 300, "model": "nano", "seq_length": 16, "replicas": 2}
    train = trainer("bert_mlm", 8, **options)
    for steps in (2, 3):
        found = train(steps=steps)
        assert found["seconds"] > 0
        assert [found[name] for name in ("steps", "examples", "slots")] == [steps, 8 * steps, 128 * steps]
        assert found["slots"] - 16 < found["tokens"] <= found["slots"]  # the last row may have padding


def test_tests_that_train_are_found_by_what_they_call_and_name():
    code = """
def build(): return Model().fit(x)

class Tests(TestCase):
    def helper(self): return build()
    def test_trains_by_a_helper(self): self.helper()
    def test_of_a_layer(self): self.run_layer_test(Dense)
    def test_of_shapes(self): assert shape(x)
"""
    found = keras_tests.tests_that_may_train(ast.parse(code))
    assert found == {"test_trains_by_a_helper", "test_of_a_layer"}


def test_what_ours_loses_is_told_with_its_reason():
    def outcome(passed):
        return {"outcome": "passed" if passed else "failed", "trains": True, "error": "so it is"}

    a, b = (1, 1, 1, 1, 1, 0), (1, 1, 0, 1, 1, 0)
    both = {"trainers/trainer_test.py::a": a, "b.py::b": b}
    of = {way: {name: outcome(each[i]) for name, each in both.items()} for i, way in enumerate(keras_tests.WAYS)}
    report = keras_tests.report(of)
    lost = {"trainers/trainer_test.py::a": "so it is"}
    assert report["lost"] == {"no strategy": {}, "1 replica": {}, "2 replicas": lost}
    assert report["others on 2 replicas"] == {"b.py::b": "so it is"}
    assert [report["all"][way] for way in keras_tests.WAYS] == [2, 2, 1, 2, 2, 0]
    assert keras_tests.line(report).endswith("without a strategy, 1 pass on two replicas by Keras, 0 by ours.")


def test_the_versions_that_pip_takes_and_that_the_library_knows_are_those_measured():
    results = json.loads((machine_module.RESULTS / "versions.json").read_text())["rows"]
    rows = results.values()
    assert [*results] == [*map(versions.name_of, versions.ENVIRONMENTS)] and not any(row["failed"] for row in rows)
    project = tomllib.loads((machine_module.ROOT / "pyproject.toml").read_text())["project"]
    for package, checked in CHECKED_VERSIONS.items():
        minors = checked.split(", ")
        assert f"{package}>={minors[0]}" in project["dependencies"]
        newest = minors[-1].split(".")  # and keras-nightly's is the one after
        of_rows = {".".join(row[package].split(".")[:2]) for row in rows}
        assert {*minors} <= of_rows <= {*minors, f"{newest[0]}.{int(newest[1]) + 1}"}
    assert all((machine_module.ROOT / file).is_file() for file in versions.FILES)
