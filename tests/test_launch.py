"""`python -m recipes launch`: real workers, on this machine."""

import argparse
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults import addresses_of, children
from keras_replicas.cluster import worker_config
from keras_replicas.errors import UserError
from keras_replicas.launch import free_addresses, places
from keras_replicas.screen import as_left_on_screen
from tests.conftest import MESSAGES
from tests.test_bert_mlm import weights_of

ROOT = Path(__file__).parent.parent
RECIPES = [sys.executable, "-m", "recipes"]
OPTIONS = (
    *("--corpus", "LICENSE", "--model", "nano", "--vocabulary-size", "300", "--seq-length", "16"),
    *("--learning-rate", "5e-3", "--lr-scaling", "none", "--checkpoint-every", "7"),
)


def start(*words, **options):
    return subprocess.Popen(
        [*RECIPES, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finish(process):
    """Exit status, output and errors of a process, which may take its time, but not for ever."""
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, output, errors


def results_of(workdir):
    return json.loads((workdir / "results.json").read_text())


def steps_of(workdir):
    return [json.loads(line) for line in (workdir / "steps.jsonl").read_text().splitlines()]


def wait_for(path, lines):
    """Until a file has so many lines."""
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def assert_equal(workdir, other):
    """Within the bounds of `doctor`."""
    for ours, theirs in zip(steps_of(workdir), steps_of(other), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert {**ours, "loss": 0} == {**theirs, "loss": 0}
    ours, theirs = weights_of(results_of(workdir)), weights_of(results_of(other))
    assert sum(np.linalg.norm(ours[k] - theirs[k]) ** 2 for k in theirs) <= 1e-12 * sum(
        np.linalg.norm(weight) ** 2 for weight in theirs.values()
    )
    assert results_of(workdir)["val_loss"] == pytest.approx(results_of(other)["val_loss"], rel=1e-6)


# Words after `launch`, the environment, and what is answered.
WRONG = [
    ("--workers 0 bert_mlm", {}, "--workers must be at least 1, not 0"),
    ("--workers 1 --restarts -1 bert_mlm", {}, "--restarts must be at least 0, not -1"),
    ("--workers 1 --parameter-servers -1 glue_custom_loop", {}, "--parameter-servers must be at least 0, not -1"),
    ("--workers 1 --join-timeout 0 bert_mlm", {}, "--join-timeout must be at least 1, not 0"),
    ("--workers 2 --join-timeout 10000000000 bert_mlm", {}, "--join-timeout must be at most 999999, not 10000000000"),
    (
        "--workers 2 bert_mlm",
        {"SLURM_STEP_NUM_TASKS": "abc"},
        "SLURM_STEP_NUM_TASKS must be a whole number from 1 to 999999, not 'abc'",
    ),
    ("--workers 2 bert_mlm", {"TF_CONFIG": "{'worker': 1"}, "TF_CONFIG is malformed"),
    ("--workers 2 --hosts a:1,b:1 --worker-index 0 bert_mlm", {}, "leave it out when hosts are given"),
    ("bert_mlm", {}, "give --workers N for N workers on this machine, or --hosts"),
    ("--hosts a:1,b:1 bert_mlm", {}, "give --workers N for N workers on this machine, or --hosts"),
    ("--hosts a:1,b --worker-index 0 bert_mlm", {}, "'b' is not host:port"),
    ("--hosts a:1,b:x --worker-index 0 bert_mlm", {}, "'b:x' is not host:port"),
    ("--hosts a:1,a:1 --worker-index 0 bert_mlm", {}, "--hosts lists an address twice: a:1,a:1"),
    ("--hosts a:1,b:1 --worker-index 2 bert_mlm", {}, "--worker-index must be from 0 to 1, not 2"),
    ("--workers 2 bert", {}, "there is no recipe bert. Choose one of: bert_from_scratch bert_mlm"),
    ("--workers 2 bert_mlm --workdir /proc/run", {}, "cannot write to the work directory /proc/run"),
]


@pytest.mark.parametrize(("words", "environment", "message"), WRONG)
def test_what_is_wrong_is_told_before_anything_starts(words, environment, message, no_tensorflow):
    done = finish(start("launch", *words.split(), env=no_tensorflow | environment))
    MESSAGES.append((f"launch {words}", done[2].strip()))
    assert done[:2] == (2, "") and message in done[2] and done[2].count("\n") == 1


def test_places():
    def asked(**given):
        return argparse.Namespace(
            **{"workers": None, "parameter_servers": 0, "hosts": None, "worker_index": None} | given
        )

    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TF_CONFIG", raising=False)
        first, second = places(asked(workers=2))
        assert first["cluster"] == second["cluster"] and (first["task"]["index"], second["task"]["index"]) == (0, 1)
        assert places(asked(hosts="a:1,b:2", worker_index=1)) == [worker_config(["a:1", "b:2"], 1)]
        told = worker_config(["c:3", "d:4"], 0)
        environment.setenv("TF_CONFIG", json.dumps(told))
        assert places(asked(hosts="a:1,b:2", worker_index=1)) == [told]  # the environment comes first
        with pytest.raises(UserError, match="leave it out"):
            places(asked(workers=2))
    assert len(set(free_addresses(50))) == 50


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--workers 2", ["0,1", "2,3"]),
        ("--workers 5", ["0", "1", "2", "3", "4"]),
        ("--workers 2 --parameter-servers 1", ["", "0,1", "2,3", ""]),  # the chief, the workers, the server
    ],
)
def test_each_worker_has_gpus_of_its_own(tmp_path, words, given):
    """By a stand-in for `nvidia-smi`; what the workers find in their environment is real."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nfor i in 0 1 2 3 4; do echo GPU $i: NVIDIA H100; done\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "recipe.py").write_text(
        "import os, pathlib, time\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        "logs = pathlib.Path('runs/recipe/logs')\n"
        f"while sum(log.stat().st_size > 0 for log in logs.iterdir()) < {len(given)}: time.sleep(0.01)\n"
    )
    program = (
        "import sys, recipes.__main__ as line; line.recipe_path = lambda name: line.Path('recipe.py'); line.main()"
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    words = [sys.executable, "-c", program, "launch", *words.split(), "recipe"]
    launcher = subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    status, _, errors = finish(launcher)
    assert status == 0
    assert errors == ("1 GPU(s) stay unused: all workers must have the same number\n" if "2" in words else "")
    logs = sorted((tmp_path / "runs/recipe/logs").iterdir())
    assert [log.read_text().strip() for log in logs] == given


@pytest.mark.parametrize(("ignored", "status"), [(True, 0), (False, 143)])
def test_under_nohup_it_goes_on_when_the_terminal_closes(tmp_path, ignored, status):
    workdir = tmp_path / "run"
    (tmp_path / "recipe.py").write_text(
        "import pathlib, time\nprint('begun', flush=True)\nwhile not pathlib.Path('done').exists(): time.sleep(0.01)\n"
    )
    program = "import sys, recipes.__main__ as line; line.recipe_path = line.Path; line.main()"
    words = ["launch", "--workers", "1", str(tmp_path / "recipe.py"), "--workdir", str(workdir)]
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )
    wait_for(workdir / "logs/worker-0.log", 1)
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    (tmp_path / "done").touch()
    assert launcher.wait(timeout=60) == status


def test_the_log_has_lines_as_they_are_left_on_the_screen():
    assert as_left_on_screen(b"1/2 \x1b[1mhalf\x1b[0m\r\x1b[1m2/2\x1b[0m done\r") == b"2/2 done"
    assert as_left_on_screen(b"1/2\x08\x08\x082/2 done") == b"2/2 done"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process, on one replica."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    status, _, errors = finish(start("run", "bert_mlm", *OPTIONS, "--batch-size", 8, *ENDS, "--workdir", workdir))
    assert (status, errors) == (0, "")
    return workdir


ENDS = ("--epochs", "2", "--max-steps", "40", "--replicas", "1")


@pytest.mark.slow
def test_two_workers_compute_what_one_process_does(alone, tmp_path):
    workdir = tmp_path / "run"
    words = (*OPTIONS, "--batch-size", 4, *ENDS, "--workdir", workdir)
    status, output, errors = finish(start("launch", "--workers", 2, "bert_mlm", *words))
    assert (status, errors) == (0, "")
    results = results_of(workdir)
    assert (results["workers"], results["replicas"], results["global_batch_size"], results["steps"]) == (2, 2, 8, 40)
    assert_equal(workdir, alone)
    assert "batch: 4 examples x 2 replica(s) = 8" in output and output.count("validation loss") == 1  # the chief's
    assert (workdir / "logs/worker-0.log").read_text() == output
    assert "validation loss" not in (workdir / "logs/worker-1.log").read_text()
    assert len(list((workdir / "tensorboard").iterdir())) == 1  # the chief's alone

    words = (*OPTIONS, "--batch-size", 4, *ENDS, "--workdir", tmp_path / "plan", "--dry-run")
    status, output, errors = finish(start("launch", "--workers", 2, "bert_mlm", *words))
    assert (status, errors) == (0, "") and "40 steps" in output and not (tmp_path / "plan").exists()


@pytest.mark.long
def test_a_run_on_two_workers_goes_on_with_one_and_with_four(alone, tmp_path):
    workdir = tmp_path / "run"

    def words(batch_size):
        return (*OPTIONS, "--batch-size", batch_size, *ENDS, "--workdir", workdir)

    def stop_after(steps, launcher):
        wait_for(workdir / "steps.jsonl", steps)
        launcher.send_signal(signal.SIGTERM)
        assert finish(launcher)[0] == 143

    stop_after(5, start("launch", "--workers", 2, "bert_mlm", *words(4)))
    stop_after(20, start("launch", "--workers", 1, "bert_mlm", *words(4)))
    status, output, errors = finish(start("launch", "--workers", 4, "bert_mlm", *words(4)))
    assert (status, errors) == (0, "") and "batch: 2 examples x 4 replica(s) = 8" in output
    assert results_of(workdir)["workers"] == 4 and results_of(workdir)["resumed_from_step"] >= 20
    assert_equal(workdir, alone)


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_saves_and_leaves_nothing(tmp_path):
    workdir, (screen, theirs) = tmp_path / "run", pty.openpty()
    words = [*OPTIONS, "--batch-size", 4, "--epochs", 50, "--workdir", workdir]
    launcher = subprocess.Popen(
        [*RECIPES, "launch", "--workers", "2", "bert_mlm", *map(str, words)],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(1), os.O_RDWR)),  # the first terminal opened is the session's
    )
    os.close(theirs)
    shown = b""
    while shown.count(b"Epoch") < 3:
        shown += os.read(screen, 2**16)
    workers = children(launcher.pid)
    assert len(workers) == 2
    os.write(screen, b"\x03")
    with contextlib.suppress(OSError):  # how a terminal tells that nobody is at the other end
        while new := os.read(screen, 2**16):
            shown += new
    os.close(screen)
    assert launcher.wait() == 143 and not any(Path(f"/proc/{worker}").exists() for worker in workers)
    done = len(steps_of(workdir))
    assert f"Stopped by SIGTERM after step {done}" in shown.decode()
    assert re.search(rb"\x1b\[1m\d+/32\x1b\[0m .*\r.*\x1b\[1m\d+/32", shown)  # the bar, as it moves
    log = (workdir / "logs/worker-0.log").read_bytes()
    assert b"\x1b" not in log and b"\r" not in log and log.count(b"32/32") in (2, 3)  # as each epoch left it


def own_address():
    """This machine's address in the network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anywhere, contextlib.suppress(OSError):
        anywhere.connect(("192.0.2.99", 9))  # of documentation; nothing is sent
        return anywhere.getsockname()[0]
    pytest.skip("this machine has no address but that of loopback")


def is_open(host, address):
    try:
        socket.create_connection((host, int(address.rsplit(":", 1)[1])), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_workers_listen_to_their_own_machine_and_do_not_outlive_their_launcher(tmp_path):
    workdir = tmp_path / "run"
    launcher = start("launch", "--workers", 2, "bert_mlm", *OPTIONS, "--epochs", 50, "--workdir", workdir)
    wait_for(workdir / "steps.jsonl", 3)
    workers = children(launcher.pid)
    assert not any(is_open(own_address(), address) for address in addresses_of(workers[0]))
    assert all(is_open("127.0.0.1", address) for address in addresses_of(workers[0]))
    launcher.kill()
    finish(launcher)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_restarts_are_used_up_and_the_cause_is_named(tmp_path):
    workdir = tmp_path / "run"
    words = (*OPTIONS, "--epochs", 50, "--workdir", workdir, "--overwrite")
    launcher = start("launch", "--workers", 2, "--restarts", 1, "bert_mlm", *words)
    begun_at = []
    for at_least in (10, 20):
        wait_for(workdir / "steps.jsonl", at_least)
        begun_at.append(len(steps_of(workdir)))
        worker = children(launcher.pid)[1]
        os.kill(worker, signal.SIGKILL)
        while Path(f"/proc/{worker}").exists():
            time.sleep(0.05)
    status, output, errors = finish(launcher)
    assert status == 1 and "resuming from step" in output  # with --overwrite too
    assert errors.count("worker 1 was killed by SIGKILL") == 2
    assert "1 restart(s) left" in errors and "0 restart(s) left" in errors and "Traceback" not in output + errors


@pytest.mark.slow
def test_a_death_before_the_first_checkpoint_begins_anew(tmp_path):
    workdir = tmp_path / "run"
    options = (*OPTIONS, "--checkpoint-every", 99, "--workdir", workdir)
    assert finish(start("run", "bert_mlm", *options, "--max-steps", 2))[0] == 0
    words = (*options, "--seed", 1, "--max-steps", 25, "--overwrite")
    launcher = start("launch", "--workers", 2, "--restarts", 1, "bert_mlm", *words)
    wait_for(workdir / ".replaced/config.json", 9)
    wait_for(workdir / "steps.jsonl", 1)
    os.kill(children(launcher.pid)[1], signal.SIGKILL)
    status, output, errors = finish(launcher)
    assert status == 0 and "1 restart(s) left" in errors and "is restored: the one that was to replace it" in output
    assert results_of(workdir)["config"]["seed"] == 1 and results_of(workdir)["resumed_from_step"] is None
    assert not (workdir / ".replaced").exists()


@pytest.mark.slow
def test_a_death_after_the_results_does_not_train_the_run_again(tmp_path):
    workdir = tmp_path / "run"
    words = (*OPTIONS, "--max-steps", 8, "--workdir", workdir, "--overwrite")
    assert finish(start("run", "bert_mlm", *words, "--seed", 1))[0] == 0
    (workdir / "results.json").rename(tmp_path / "old.json")
    launcher = start("launch", "--workers", 2, "--restarts", 1, "bert_mlm", *words)
    wait_for(workdir / "results.json", 1)
    written = (workdir / "results.json").read_text()
    os.kill(children(launcher.pid)[0], signal.SIGKILL)
    status, output, errors = finish(launcher)
    assert status == 0 and "worker 0 was killed by SIGKILL" in errors and "is complete" in output
    assert (workdir / "results.json").read_text() == written and output.count("monitor it:") == 1


def by_hand(words, folders, roots=(ROOT, ROOT), code=None):
    """Two workers, each with words, a current folder and a project of its own; their status and errors."""
    addresses = free_addresses(2)
    started = []
    for i, (folder, root) in enumerate(zip(folders, roots, strict=True)):
        config = json.dumps(worker_config(addresses, i))
        environment = os.environ | {"TF_CONFIG": config, "PYTHONPATH": str(root)}
        program = ["-c", code] if code else [str(root / "recipes/bert_mlm.py")]
        command = [sys.executable, *program, *map(str, words[i])]
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=folder, env=environment, **options))
    return [(status, errors.strip()) for status, _, errors in map(finish, started)]


