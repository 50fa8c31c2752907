"""A run that is killed and goes on ends as if it had never stopped: real processes, real signals."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from common.run.step_log import RunLog
from common.training.explicit_step import COUNTS, MEANS

from keras_replicas import Checkpoints, UserError
from tests.test_bert_mlm import weights_of

ROOT = Path(__file__).parent.parent
CHECKPOINT_EVERY = 4


def command(wikitext, workdir, *more):
    options = {
        "corpus": wikitext,
        "workdir": workdir,
        "vocabulary-size": 300,
        "seq-length": 32,
        "batch-size": 64,
        "dropout": 0.1,
        "epochs": 3,
        "checkpoint-every": CHECKPOINT_EVERY,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
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
    output, _ = process.communicate(timeout=1200)
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
        "mfu",
        "peak_flops_per_second",
        "peak_memory_mb",
        "resumed_from_step",
        "config",
    }
    for name in undisturbed.keys() - own:
        assert results[name] == undisturbed[name], name


@pytest.fixture
def counter(tmp_path):
    """Checkpoints of a number, as a new process makes them, and the number."""

    def make():
        number = tf.Variable(0)
        return Checkpoints(tmp_path / "checkpoints", every=1, number=number), number

    return make


def save(counter, *steps):
    checkpoints, number = counter()
    checkpoints.restore()
    for step in steps:
        number.assign(step)
        checkpoints.save(step)
    return checkpoints


def steps_of(folder):
    return sorted(int(path.stem[5:]) for path in folder.glob("ckpt-*.index") if path.stem[5:].isdecimal())


def restored(counter):
    checkpoints, number = counter()
    step = checkpoints.restore()
    assert number == step
    return step


def test_checkpoints_are_found_without_a_list_of_them(counter, tmp_path):
    folder = tmp_path / "checkpoints"
    save(counter, 4, 8, 12, 100)
    assert steps_of(folder) == [8, 12, 100]
    assert len(list(folder.iterdir())) == 6  # an index and its data for each
    (folder / "checkpoint").write_text("")  # the list that TensorFlow's CheckpointManager keeps
    (folder / "ckpt-best.index").write_text("of the user")
    assert restored(counter) == 100
    (folder / "ckpt-100.index").write_bytes((folder / "ckpt-100.index").read_bytes()[:50])
    (folder / "ckpt-13.data-00000-of-00001").write_text("whose index was removed first, or was not there yet")
    assert restored(counter) == 12 and not list(folder.glob("ckpt-13*"))
    (folder / "ckpt-12.data-00000-of-00001").unlink()
    assert restored(counter) == 8
    save(counter, 9)
    assert steps_of(folder) == [8, 9]  # what cannot be read takes no good one's place
    assert (folder / "ckpt-best.index").exists()


def test_checkpoints_of_the_manager_before_are_read(counter, tmp_path):
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(number=tf.Variable(7)), str(tmp_path / "checkpoints"), 3)
    manager.save(checkpoint_number=7)
    assert restored(counter) == 7


def test_none_that_can_be_read_is_told_of_and_nothing_is_removed(counter, tmp_path):
    save(counter, 4, 8)
    for path in (tmp_path / "checkpoints").glob("*.data*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in .* can be read: remove it"):
        restored(counter)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4


def test_a_checkpoint_is_on_the_disk_before_the_one_before_it_is_deleted(counter, tmp_path, monkeypatch):
    synced, fsync, unlink = set(), os.fsync, Path.unlink
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)))

    def checked(path):
        assert {f"ckpt-{5 if '-2' in path.name else 4}.index"} <= synced
        unlink(path)

    monkeypatch.setattr(Path, "unlink", checked)
    save(counter, 1, 2, 3, 4, 5)
    assert steps_of(tmp_path / "checkpoints") == [3, 4, 5]
    assert {f"ckpt-{step}.{end}" for step in range(1, 6) for end in ("index", "data-00000-of-00001")} <= synced


def test_another_model_is_not_called_damage(counter, tmp_path, caplog):
    save(counter, 4)
    for other in ({"number": tf.Variable([0, 0])}, {"number": tf.Variable(0), "more": tf.Variable(0)}):
        with pytest.raises(UserError, match="the model does not match the checkpoint .*ckpt-4 .*Give the model"):
            Checkpoints(tmp_path / "checkpoints", **other).restore()
    assert "damaged" not in caplog.text and restored(counter) == 4


def test_a_record_with_lines_missing_is_kept_as_it_is(tmp_path, caplog):
    def begun(step):
        log = RunLog(tmp_path, 3)
        log.begin(step)
        return log

    values = {name: np.arange(1.0, 7.0) for name in (*MEANS, *COUNTS, "learning_rate")}
    begun(0).record(values, 1.0)
    path = tmp_path / "steps.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    assert begun(6).epoch["loss"] == np.average([4, 5, 6], weights=[4, 5, 6])
    path.write_text("".join([*whole[:2], whole[2][:20] + "\n", "\0\0\0\n", *whole[4:]]))  # 3 is cut, 4 is gone
    log = begun(6)
    assert f"{path} lacks the lines of 2 of 6 steps" in caplog.text
    assert log.epoch["loss"] == np.average([5, 6], weights=[5, 6]) and log.step == 6
    log.record(values, 1.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 5, 6, *range(7, 13)]
    path.unlink()
    with pytest.raises(UserError, match="has no line of the 6 steps that this run has completed. Restore it"):
        begun(6)


@pytest.mark.parametrize("ignored", [True, False])
def test_sigterm_is_listened_to_where_it_is_not_ignored(tmp_path, ignored):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with Checkpoints(tmp_path) as checkpoints:
            os.kill(os.getpid(), signal.SIGTERM)
            assert checkpoints.told_to_stop == (not ignored)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_sigterm_saves_and_leaves_with_143(wikitext, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    status, output, done = run_until(5, signal.SIGTERM, wikitext, workdir, "--overwrite")
    assert status == 143 and f"Stopped by a signal after step {done}" in output
    _, results = go_on(wikitext, workdir, "--overwrite")  # the same command, as a scheduler gives it again
    assert results["resumed_from_step"] == done
    assert_same(results, undisturbed)


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_one_before(wikitext, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    run_until(9, signal.SIGKILL, wikitext, workdir)
    (workdir / "checkpoints/checkpoint").write_text("")  # of TensorFlow's CheckpointManager; nothing is read from it
    data = max((workdir / "checkpoints").glob("*.data*"), key=lambda path: path.stat().st_mtime)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    (workdir / "checkpoints/ckpt-99_temp").mkdir()  # as one that is killed while it writes leaves
    output, results = go_on(wikitext, workdir)
    assert "is damaged" in output and results["resumed_from_step"] == 4
    assert not list((workdir / "checkpoints").glob("*_temp")) and "resuming from step 4" in output
    assert_same(results, undisturbed)


# In a mount namespace of its own: a disk of 14 MB, which holds two checkpoints and no third. Then room is made.
FULL_DISK = """
mount -t tmpfs -o size=14m none {disk} && {command} --overwrite; echo "status $?"
ls {disk}/run/checkpoints
mount -o remount,size=1g {disk} && {command} && cp -r {disk}/run {copy}
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so(wikitext, tmp_path):
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    adamw = "--optimizer", "adamw"  # of whose checkpoints two fit, and no third
    script = FULL_DISK.format(disk=disk, copy=copy, command=shlex.join(command(wikitext, disk / "run", *adamw)))
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True)
    full, afterwards = done.stdout.split("status 1\n")
    assert "could not be written (No space left on device). The last good one is of step 8." in full
    assert done.stderr.startswith("error: ") and "Free some space and give the same command again" in done.stderr
    assert done.stderr.count("\n") == 1  # no traceback
    assert "_temp" not in afterwards and "resuming from step 8" in afterwards
    assert json.loads((copy / "results.json").read_text())["resumed_from_step"] == 8
