"""Keras's own tests of its trainer, as a user's file, with our trainer on two replicas."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.trainer_tests import PASSED_AT_LEAST, WAYS
from tests.conftest import ROOT


@pytest.mark.slow
def test_keras_own_tests_pass_on_two_replicas():
    """Minutes in one process: models of all kinds are compiled again and again."""
    words = ["-m", "benchmarks.trainer_tests", WAYS[2]]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    failed = {name: of.get("error") for name, of in outcomes.items() if of["outcome"] == "failed"}
    assert sum(of["outcome"] == "passed" for of in outcomes.values()) >= PASSED_AT_LEAST, failed
