"""Keras's own tests of its trainer, as a user's file, with our trainer on two replicas."""

import pytest

from benchmarks.keras_process import ALL_COUNT
from benchmarks.keras_tests import TWO, outcomes, run

QUICKER = r"^(?!.*steps_per_execution.*(eager|non_jit))"  # these 22 take 40 % of the time; those with XLA are like them


@pytest.mark.slow
def test_keras_own_tests_pass_on_two_replicas(tmp_path):
    """Minutes in one process: models of all kinds are compiled again and again."""
    run((TWO,), {ALL_COUNT: []}, tmp_path, QUICKER)
    ended = outcomes(TWO, tmp_path)
    failed = {name: of["error"] for name, of in ended.items() if of["outcome"] == "failed" and "torch" not in of["error"]}
    assert all("steps_per_epoch_match_multi_epoch" in name for name in failed), failed  # see `REASONS`
    assert sum(of["outcome"] == "passed" for of in ended.values()) > 135
