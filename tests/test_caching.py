import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.caching import cached_file

ROOT = Path(__file__).parent.parent
# Makes a file slowly, and says so.
PROGRAM = """
import sys, time
from common.caching import cached_file

def make(path):
    path.write_text("half")
    print("making", flush=True)
    time.sleep({seconds})
    path.write_text("whole")

print(cached_file("file", ["a"], make).read_text())
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "keras-data-parallel-recipes"


def process(seconds):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(seconds=seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_file_is_made_once_for_the_same_inputs(cache):
    made = []

    def make(path):
        made.append(path)
        path.write_text("text")

    first = cached_file("file", ["a", "b"], make)
    assert cached_file("file", ["a", "b"], make) == first and len(made) == 1
    assert cached_file("file", ["ab"], make) != first and len(made) == 2


def test_of_processes_that_want_the_same_file_one_makes_it(cache):
    both = [process(1), process(1)]
    said = [each.communicate(timeout=60)[0] for each in both]
    assert sorted(said) == ["making\nwhole\n", "whole\n"]


def test_a_file_whose_making_is_killed_is_made_again(cache):
    killed = process(60)
    assert killed.stdout.readline() == "making\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    began = time.monotonic()
    assert process(0).communicate(timeout=60)[0] == "making\nwhole\n" and time.monotonic() - began < 30
    assert {path.name for path in cache.iterdir()} - {".lock"} == {cached_file("file", ["a"], None).name}
