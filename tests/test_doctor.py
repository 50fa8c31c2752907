import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.readme import with_tables
from keras_replicas import doctor
from keras_replicas.comparison import BOUNDS, Trained, compared
from keras_replicas.doctor_models import EXAMPLES

ROOT = Path(__file__).parent.parent


def run(package, *words, cwd=ROOT):
    environment = os.environ | {"PYTHONPATH": str(cwd)}
    command = [sys.executable, "-m", package, "doctor", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800)


def test_what_differs_is_measured():
    one = Trained({(0, 0): 2.0}, {"0 a": np.ones(4), "1 key/bias": np.ones(2)}, {"loss": 3.0}, np.ones(2))
    assert {value for value, _ in compared(one, one).values()} == {0.0}
    assert {name: bound for name, (_, bound) in compared(one, one).items()} == BOUNDS
    other = one._replace(losses={(0, 0): 2.2}, evaluated={"loss": 3.3}, predicted=np.ones(2) * 1.1)
    other = other._replace(weights={"0 b": np.ones(4) * 1.1, "1 key/bias": np.zeros(2)})
    assert [value for value, _ in compared(other, one).values()] == pytest.approx([0.1] * 5)
    broken = one._replace(losses={(0, 0): np.nan}, weights={"0 a": np.full(4, np.nan), "1 key/bias": np.ones(2)})
    assert [value for value, _ in compared(broken, one).values()][:3] == [np.inf] * 3


def test_a_row_is_shown_once_it_is_done_and_a_failure_is_the_status(monkeypatch, capsys):
    """Whatever rows there are."""

    def rows(cases, counts, workers, module):
        assert counts == [3] and list(cases)[:2] == ["masked", "causal"]
        yield "first", {"weights": (1e-7, 1e-6)}
        assert "first" in capsys.readouterr().out
        yield "second", {"weights": (np.inf, 1e-6)}

    monkeypatch.setattr(doctor, "rows", rows)
    monkeypatch.setattr(doctor, "make_strategy", lambda *_, **__: None)
    assert doctor.doctor(argparse.Namespace(json=False, replicas=3, workers=1)) == 1
    shown = capsys.readouterr().out
    assert "FAIL\n" in shown and "FAILED, in " in shown


@pytest.mark.parametrize(("gpus", "counts"), [(0, [2, 4]), (1, [2, 4]), (2, [2]), (3, [2]), (4, [2, 4]), (8, [2, 4])])
def test_of_several_gpus_none_is_split(monkeypatch, capsys, gpus, counts):
    """GPUs are stand-ins: the machine that runs this has none."""
    asked = []
    monkeypatch.setattr(doctor, "gpu_names", lambda: ["GPU"] * gpus)
    monkeypatch.setattr(doctor, "make_strategy", lambda most, deterministic: asked.append((most, deterministic)))
    monkeypatch.setattr(doctor, "rows", lambda cases, counts, *_: asked.append(counts) or [])
    doctor.doctor(argparse.Namespace(json=True, replicas=None, workers=1))
    assert asked == [(counts[-1], gpus > 0), counts]


def test_the_last_batch_divides_among_no_replicas():
    assert all(len(values) == EXAMPLES for case in doctor.cases().values() for values in case.data.values())
    assert EXAMPLES % doctor.BATCH % 2 == 1


@pytest.mark.slow
def test_every_check_passes():
    """Those of the library, and one of KerasHub's models."""
    done = run("recipes", "--json", "--workers", "2")
    found = json.loads(done.stdout)
    # Where grain is installed, KerasHub's own `fit` reads arrays by it, and grain warns.
    assert done.returncode == 0 and found["passed"]
    assert not [line for line in done.stderr.splitlines() if "prefetch_buffer_size" not in line]
    assert all(row["measured"] <= row["bound"] for row in found["checks"])
    names = {row["check"] for row in found["checks"]}
    for model in ("masked", "causal", "classifier", "batch norm", "BertMaskedLM"):
        ways = ("sgd, 4 replicas", "adam, 2 replicas", "sgd, 2 workers", "adam, 2 workers")
        assert {f"{model}, {way}" for way in ways} <= names
    assert {"classifier, sgd, 2 replicas, jit_compile=True"} <= names
    assert {"masked, sgd, 2 replicas, accumulate=2, steps_per_execution=7"} <= names
    assert found["machine"]["keras"].endswith("(tested)")


# A fault, and the check that must tell of it.
FAULTS = {
    "gradients are divided by a little too much": (
        (
            "keras_replicas/step.py",
            "share = tf.math.divide_no_nan(tf.ones_like(divisor), divisor)",
            "share = 0.999 / divisor",
        ),
        "masked, sgd, 4 replicas",
    ),
    "moments are of a replica's part": (
        ("keras_replicas/batchnorm.py", "total, count = sum_over_replicas(sums)", "total, count = sums"),
        "batch norm, sgd, 4 replicas",
    ),
}


def test_the_faults_can_be_made():
    assert all((ROOT / file).read_text().count(right) == 1 for (file, right, _), _ in FAULTS.values())


@pytest.mark.slow
def test_faults_are_told_of(tmp_path):
    shutil.copytree(ROOT / "keras_replicas", tmp_path / "keras_replicas")
    for (file, right, wrong), _ in FAULTS.values():
        (tmp_path / file).write_text((tmp_path / file).read_text().replace(right, wrong))
    done = run("keras_replicas", "--json", cwd=tmp_path)
    assert done.returncode == 1
    failed = {row["check"] for row in json.loads(done.stdout)["checks"] if not row["passed"]}
    assert failed >= {check for _, check in FAULTS.values()}
    assert not [check for check in failed if check.startswith("classifier with dropout")]


def test_its_page_has_the_results():
    page = (ROOT / "docs/exactness.md").read_text(encoding="utf-8")
    assert with_tables(page) == page