@pytest.mark.slow
def test_workers_that_do_not_belong_together_are_refused(tmp_path):
    words = (*OPTIONS, "--corpus", ROOT / "LICENSE", "--workdir", "run")
    refused = by_hand([words, (*words, "--seed", 1)], (tmp_path, tmp_path))
    message = "error: worker 1 was started differently from the chief: --seed 1, not 0"
    assert refused == [(2, message)] * 2 and not (tmp_path / "run").exists()

    for folder in ("common", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / "project" / folder)
    with (tmp_path / "project/keras_replicas/order.py").open("a") as file:
        file.write("# A change.\n")
    refused = by_hand([words, words], (tmp_path, tmp_path), (ROOT, tmp_path / "project"))
    assert refused[0] == refused[1] and refused[0][0] == 2
    assert re.fullmatch(r"error: worker 1 was started differently from the chief: code '\w+', not '\w+'", refused[0][1])

    (tmp_path / "elsewhere").mkdir()
    refused = by_hand([words, words], (tmp_path, tmp_path / "elsewhere"))
    message = "error: worker 1 does not see the chief's work directory run. Give a --workdir on a shared file system"
    assert refused == [(2, message)] * 2


@pytest.mark.slow
def test_workers_with_other_data_are_refused(tmp_path):
    """Two texts of one size, by the same path on two hosts; each is read from the worker's own current folder."""
    text = (ROOT / "LICENSE").read_text()
    for host, train in (("0", text), ("1", text.replace("Work", "Wort"))):
        (tmp_path / host / "texts").mkdir(parents=True)
        (tmp_path / host / "texts/wiki.train.tokens").write_text(train)
        (tmp_path / host / "texts/wiki.valid.tokens").write_text(text)
    characters = [f"{at}{chr(code)}" for code in range(33, 127) for at in ("", "##")]
    (tmp_path / "vocabulary").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]))
    words = (*OPTIONS, "--corpus", "texts", "--workdir", tmp_path / "run", "--vocabulary", tmp_path / "vocabulary")
    refused = by_hand([words, words], (tmp_path / "0", tmp_path / "1"))
    assert refused[0] == refused[1] and refused[0][0] == 2
    message = r"error: worker 1 has different data than the chief: checksum of train \d+, not \d+"
    assert re.match(message, refused[0][1]) and not (tmp_path / "run/steps.jsonl").exists()


