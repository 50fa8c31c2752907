"""A worker on each of two hosts, between which the network fails in the middle of a run."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.hosts import ADDRESSES, cut, mend, on, processes, two_hosts

ROOT = Path(__file__).parent.parent
WORKERS = ",".join(f"{address}:8888" for address in ADDRESSES)
KNOBS = [
    *("bert_mlm", "--corpus", str(ROOT / "LICENSE"), "--model", "nano", "--vocabulary-size", "300"),
    *("--seq-length", "16", "--batch-size", "4", "--epochs", "6", "--checkpoint-every", "50"),
]
STEPS = 6 * 32
FAULT_AT = 105  # after the checkpoint of step 100, and long before the next, at the epoch's end

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def launched(hosts, folder):
    """A launcher on each host; they are over after the block."""
    (folder / "tmp").mkdir(parents=True)
    launchers = []
    try:
        for index, host in enumerate(hosts):
            place = ["--hosts", WORKERS, "--worker-index", str(index), "--restarts", "2"]
            command = [sys.executable, "-m", "recipes", "launch", *place, *KNOBS, "--workdir", folder / "run"]
            with said(folder, index).open("w") as output:
                environment = os.environ | {"TMPDIR": str(folder / "tmp")}
                launchers.append(
                    subprocess.Popen(
                        on(host, *command), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
                    )
                )
        yield launchers
    finally:
        for launcher in launchers:
            launcher.kill()  # its worker dies with it
            launcher.wait()


def said(folder, index):
    return folder / f"launcher-{index}.log"


def wait_for(condition, seconds, folder):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "\n".join(said(folder, index).read_text() for index in range(2))
        time.sleep(0.01)


def steps_done(folder):
    steps = folder / "run" / "steps.jsonl"
    return len(steps.read_text().splitlines()) if steps.exists() else 0


def restarts(folder, index):
    return said(folder, index).read_text().count("restart(s) left")


def run(folder, fault=lambda hosts: None):
    """A whole run, with a fault in the middle; what is left behind must be in the folder alone."""
    with two_hosts() as hosts:
        with launched(hosts, folder) as launchers:
            wait_for(lambda: steps_done(folder) >= FAULT_AT, 180, folder)
            fault(hosts)
            wait_for(lambda: None not in [launcher.poll() for launcher in launchers], 240, folder)
            assert [launcher.returncode for launcher in launchers] == [0, 0], said(folder, 0).read_text()
        for host in hosts:
            assert processes(host) == []
            assert " 0A " not in subprocess.check_output(on(host, "cat", "/proc/net/tcp", "/proc/net/tcp6"), text=True)
    assert not set(hosts) & set(subprocess.check_output(["ip", "netns"], text=True).split())
    assert list((folder / "tmp").iterdir()) == []
    return json.loads((folder / "run" / "results.json").read_text())


def weights(folder):
    """Every array of the weights' file by name."""
    arrays = {}
    with h5py.File(folder / "run" / "preset" / "model.weights.h5") as file:
        file.visititems(lambda name, item: arrays.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
    return arrays


def assert_same(folder, other):
    assert (folder / "run/steps.jsonl").read_text() == (other / "run/steps.jsonl").read_text()
    ours, theirs = weights(folder), weights(other)
    assert len(ours) > 10 and ours.keys() == theirs.keys()
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    try:
        results = run(folder)
    except PermissionError as error:
        pytest.skip(str(error))
    assert (results["workers"], results["steps"], results["resumed_from_step"]) == (2, STEPS, None)
    return folder


def test_lost(undisturbed, tmp_path):
    """The network loses everything until both know."""

    def fail(hosts):
        cut(hosts)
        for index in range(2):  # 15 s of heartbeats that are missed, on a busy machine
            wait_for(lambda index=index: restarts(tmp_path, index), 40, tmp_path)
        mend(hosts)

    results = run(tmp_path, fail)
    assert 0 < results["resumed_from_step"] < FAULT_AT
    for index in range(2):
        told = said(tmp_path, index).read_text()
        assert restarts(tmp_path, index) == 1 and "\nerror: lost another worker. " in told
        assert "Traceback" not in told + (tmp_path / f"run/logs/worker-{index}.log").read_text()
    assert_same(tmp_path, undisturbed)
