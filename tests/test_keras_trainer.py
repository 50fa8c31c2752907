"""Keras's own tests of its trainer, as a user's file, with our trainer on two replicas."""

import pytest

from benchmarks.keras_process import ALL_COUNT
from benchmarks.keras_tests import PASSED_AT_LEAST, TWO, outcomes, run


@pytest.mark.slow
def test_keras_own_tests_pass_on_two_replicas(tmp_path):
    """Minutes in one process: models of all kinds are compiled again and again."""
    run((TWO,), {ALL_COUNT: []}, tmp_path)
    ended = outcomes(TWO, tmp_path)
    failed = {name: of.get("error") for name, of in ended.items() if of["outcome"] == "failed"}
    assert sum(of["outcome"] == "passed" for of in ended.values()) >= PASSED_AT_LEAST, failed
