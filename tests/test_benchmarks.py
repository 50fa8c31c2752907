"""The arithmetic of the benchmarks, and that they run; their figures are measured by hand, on a quiet machine."""

import argparse
import ast
import importlib
import json
import sys
import tomllib

import pytest
from common.run.speed import flops_per_token

import benchmarks.input
from benchmarks import (
    compare,
    keras_tests,
    peers,
    quality,
    scaling,
    throughput,
    versions,
)
from benchmarks import machine as machine_module
from keras_replicas.errors import UserError
from keras_replicas.private import CHECKED_VERSIONS


def matmul_flops(*shapes):
    return sum(2 * rows * inner * columns for rows, inner, columns in shapes)


def test_flops_are_those_of_every_matrix_product_of_a_small_bert():
    length, width, inner, vocabulary_size, masked = 20, 64, 256, 500, 3  # nano: one layer, one head of 64
    forward = matmul_flops(
        *[(length, width, width)] * 4,  # query, key, value, output
        (length, width, length),  # scores
        (length, length, width),  # mean of the values
        (length, width, inner),
        (length, inner, width),
        (masked, width, width),  # the head
        (masked, width, vocabulary_size),
    )
    assert flops_per_token(64, 256, 1, vocabulary_size, length, masked / length) * length == pytest.approx(3 * forward)


def test_flops_of_tiny_are_those_known():
    # 55 GFLOP for 70 sequences of 128, counted by another hand.
    assert flops_per_token(128, 512, 2, 30_522, 128, 0.15) * 70 * 128 == pytest.approx(56e9, rel=0.01)


def test_two_commits_are_compared_round_by_round():
    table = compare.table({"bert_mlm": [[20.0, 30.0, 10.0], [10.0, 30.0, 20.0]]})
    assert "| bert_mlm | 20 | 20 | 1.000 | 0.500 to 2.000 |" in table


def test_a_commit_is_checked_out_and_gone_again():
    with machine_module.checkout("HEAD") as root:
        assert (root / "benchmarks/machine.py").is_file()
    assert not root.exists()
    with pytest.raises(UserError, match="no checkout of nowhere"), machine_module.checkout("nowhere"):
        pass


def test_the_readme_says_how_many_of_keras_own_tests_pass():
    results = {"trainer": dict(zip(keras_tests.WAYS, (9, 9, 5, 9, 9, 8), strict=True))}
    assert "9 pass without a strategy; 5 of them with two replicas, 8 with ours." in keras_tests.line(results)


def test_tests_that_train_are_found_by_what_they_call_and_name():
    code = """
def build():
    return Model().fit(x)

class Tests(TestCase):
    def helper(self):
        return build()

    def test_trains_by_a_helper(self):
        self.helper()

    def test_of_a_layer(self):
        self.run_layer_test(Dense)

    def test_of_shapes(self):
        assert shape(x)
"""
    found = keras_tests.tests_that_may_train(ast.parse(code))
    assert found == {"test_trains_by_a_helper", "test_of_a_layer"}


def test_what_ours_loses_is_told_with_its_reason():
    def outcome(passed):
        return {"outcome": "passed" if passed else "failed", "trains": True, "error": "so it is"}

    passed = {"trainers/trainer_test.py::a": (1, 1, 1, 1, 1, 0), "b.py::b": (1, 1, 0, 1, 1, 0)}
    of = {
        way: {name: outcome(each[index]) for name, each in passed.items()} for index, way in enumerate(keras_tests.WAYS)
    }
    report = keras_tests.report(of)
    assert report["lost"] == {
        "no strategy": {},
        "1 replica": {},
        "2 replicas": {"trainers/trainer_test.py::a": "so it is"},
    }
    assert report["others on 2 replicas"] == {"b.py::b": "so it is"}
    assert [report["all"][way] for way in keras_tests.WAYS] == [2, 2, 1, 2, 2, 0]


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


def test_the_tests_for_other_versions_are_there():
    assert all((machine_module.ROOT / file).is_file() for file in versions.FILES)


def test_every_benchmark_has_its_options():
    for module in (throughput, scaling, benchmarks.input, quality, peers):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        assert parser.parse_args([]).corpus == "docstrings"


@pytest.mark.parametrize(
    ("program", "words", "told"),
    [
        ("benchmarks", "fine_tuning --preset nowhere", "no file or folder nowhere"),
        ("benchmarks", "fine_tuning --preset .", "give a task's folder"),
        ("benchmarks", "causal --rounds 0", "--rounds is too small: 0"),
        ("benchmarks", "compare nowhere", "no checkout of nowhere"),
        ("benchmarks.faults", "--nonsense", "unrecognized arguments: --nonsense"),
        ("notebooks.generate", "nowhere", "no narrative nowhere"),
    ],
)
def test_a_wrong_word_is_told_without_a_traceback(program, words, told, monkeypatch, capsys):
    main = importlib.import_module(f"{program}.__main__" if program == "benchmarks" else program).main
    monkeypatch.setattr(sys, "argv", [program, *words.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and told in capsys.readouterr().err
