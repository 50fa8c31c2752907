import argparse
import json
import os
import re
import shutil

import numpy as np
import pytest

from keras_replicas import doctor
from tests.conftest import ROOT, python

MODELS = ["masked", "causal", "batch_norm"]
RESUMED = "masked, interrupted in the middle of an epoch"


def run(package, *words, cwd=ROOT):
    return python("-m", package, "doctor", *words, cwd=cwd, env=os.environ | {"PYTHONPATH": str(cwd)}, timeout=1800)


def test_a_row_is_shown_once_it_is_done_and_a_failure_is_the_status(monkeypatch, capsys):
    """Whatever rows there are."""

    def rows(models, counts):
        assert counts == [3] and [model.__name__ for model in models] == MODELS
        yield "first", True, "THE SAME", 1e-16
        shown.append(capsys.readouterr().out)
        yield "second", False, "DIFFERENT", np.inf

    shown = []
    monkeypatch.setattr(doctor, "rows", rows)
    monkeypatch.setattr(doctor, "make_strategy", lambda *_, **__: None)
    assert doctor.doctor(argparse.Namespace(json=False, replicas=3)) == 1
    assert shown[0].endswith("\nPASS  first, 0 s: THE SAME\n")
    assert re.fullmatch("FAIL  second, 0 s: DIFFERENT\nFAILED, in . s\n", capsys.readouterr().out)
    assert doctor.doctor(argparse.Namespace(json=True, replicas=3)) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"] and [row["largest_difference"] for row in found["checks"]] == [1e-16, None]


@pytest.mark.parametrize(("gpus", "counts"), [(0, [2, 4]), (1, [2, 4]), (2, [2]), (3, [2]), (4, [2, 4]), (8, [2, 4])])
def test_of_several_gpus_none_is_split(monkeypatch, capsys, gpus, counts):
    """GPUs are stand-ins: the machine that runs this has none."""
    asked = []
    monkeypatch.setattr(doctor, "gpu_names", lambda: ["GPU"] * gpus)
    monkeypatch.setattr(doctor, "make_strategy", lambda most, deterministic: asked.append((most, deterministic)))
    monkeypatch.setattr(doctor, "rows", lambda models, counts: asked.append(counts) or [])
    doctor.doctor(argparse.Namespace(json=True, replicas=None))
    assert asked == [(counts[-1], gpus > 0), counts]


@pytest.mark.slow
def test_every_check_passes():
    """Those of the library, and one of KerasHub's models."""
    done = run("recipes", "--json")
    found = json.loads(done.stdout)
    # Where grain is installed, KerasHub's own `fit` reads arrays by it, and grain warns.
    assert done.returncode == 0 and found["passed"]
    assert not [line for line in done.stderr.splitlines() if "prefetch_buffer_size" not in line]
    assert all(row["largest_difference"] < 1e-12 and "THE SAME to " in row["found"] for row in found["checks"])
    names = [row["check"] for row in found["checks"]]
    two = [f"{name}, 2 replicas" for name in (*MODELS, "bert")]
    assert names == [*two, "masked, 4 replicas", RESUMED]
    assert found["machine"]["keras"].endswith("(tested)")


# A fault, in a file, and the check that must tell of it.
FAULTS = {
    # Gradients are divided by a little too much.
    "masked, 4 replicas": ("step.py", "divide_no_nan(tf.ones_like(divisor), divisor)", "divide(0.999, divisor)"),
    # Moments are of a replica's part.
    "batch_norm, 2 replicas": (
        "batchnorm.py",
        "moments = reduce(mine[:, None, None] * local)",
        "moments = mine[:, None, None] * local",
    ),
    # A run begins anew.
    RESUMED: ("checkpoints.py", "_asked_at = self._files.restore(self._checkpoint)", "_asked_at = 0"),
}


@pytest.mark.slow
def test_faults_are_told_of(tmp_path):
    shutil.copytree(ROOT / "keras_replicas", tmp_path / "keras_replicas")
    for name, right, wrong in FAULTS.values():
        file = tmp_path / "keras_replicas" / name
        assert file.read_text().count(right) == 1
        file.write_text(file.read_text().replace(right, wrong))
    done = run("keras_replicas", "--json", cwd=tmp_path)
    assert done.returncode == 1
    found = {row["check"]: row for row in json.loads(done.stdout)["checks"]}
    failed = {check for check, row in found.items() if not row["passed"]}
    assert failed == {check for check, row in found.items() if row["found"].startswith("DIFFERENT")}
    assert failed >= FAULTS.keys()
