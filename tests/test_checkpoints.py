"""A run that is killed and goes on ends as if it had never stopped: real processes, real signals."""

import functools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.run.checkpoints import Checkpoints
from common.run.step_log import StepLog
from common.training.explicit_step import COUNTS, MEANS
from keras_replicas.errors import UserError
from tests.hub import URI, StandIn, environment
from tests.test_bert_mlm import weights_of

ROOT = Path(__file__).parent.parent
CHECKPOINT_EVERY = 4
STEPS = 24  # of the runs below: three epochs of eight steps, the last of each not full


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
        "mfu",
        "peak_flops_per_second",
        "input_wait_fraction",
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
        return Checkpoints(tmp_path, 1, number=number), number

    return make


def save(counter, *steps):
    checkpoints, number = counter()
    checkpoints.restore()
    for step in steps:
        number.assign(step)
        checkpoints.save(step)
    return checkpoints


def restored(counter):
    checkpoints, number = counter()
    step = checkpoints.restore()
    assert number == step
    return step


def test_checkpoints_are_found_without_a_list_of_them(counter, tmp_path):
    assert save(counter, 4, 8, 12, 100).steps() == [8, 12, 100]
    folder = tmp_path / "checkpoints"
    assert len(list(folder.iterdir())) == 6  # an index and its data for each
    (folder / "checkpoint").write_text("")  # the list that TensorFlow's CheckpointManager keeps
    (folder / "ckpt-best.index").write_text("of the user")
    assert restored(counter) == 100
    (folder / "ckpt-100.index").write_bytes((folder / "ckpt-100.index").read_bytes()[:50])
    (folder / "ckpt-13.data-00000-of-00001").write_text("whose index was removed first, or was not there yet")
    assert restored(counter) == 12 and not list(folder.glob("ckpt-13*"))
    (folder / "ckpt-12.data-00000-of-00001").unlink()
    assert restored(counter) == 8
    assert save(counter, 9).steps() == [8, 9]  # what cannot be read takes no good one's place
    assert (folder / "ckpt-best.index").exists()


def test_checkpoints_of_the_manager_before_are_read(counter, tmp_path):
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(number=tf.Variable(7)), str(tmp_path / "checkpoints"), 3)
    manager.save(checkpoint_number=7)
    assert restored(counter) == 7


def test_none_that_can_be_read_is_told_of_and_nothing_is_removed(counter, tmp_path):
    save(counter, 4, 8)
    for path in (tmp_path / "checkpoints").glob("*.data*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in .* can be read: give another --workdir, or remove"):
        restored(counter)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4


def test_a_checkpoint_is_on_the_disk_before_the_one_before_it_is_deleted(counter, tmp_path, monkeypatch):
    synced, fsync, unlink = set(), os.fsync, Path.unlink
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)))

    def checked(path):
        assert {f"ckpt-{5 if '-2' in path.name else 4}.index"} <= synced and "steps.jsonl" in synced
        unlink(path)

    (tmp_path / "steps.jsonl").write_text("{}")
    monkeypatch.setattr(Path, "unlink", checked)
    assert save(counter, 1, 2, 3, 4, 5).steps() == [3, 4, 5]
    assert {f"ckpt-{step}.{end}" for step in range(1, 6) for end in ("index", "data-00000-of-00001")} <= synced


def test_another_model_is_not_called_damage(counter, tmp_path, capsys):
    save(counter, 4)
    for other in ({"number": tf.Variable([0, 0])}, {"number": tf.Variable(0), "more": tf.Variable(0)}):
        with pytest.raises(UserError, match="the model does not match the checkpoint .*ckpt-4 .*Give the --model"):
            Checkpoints(tmp_path, 1, **other).restore()
    assert "damaged" not in capsys.readouterr().out and restored(counter) == 4


def test_a_record_with_lines_missing_is_kept_as_it_is(tmp_path, capsys):
    values = {name: np.arange(1.0, 7.0) for name in (*MEANS, *COUNTS, "learning_rate", "waited")}
    StepLog(tmp_path, 3).record(values, 1.0)
    path = tmp_path / "steps.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    assert StepLog(tmp_path, 3, 6).epoch["loss"] == np.average([4, 5, 6], weights=[4, 5, 6])
    path.write_text("".join([*whole[:2], whole[2][:20] + "\n", "\0\0\0\n", *whole[4:]]))  # 3 is cut, 4 is gone
    log = StepLog(tmp_path, 3, 6)
    assert f"{path} lacks the lines of 2 of 6 steps: the results" in capsys.readouterr().out
    assert log.epoch["loss"] == np.average([5, 6], weights=[5, 6]) and log.step == 6
    log.record(values, 1.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 5, 6, *range(7, 13)]
    path.unlink()
    with pytest.raises(
        UserError, match="steps.jsonl has no line of the 6 steps that this run has completed. Restore it"
    ):
        StepLog(tmp_path, 3, 6)


