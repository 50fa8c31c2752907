"""Faults of the benchmark, which does many of each; that of the network is in tests/test_two_hosts.py."""

import random

import pytest

from benchmarks.faults import CHECKPOINT_EVERY, trial, undisturbed


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    weights = undisturbed(tmp_path_factory.mktemp("undisturbed") / "run")
    assert len(weights) > 20  # of the backbone, and of the head
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "SIGKILL of a worker",
        "SIGKILL of the chief",
        "SIGTERM to a worker",
        "SIGKILL while a checkpoint is written",
        "SIGSTOP of a worker",
    ],
)
def test_a_run_ends_as_if_nothing_had_happened(fault, expected, tmp_path):
    row = trial(fault, random.randrange(10**6), tmp_path / "run", expected)
    print(row)
    assert row["identical"] and not row["left"]
    assert row["went_on_from"] > 0
    if "SIGTERM" in fault:
        assert row["went_on_from"] == row["at_step"]
    else:
        assert 0 < row["at_step"] - row["went_on_from"] < 2 * CHECKPOINT_EVERY
