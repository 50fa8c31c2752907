"""Some faults of the benchmark, which does many of each and of others."""

import random

import pytest

from benchmarks.faults import CHECKPOINT_EVERY, trial, undisturbed
from keras_replicas import UserError


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    weights, steps = undisturbed(tmp_path_factory.mktemp("undisturbed") / "run")
    assert len(weights) > 20 and steps > 300  # weights of the backbone, and of the head
    return weights, steps


SLOW = [pytest.param("SIGKILL of the chief", marks=pytest.mark.slow)]
LONG = ["SIGKILL while a checkpoint is written", "SIGSTOP of a worker", "network cut between two hosts"]


@pytest.mark.parametrize("fault", SLOW + [pytest.param(fault, marks=pytest.mark.long) for fault in LONG])
def test_a_run_ends_as_if_nothing_had_happened(fault, expected, tmp_path):
    try:
        row = trial(fault, random.randrange(10**6), tmp_path / "run", *expected)
    except UserError as error:
        pytest.skip(str(error))
    assert row["identical"] and not row["left"]
    assert row["went_on_from"] > 0
    said = (tmp_path / "run.log").read_text()
    assert "Traceback" not in said and "\nerror: " in said
    assert 0 <= row["at_step"] - row["went_on_from"] < 2 * CHECKPOINT_EVERY