# A worker whose model starts from its own index where told to differ. It prints the step, or ends with status 2.
OTHER_WEIGHTS = """
import sys
from pathlib import Path
from keras_replicas.cluster import worker_index
from common.run.command_line import run
from keras_replicas.strategy import make_strategy
import keras
from common.run.checkpoints import Checkpoints

def restore(differ):
    with make_strategy(1).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.set_weights([weight * 0 + differ * worker_index() for weight in model.get_weights()])
    print(Checkpoints(Path(sys.argv[2]), 1, model=model).restore())

run(restore, int(sys.argv[1]))
"""


@pytest.mark.parametrize("differ", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_with_other_weights_are_refused(tmp_path, differ):
    addresses = free_addresses(2)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", OTHER_WEIGHTS, str(differ), str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"TF_CONFIG": json.dumps(worker_config(addresses, index)), "KERAS_BACKEND": "tensorflow"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for status, output, errors in map(finish, workers):
        if differ:
            message = r"error: worker 1 starts from different weights .*: checksum of the weights \d+, not \d+\n"
            assert status == 2 and re.search(message, errors)
        else:
            assert (status, output.splitlines()[-1]) == (0, "0")


# A worker that says it has one device more than it has, or chose another precision, than the chief.
DIFFERENT = """
import dataclasses, sys
from keras_replicas.cluster import worker_index
from common.run.command_line import run
from common.run.runs import open_run
from keras_replicas.strategy import make_strategy

@dataclasses.dataclass
class Config:
    workdir: str
    batch_size: int = 8
    lr_scaling: str = "none"
    overwrite: bool = False

def main(config):
    make_strategy()
    opened = open_run("a", config)
    opened.keep("chosen_precision", ("float32", sys.argv[2])[worker_index()])
    opened.scale(config, (2, int(sys.argv[3]))[worker_index()], 0.1, "sgd")

run(main, Config(sys.argv[1]))
"""


@pytest.mark.slow
def test_workers_with_other_devices_or_precision_are_refused(tmp_path):
    def told(*words):
        ended = by_hand([words] * 2, (ROOT, ROOT), code=DIFFERENT)
        return [(status, errors.splitlines()[-1]) for status, errors in ended]

    different = "worker 1 has different devices than the chief, or --precision auto chose another dtype policy there"
    for precision, replicas, message in (
        ("float32", 4, "replicas 2, not 1"),
        ("mixed_bfloat16", 2, "precision 'mixed_bfloat16', not 'float32'"),
    ):
        assert told(tmp_path / str(replicas), precision, replicas) == [(2, f"error: {different}: {message}")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_does_not_come_is_named(tmp_path, index):
    addresses = free_addresses(2)
    hosts = ("--hosts", ",".join(addresses), "--worker-index", index, "--join-timeout", 2)
    status, _, errors = finish(start("launch", *hosts, "bert_mlm", *OPTIONS, "--workdir", tmp_path))
    assert status == 2 and errors.endswith(f"these workers have not joined within 2 s: {addresses[1 - index]}\n")


@pytest.mark.slow
def test_a_port_that_is_taken(tmp_path):
    taken, *others = free_addresses(2)
    with socket.create_server(("127.0.0.1", int(taken.split(":")[1]))):
        hosts = ("--hosts", ",".join([taken, *others]), "--worker-index", 0)
        status, _, errors = finish(start("launch", *hosts, "bert_mlm", *OPTIONS, "--workdir", tmp_path))
    assert status == 2 and f"cannot listen at {taken} (Address already in use). Give another port" in errors
