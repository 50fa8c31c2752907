import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from benchmarks.readme import with_tables
from recipes._doctor import most_replicas

ROOT = Path(__file__).parent.parent


def doctor(folder):
    done = subprocess.run(
        [sys.executable, "-m", "recipes", "doctor", "--json"], cwd=folder, capture_output=True, text=True
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_every_check_passes():
    status, found = doctor(ROOT)
    assert status == 0 and found["passed"] and found["seconds"] < 400  # 95 on a machine that is quiet
    assert all(row["measured"] <= row["bound"] for row in found["checks"])
    assert {row["measure"] for row in found["checks"] if row["check"] == "4 replicas, sgd"} == {
        "loss of every step",
        "weights",
        "every tensor",
        "validation",
    }
    assert found["machine"]["keras"].endswith("(tested)")


@pytest.mark.parametrize(("gpus", "most"), [(0, 4), (1, 4), (2, 2), (3, 2), (4, 4), (8, 4)])
def test_of_several_gpus_none_is_split(monkeypatch, gpus, most):
    """GPUs are stand-ins: the machine that runs this has none."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU"] * gpus)
    assert most_replicas() == most


# A fault, and the checks that must tell of it.
FAULTS = {
    "each replica divides by its own labels": (
        (
            "keras_replicas/step.py",
            "divide_no_nan(1.0, count * factor)",
            'divide_no_nan(1.0, unpack(packed)["count"] * replicas())',
        ),
        ("2 replicas, muon", "2 replicas, sgd", "4 replicas, sgd", "2 replicas, jit, muon", "2 replicas, jit, sgd"),
    ),
    "a sequence's masks depend on how far it is padded": (
        (
            "common/data/masking.py",
            "uniform_noise(seeds, 3 * length)",
            "tf.reverse(uniform_noise(seeds, 3 * length), [1])",
        ),
        ("2 replicas, one line per sequence, muon", "2 replicas, one line per sequence, sgd"),
    ),
    "a run goes on a step too early": (
        (
            "common/run/checkpoints.py",
            "self.saved_step = step\n                break",
            "self.saved_step = step - 1\n                break",
        ),
        ("resumed",),
    ),
    "TensorBoard shows the rate for the loss": (
        ("common/run/callbacks.py", 'f"train/{name}", vector[i]', 'f"train/{name}", shown["learning_rate"][i]'),
        ("TensorBoard",),
    ),
    "the warm-up is too short": (
        ("recipes/bert_mlm.py", "int(config.warmup * total_steps)", "0"),
        ("learning rate",),
    ),
}


def test_the_faults_can_be_made():
    assert all((ROOT / file).read_text().count(right) == 1 for (file, right, _), _ in FAULTS.values())


@pytest.mark.long
def test_faults_are_told_of(tmp_path):
    for name in ("recipes", "common", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, tmp_path / name)
    for (file, right, wrong), _ in FAULTS.values():
        (tmp_path / file).write_text((tmp_path / file).read_text().replace(right, wrong))
    status, found = doctor(tmp_path)
    assert status == 1 and not found["passed"]
    failed = {row["check"] for row in found["checks"] if not row["passed"]}
    for fault, (_, checks) in FAULTS.items():
        assert failed >= set(checks), fault
    assert not failed & {"loss reported", "bfloat16", "float16"}


def test_its_page_has_the_results():
    page = (ROOT / "docs/exactness.md").read_text(encoding="utf-8")
    assert with_tables(page) == page
    assert "| 4 replicas, sgd | " in page
