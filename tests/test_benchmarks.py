"""The arithmetic of the benchmarks, and that they run; their figures are measured by hand, on a quiet machine."""

import argparse
import ast
import json
import math
import os
import subprocess
import sys
import tomllib

import pytest

from benchmarks import compare, first_steps, gpu, keras_tests, readme, versions
from benchmarks import machine as machine_module
from keras_replicas import UserError
from keras_replicas.private import CHECKED_VERSIONS
from tests.conftest import ROOT, files_in, python


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


@pytest.mark.parametrize(
    ("count", "interval"),
    [(5, (-math.inf, math.inf)), (6, (1, 6)), (10, (2, 9)), (20, (6, 15))],
)
def test_a_median_has_its_interval_by_order_statistics(count, interval):
    values = [*range(count, 0, -1)]
    assert compare.median_interval(values) == interval


def test_sides_take_turns_in_alternating_order():
    assert compare.turns(0) == compare.turns(2) == ("before", "after")
    assert compare.turns(1) == ("after", "before")


def test_a_row_is_slower_below_its_bound():
    fewer_steps = [compare.Pair(before=10.0, after=9.0)] * 9
    more_seconds = [compare.Pair(before=9.0, after=10.0)] * 9
    unchanged = [compare.Pair(before=1.0, after=1.0)]
    pairs = {
        "bert_mlm, training": fewer_steps + unchanged,
        "bert_mlm, first step": more_seconds + unchanged,
        "causal_lm, training": fewer_steps[2:] + 3 * unchanged,  # whose interval ends at 1
        "causal_lm, first step": fewer_steps + unchanged,  # faster
    }
    speedups = {row: compare.speedup_of(row, pairs[row]) for row in pairs}
    assert [speedup.is_slower for speedup in speedups.values()] == [True, True, False, False]
    assert speedups["causal_lm, first step"].median == 10 / 9
    shown = compare.table(pairs, speedups).splitlines()
    assert shown[3].startswith("| bert_mlm, first step | 9.00 s | 10.00 s |")
    assert shown[3].endswith("| 0.90 x | 0.90 to 0.90 | slower |")
    assert shown[4].endswith("| 0.90 x | 0.90 to 1.00 |  |")


@pytest.fixture
def clone(tmp_path):
    """A git repository with one commit, and changes since."""
    folder = tmp_path / "clone"
    folder.mkdir()

    def git(*words):
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
        subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)

    git("init")
    (folder / ".gitignore").write_text("ignored\n")
    (folder / "changed").write_text("before")
    (folder / "deleted").write_text("before")
    git("add", "--all")
    git("commit", "--message", "all")
    (folder / "changed").write_text("after")
    (folder / "deleted").unlink()
    (folder / "package").mkdir()
    (folder / "package/new").write_text("after")
    (folder / "ignored").write_text("after")
    return folder


def test_compare_refuses_what_git_does_not_know(clone, tmp_path):
    assert len(compare.resolve_commit(clone, "HEAD")) == 40
    with pytest.raises(UserError, match="^there is no commit none: "):
        compare.resolve_commit(clone, "none")
    for folder in (tmp_path, clone / "package"):  # the second is only inside a clone
        with pytest.raises(UserError, match="is not a git clone: "):
            compare.resolve_commit(folder, "HEAD")


def test_compare_copies_the_commit_and_the_changes(clone, tmp_path):
    compare.copy_commit(clone, "HEAD", tmp_path / "before")
    compare.copy_working_tree(clone, tmp_path / "after")
    before, after = files_in(tmp_path / "before"), files_in(tmp_path / "after")
    ignores = {".gitignore": b"ignored\n"}
    assert before == ignores | {"changed": b"before", "deleted": b"before"}
    assert after == ignores | {"changed": b"after", "package/new": b"after"}


def test_a_side_must_import_its_own_code(tmp_path):
    done = python("-c", compare.START, tmp_path, "ls", env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and f"not in {tmp_path}" in done.stderr
    assert python("-c", compare.START, ROOT, "ls").stdout.startswith("bert_from_scratch")


def test_first_steps_are_compared_with_keras():
    rounds = ([3.0, 9.0, 2.0], [2.0], [1.0])
    seconds = dict(zip(first_steps.WAYS, rounds, strict=True))
    shown = first_steps.table({"seconds": {"dense": seconds}})
    assert shown.splitlines()[-1] == "| dense | 3.0 s | 2.0 s | 1.0 s | 1.50 x |"
    assert readme.first_steps_table(None) == "Not measured yet."
