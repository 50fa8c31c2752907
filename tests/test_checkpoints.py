"""A run that is killed and goes on ends as if it had never stopped: real processes, real signals."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from common.checkpoints import epochs_left
from tests.test_bert_mlm import weights_of

ROOT = Path(__file__).parent.parent
CHECKPOINT_EVERY = 4
STEPS = 24  # of the runs below: three epochs of eight steps, the last of each not full


def command(wikitext, workdir, *more):
    knobs = {
        "corpus": wikitext,
        "workdir": workdir,
        "vocabulary-size": 300,
        "seq-length": 32,
        "batch-size": 64,
        "dropout": 0.1,
        "epochs": 3,
        "checkpoint-every": CHECKPOINT_EVERY,
    }
    words = [word for name, value in knobs.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "recipes/bert_mlm.py"), *words, *more]


def steps_in(workdir):
    try:
        return (workdir / "steps.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def run_until(step, sig, *words):
    """Runs, and sends the signal once the given step is done; the exit status, and the steps done by then."""
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and steps_in(words[1]) < step:
        time.sleep(0.002)
    process.send_signal(sig)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output, steps_in(words[1])


def go_on(*words):
    done = subprocess.run(command(*words), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, json.loads((words[1] / "results.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(wikitext, tmp_path_factory):
    return go_on(wikitext, tmp_path_factory.mktemp("undisturbed") / "run")[1]


def assert_same(results, undisturbed):
    """Weights and steps to the bit, and every figure that is no measurement of this process."""
    for name, weight in weights_of(undisturbed).items():
        np.testing.assert_array_equal(weights_of(results)[name], weight, err_msg=name)
    read = [(Path(r["config"]["workdir"]) / "steps.jsonl").read_text() for r in (results, undisturbed)]
    assert read[0] == read[1]
    own = {
        "seconds",
        "tokens_per_second",
        "share_of_peak",
        "input_wait_fraction",
        "peak_memory_mb",
        "resumed_from_step",
        "config",
    }
    for name in undisturbed.keys() - own:
        assert results[name] == undisturbed[name], name


@pytest.mark.slow
def test_sigterm_saves_and_leaves_with_143(wikitext, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    status, output, done = run_until(5, signal.SIGTERM, wikitext, workdir)
    assert status == 143 and f"Stopped by SIGTERM after step {done}" in output
    assert_same(go_on(wikitext, workdir)[1], undisturbed)


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_one_before(wikitext, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    run_until(9, signal.SIGKILL, wikitext, workdir)
    data = max((workdir / "checkpoints").glob("*.data*"), key=lambda path: path.stat().st_mtime)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    (workdir / "checkpoints/ckpt-99_temp").mkdir()  # as one that is killed while it writes leaves
    output, results = go_on(wikitext, workdir)
    assert "is damaged" in output and results["resumed_from_step"] == 4
    assert not list((workdir / "checkpoints").glob("*_temp")) and "going on from step 4" in output
    assert_same(results, undisturbed)


# In a mount namespace of its own: a disk of 14 MB, which holds two checkpoints and no third. Then room is made.
FULL_DISK = """
mount -t tmpfs -o size=14m none {disk} && {command} --overwrite; echo "status $?"
ls {disk}/run/checkpoints
mount -o remount,size=1g {disk} && {command} && cp -r {disk}/run {copy}
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so(wikitext, undisturbed, tmp_path):
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    script = FULL_DISK.format(disk=disk, copy=copy, command=shlex.join(command(wikitext, disk / "run")))
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True)
    full, afterwards = done.stdout.split("status 1\n")
    assert "No checkpoint of step 12 (No space left on device). The last good one is of step 8." in full
    assert done.stderr.startswith("error: ") and "Make room; the same command goes on" in done.stderr
    assert done.stderr.count("\n") == 1  # no traceback
    assert "_temp" not in afterwards and "going on from step 8" in afterwards
    results = json.loads((copy / "results.json").read_text())
    assert_same(results | {"config": results["config"] | {"workdir": str(copy)}}, undisturbed)


@pytest.mark.long
def test_another_split_of_the_batch_goes_on_and_other_knobs_do_not(wikitext, tmp_path):
    workdir = tmp_path / "run"
    run_until(5, signal.SIGTERM, wikitext, workdir, "--dropout", "0")
    refused = subprocess.run(command(wikitext, workdir, "--seed", "1"), capture_output=True, text=True)
    assert refused.returncode == 2 and "dropout 0.0, not 0.1, seed 0, not 1" in refused.stderr
    refused = subprocess.run(
        command(wikitext, workdir, "--dropout", "0", "--batch-size", "32"), capture_output=True, text=True
    )
    assert refused.returncode == 2 and "a global batch of 128, which is not 2 replicas x 32" in refused.stderr
    output, results = go_on(wikitext, workdir, "--dropout", "0", "--replicas", "1")
    assert "batch: 128 sequences x 1 replicas = 128" in output
    assert results["learning_rate"]["peak"] == pytest.approx(2**0.5 * 1e-3)
    _, whole = go_on(wikitext, tmp_path / "whole", "--dropout", "0")
    assert results["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-6)


@pytest.mark.slow
def test_two_runs_in_one_folder(wikitext, tmp_path):
    workdir = tmp_path / "run"
    first = subprocess.Popen(command(wikitext, workdir), stdout=subprocess.DEVNULL)
    while not (workdir / "config.json").exists():
        time.sleep(0.01)
    second = subprocess.run(command(wikitext, workdir, "--overwrite"), capture_output=True, text=True)
    assert second.returncode == 2 and "another process is running in" in second.stderr
    first.kill()
    first.wait()


def test_epochs_left():
    assert list(epochs_left(0, 8, 24)) == [{"initial_epoch": 0, "epochs": 3, "steps_per_epoch": 8}]
    assert list(epochs_left(10, 8, 24)) == [
        {"initial_epoch": 1, "epochs": 2, "steps_per_epoch": 6},
        {"initial_epoch": 2, "epochs": 3, "steps_per_epoch": 8},
    ]
    assert list(epochs_left(0, 8, 20)) == [
        {"initial_epoch": 0, "epochs": 2, "steps_per_epoch": 8},
        {"initial_epoch": 2, "epochs": 3, "steps_per_epoch": 4},
    ]
    assert list(epochs_left(18, 8, 20)) == [{"initial_epoch": 2, "epochs": 3, "steps_per_epoch": 2}]
    assert list(epochs_left(20, 8, 20)) == list(epochs_left(24, 8, 24)) == []


@pytest.mark.long
def test_twenty_kills_at_random_steps(wikitext, undisturbed, tmp_path):
    seed = int(os.environ.get("KILL_SEED", random.randrange(10**6)))
    print(f"KILL_SEED={seed}")

    def ten_kills(number):
        runs, kills, chance = [tmp_path / f"run {number} 0"], 0, random.Random(seed + number)
        while kills < 10:
            before_kill = steps_in(runs[-1]) + chance.randrange(1, 4)
            if run_until(before_kill, signal.SIGKILL, wikitext, runs[-1])[0] == -signal.SIGKILL:
                kills += 1
            else:  # it was complete before the kill
                runs.append(tmp_path / f"run {number} {len(runs)}")
        go_on(wikitext, runs[-1])
        return runs

    with ThreadPoolExecutor() as two_at_a_time:
        all_runs = list(two_at_a_time.map(ten_kills, range(2)))
    for run in all_runs[0] + all_runs[1]:  # Keras loads one model at a time
        assert_same(json.loads((run / "results.json").read_text()), undisturbed)
