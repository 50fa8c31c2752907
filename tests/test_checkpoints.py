"""The files of `Checkpoints`: atomic, found without a list, and what is damaged falls back to the one before."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from keras_replicas import Checkpoints, UserError
from tests.conftest import ROOT


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
    with pytest.raises(UserError, match="all checkpoints in .* are damaged: remove that folder"):
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


@pytest.mark.parametrize("ignored", [True, False])
def test_sigterm_is_listened_to_where_it_is_not_ignored(tmp_path, ignored):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with Checkpoints(tmp_path) as checkpoints:
            os.kill(os.getpid(), signal.SIGTERM)
            assert checkpoints.told_to_stop == (not ignored)
    finally:
        signal.signal(signal.SIGTERM, before)


# Ten steps of a loop; each checkpoint takes 5 MB.
PROGRAM = """
import sys
import tensorflow as tf
from keras_replicas import Checkpoints
with Checkpoints(sys.argv[1], every=1, number=tf.Variable(tf.random.uniform([10**6 * 5 // 4]))) as checkpoints:
    first = checkpoints.restore()
    print("from", first, flush=True)
    for step in range(first, 10):
        checkpoints.save_if_due(step + 1)
"""
# In a mount namespace of its own: a disk that holds two checkpoints and no third. Then room is made.
FULL_DISK = """
mount -t tmpfs -o size=14m none {disk} && {command}; echo "status $?"
ls {disk}/run
mount -o remount,size=1g {disk} && {command} && ls {disk}/run
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so(tmp_path):
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    command = shlex.join([sys.executable, "-c", PROGRAM, f"{tmp_path}/run"])
    script = FULL_DISK.format(disk=tmp_path, command=command)
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    full, afterwards = done.stdout.split("status 0\n")
    told = "The checkpoint ckpt-3 could not be written (No space left on device). The last good one is of step 2."
    assert full == "from 0\n" and told in done.stderr
    assert "_temp" not in afterwards and "from 2\n" in afterwards and "ckpt-10.index" in afterwards
