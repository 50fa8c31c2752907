"""Keras's own tests of its trainer, as a user's file, with our trainer on two replicas."""

import pytest

from benchmarks.keras_tests import ALL_COUNT, REASONS, TWO, outcomes, run

QUICKER = r"^(?!.*steps_per_execution.*(eager|non_jit))"  # those with XLA are like these 22, and quick


@pytest.mark.slow
def test_keras_own_tests_pass_on_two_replicas(tmp_path):
    """Minutes in one process: models of all kinds are compiled again and again."""
    run((TWO,), {ALL_COUNT: []}, tmp_path, QUICKER)
    ended = outcomes(TWO, tmp_path)
    errors = {name: of["error"] for name, of in ended.items() if of["outcome"] == "failed"}
    known = (*REASONS, "torch")  # PyTorch is not installed
    assert all(any(word in name + error for word in known) for name, error in errors.items()), errors
    assert sum(of["outcome"] == "passed" for of in ended.values()) > 135