@pytest.mark.parametrize("ignored", [True, False])
def test_sigterm_is_listened_to_where_it_is_not_ignored(tmp_path, ignored):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with Checkpoints(tmp_path, 1) as checkpoints:
            os.kill(os.getpid(), signal.SIGTERM)
            assert checkpoints.told_to_stop == (not ignored)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_sigterm_saves_and_leaves_with_143(wikitext, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    status, output, done = run_until(5, signal.SIGTERM, wikitext, workdir, "--overwrite")
    assert status == 143 and f"Stopped by SIGTERM after step {done}" in output
    _, results = go_on(wikitext, workdir, "--overwrite")  # the same command, as a scheduler gives it again
    assert results["resumed_from_step"] == done
    assert_same(results, undisturbed)


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_as_sigterm_does(wikitext, tmp_path):
    status, output, done = run_until(5, signal.SIGINT, wikitext, tmp_path / "run")
    assert status == 143 and f"Stopped by Ctrl-C after step {done}" in output and "Traceback" not in output


def validations_in(workdir):
    """The losses after each epoch that TensorBoard shows."""
    board = EventAccumulator(str(workdir / "tensorboard"), {"tensors": 0})
    board.Reload()
    if "validation/loss" not in board.Tags()["tensors"]:
        return {}
    return {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in board.Tensors("validation/loss")}


@pytest.mark.slow
def test_a_signal_during_a_validation_loses_neither_it_nor_the_snapshot(wikitext, tmp_path):
    with StandIn() as hub:
        options = {"corpus": wikitext, "model": "nano", "vocabulary-size": 300, "seq-length": 32, "batch-size": 64}
        options |= {"epochs": 2, "checkpoint-every": 1, "push-to": URI, "data": tmp_path / "data"}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        begin = functools.partial(
            subprocess.Popen, env=environment(hub, HF_HUB_DISABLE_XET="1"), stdout=subprocess.PIPE, text=True
        )

        def command(workdir):
            return [sys.executable, str(ROOT / "recipes/bert_from_scratch.py"), *words, "--workdir", str(workdir)]

        def finish(workdir):
            process = begin(command(workdir))
            assert (process.communicate(), process.returncode)[1] == 0
            results = json.loads((workdir / "results.json").read_text())
            cards = {path.parent.name: path.read_text() for path in workdir.glob("snapshots/*/README.md")}
            return results, (validations_in(workdir), cards, (workdir / "steps.jsonl").read_text(), results["val_loss"])

        results, expected = finish(tmp_path / "undisturbed")
        epoch = results["steps"] // 2
        assert list(expected[0]) == [epoch, 2 * epoch] and set(expected[1]) == {f"step-{epoch}", f"step-{2 * epoch}"}
        for sig, status, saved in ((signal.SIGKILL, -9, epoch - 1), (signal.SIGTERM, 143, epoch)):
            workdir = tmp_path / sig.name
            process = begin(command(workdir))
            while process.poll() is None and steps_in(workdir) < epoch:
                time.sleep(0.002)
            time.sleep(0.2)  # the first validation is traced for longer
            assert validations_in(workdir) == {}
            process.send_signal(sig)
            output, _ = process.communicate(timeout=60)
            assert process.returncode == status
            assert ("Stopped by SIGTERM" in output) == (list(validations_in(workdir)) == [epoch]) == (status == 143)
            results, found = finish(workdir)
            assert results["resumed_from_step"] == saved and found == expected


@pytest.mark.slow
def test_deterministic_changes_no_bit_on_a_cpu(wikitext, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    assert run_until(5, signal.SIGTERM, wikitext, workdir, "--deterministic")[0] == 143
    assert_same(go_on(wikitext, workdir, "--deterministic")[1], undisturbed)


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
    undisturbed = go_on(wikitext, tmp_path / "undisturbed", *adamw)[1]
    script = FULL_DISK.format(disk=disk, copy=copy, command=shlex.join(command(wikitext, disk / "run", *adamw)))
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True)
    full, afterwards = done.stdout.split("status 1\n")
    assert "of step 12 could not be written (No space left on device). The last good one is of step 8." in full
    assert done.stderr.startswith("error: ") and "Free some space and give the same command again" in done.stderr
    assert done.stderr.count("\n") == 1  # no traceback
    assert "_temp" not in afterwards and "resuming from step 8" in afterwards
    results = json.loads((copy / "results.json").read_text())
    assert_same(results | {"config": results["config"] | {"workdir": str(copy)}}, undisturbed)


@pytest.mark.slow
def test_overwrite_lets_go_of_the_old_run_at_the_first_checkpoint_of_the_new(wikitext, undisturbed, tmp_path):
    workdir, replaced = tmp_path / "run", tmp_path / "run/.replaced"
    shutil.copytree(undisturbed["config"]["workdir"], workdir)
    anew = command(wikitext, workdir, "--seed", "1", "--overwrite", "--checkpoint-every", "99")

    def killed_when(seen):
        process = subprocess.Popen(anew, stdout=subprocess.DEVNULL)
        while not seen():
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
        process.wait()

    killed_when(lambda: (replaced / "config.json").exists() and steps_in(workdir) > 1)
    output, results = go_on(wikitext, workdir)
    assert "is restored: the one" in output and "is complete" in output and results == undisturbed
    killed_when(lambda: not replaced.exists() and 8 < steps_in(workdir) < STEPS)  # an epoch is 8
    refused = subprocess.run(command(wikitext, workdir), capture_output=True, text=True)
    assert refused.returncode == 2 and "seed 1, not 0" in refused.stderr


@pytest.mark.long
def test_another_split_of_the_batch_goes_on_and_other_options_do_not(wikitext, tmp_path):
    workdir = tmp_path / "run"
    run_until(5, signal.SIGTERM, wikitext, workdir, "--dropout", "0")
    refused = subprocess.run(command(wikitext, workdir, "--seed", "1"), capture_output=True, text=True)
    assert refused.returncode == 2 and "dropout 0.0, not 0.1, seed 0, not 1" in refused.stderr
    refused = subprocess.run(
        command(wikitext, workdir, "--dropout", "0", "--batch-size", "32"), capture_output=True, text=True
    )
    assert refused.returncode == 2 and "a global batch of 128, which is not 2 replicas x 32" in refused.stderr
    output, results = go_on(wikitext, workdir, "--dropout", "0", "--replicas", "1")
    assert "batch: 128 examples x 1 replica(s) = 128" in output
    assert results["learning_rate"]["peak"] == pytest.approx(2**0.5 * 1e-2)
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
