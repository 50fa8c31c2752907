"""`python -m keras_replicas launch`: real processes, on this machine."""

import argparse
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults import children
from keras_replicas.cluster import worker_config
from keras_replicas.errors import UserError
from keras_replicas.launch import free_addresses, tf_configs
from tests.conftest import MESSAGES
from tests.test_bert_mlm import weights_of

ROOT = Path(__file__).parent.parent
LAUNCH = [sys.executable, "-m", "keras_replicas", "launch"]
RECIPES = [sys.executable, "-m", "recipes"]
OPTIONS = (
    *("--corpus", "LICENSE", "--model", "nano", "--vocabulary-size", "300", "--seq-length", "16"),
    *("--learning-rate", "5e-3", "--lr-scaling", "none", "--checkpoint-every", "7"),
)
# A script that ends, dies or waits as it is told, without TensorFlow. Its files are named after its rank and its start.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

def stop(*_):
    print("saved", flush=True)
    sys.exit(143)

task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
start = next(i for i in range(9) if not Path(f"begun-{task}-{i}").exists())
signal.signal(signal.SIGTERM, stop)
print("worker", task, "start", start, *sys.argv)
Path(f"begun-{task}-{start}").touch()
while sys.argv[1:2] == ["wait"] and not Path("done").exists():
    time.sleep(0.01)
if sys.argv[1:2] == ["end"]:  # this worker, with this status
    sys.exit(int(sys.argv[3]) * (int(sys.argv[2]) == task))
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the script, as `train.py` and in a package."""
    (tmp_path / "package").mkdir()
    for path in (tmp_path / "train.py", tmp_path / "package/train.py", tmp_path / "package/__init__.py"):
        path.write_text(SCRIPT if path.stem == "train" else "")
    return tmp_path


def start(*words, cwd=ROOT, command=RECIPES, **options):
    environment = {"env": os.environ | {"PYTHONPATH": str(ROOT)}} | options
    return subprocess.Popen(
        [*command, *map(str, words)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **environment,
    )


def finish(process):
    """Exit status, output and errors of a process, which may take its time, but not for ever."""
    try:
        output, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, output, errors


def launched(folder, *words):
    return finish(start(*words, cwd=folder, command=LAUNCH))


def log(folder, worker):
    return (folder / f"logs/worker-{worker}.log").read_text()


def results_of(workdir):
    return json.loads((workdir / "results.json").read_text())


def steps_of(workdir):
    return [json.loads(line) for line in (workdir / "steps.jsonl").read_text().splitlines()]


def wait_until(condition, what):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def wait_for(path, lines=0):
    """Until there is a file, with so many lines."""
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= lines, path)


def is_over(pid):
    return not Path(f"/proc/{pid}").exists()


# Words after `launch`, the environment, and what is answered.
WRONG = [
    ("--workers 0 train.py", {}, "--nproc-per-node: must be a whole number from 1 to 999999, not '0'"),
    ("--workers 1 --max-restarts -1 train.py", {}, "--max-restarts: must be a whole number from 0 to 999999, not '-1'"),
    ("--workers 1 --join-timeout 0 train.py", {}, "--join-timeout: must be a whole number from 1 to 999999, not '0'"),
    ("--workers 1 --join-timeout 10000000000 train.py", {}, "from 1 to 999999, not '10000000000'"),
    (
        "--workers 2 train.py",
        {"SLURM_STEP_NUM_TASKS": "abc"},
        "SLURM_STEP_NUM_TASKS must be a whole number from 1 to 999999, not 'abc'",
    ),
    ("--workers 2 train.py", {"TF_CONFIG": "{'worker': 1"}, "TF_CONFIG is malformed"),
    ("--workers 2 --hosts a:1,b:1 --node-rank 0 train.py", {}, "leave it out when hosts are given"),
    ("train.py", {}, "give --workers N for N workers on this machine, or --hosts"),
    ("--hosts a:1,b:1 train.py", {}, "give --workers N for N workers on this machine, or --hosts"),
    ("--hosts a:1,b --node-rank 0 train.py", {}, "'b' is not host:port"),
    ("--hosts a:1,b:x --node-rank 0 train.py", {}, "'b:x' is not host:port"),
    ("--hosts a:1,a:1 --node-rank 0 train.py", {}, "--hosts lists an address twice: a:1,a:1"),
    ("--hosts a:1,b:1 --node-rank 2 train.py", {}, "--node-rank must be from 0 to 1, not 2"),
    ("--workers 2", {}, "give a script, such as train.py"),
    ("--workers 2 nowhere.py", {}, "there is no script nowhere.py"),
    ("--workers 2 -m nowhere.train", {}, "there is no module nowhere.train"),
    ("--workers 2 --log-dir /proc/logs train.py", {}, "cannot write to /proc/logs"),
    ("--workers 2 --restarts 1 train.py", {}, "unrecognized arguments: --restarts"),
]


@pytest.mark.parametrize(("words", "environment", "message"), WRONG)
def test_what_is_wrong_is_told_before_anything_starts(words, environment, message, folder, no_tensorflow):
    no_tensorflow = no_tensorflow | {"PYTHONPATH": f"{no_tensorflow['PYTHONPATH']}:{ROOT}"}
    done = finish(start(*words.split(), cwd=folder, command=LAUNCH, env=no_tensorflow | environment))
    MESSAGES.append((f"launch {words}", done[2].strip()))
    assert done[:2] == (2, "") and message in done[2] and done[2].count("\n") == 1
    assert not (folder / "logs").exists()


@pytest.mark.parametrize("words", ["", "--help", "launch --help", "doctor --help"])
def test_the_guide_and_help_need_no_tensorflow(words, no_tensorflow):
    environment = no_tensorflow | {"PYTHONPATH": f"{no_tensorflow['PYTHONPATH']}:{ROOT}"}
    status, output, errors = finish(start(*words.split(), command=LAUNCH[:-1], env=environment))
    assert (status, errors) == (0, "") and "python -m keras_replicas" in output


def test_a_recipe_is_launched_by_its_name():
    status, _, errors = finish(start("launch", "--workers", 2, "bert"))
    assert status == 2 and "there is no recipe bert. Choose one of: bert_from_scratch bert_mlm" in errors
    status, output, errors = finish(start("launch", "--workers", 1, "bert_mlm", "--help"))
    assert (status, errors) == (0, "") and "--mask-rate" in output


def test_the_addresses_of_workers():
    def asked(**given):
        return argparse.Namespace(**{"workers": None, "hosts": None, "node_rank": None} | given)

    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TF_CONFIG", raising=False)
        first, second = tf_configs(asked(workers=2))
        assert first["cluster"] == second["cluster"] and (first["task"]["index"], second["task"]["index"]) == (0, 1)
        assert tf_configs(asked(hosts="a:1,b:2", node_rank=1)) == [worker_config(["a:1", "b:2"], 1)]
        given = worker_config(["c:3", "d:4"], 0)
        environment.setenv("TF_CONFIG", json.dumps(given))
        assert tf_configs(asked(hosts="a:1,b:2", node_rank=1)) == [given]  # the environment comes first
        with pytest.raises(UserError, match="leave it out"):
            tf_configs(asked(workers=2))
    assert len(set(free_addresses(50))) == 50


@pytest.mark.parametrize("script", [["train.py"], ["-m", "package.train"]])
def test_all_that_follows_a_script_is_its_own(script, folder):
    (folder / "logs").mkdir()
    (folder / "logs/worker-1.log").write_text("of another launch\n")
    words = ["one", "--workers", "7", "-m", "--log-dir", "--", "--help", ""]
    status, output, errors = launched(folder, "--nproc-per-node", 2, *script, *words)
    name = script[-1] if len(script) == 1 else str(folder / "package/train.py")
    said = [f"worker {i} start 0 {' '.join([name, *words])}\n" for i in range(2)]
    assert (status, output, errors) == (0, said[0], "")
    assert log(folder, 1) == said[1]


def test_a_worker_of_several_hosts(folder):
    hosts = ["--hosts", "h1:8888,h2:8888", "--node-rank", 1, "--log-dir", "a/b"]
    assert launched(folder, *hosts, "train.py") == (0, "", "")
    assert (folder / "a/b/worker-1.log").read_text() == "worker 1 start 0 train.py\n"


@pytest.mark.parametrize("worker", [0, 1])
def test_a_status_is_the_scripts(worker, folder):
    status, output, errors = launched(folder, "--workers", 2, "--max-restarts", 1, "train.py", "end", worker, 3)
    assert status == 3 and output.count("worker 0") == 2
    told = "" if worker == 0 else "; logs/worker-1.log ends:"  # the chief's is shown
    assert errors.count(f"error: worker {worker} ended with status 3{told}\n") == 2
    assert errors.endswith("0 restart(s) left\n") and (folder / "begun-1-1").exists()


@pytest.mark.parametrize("worker", [0, 1])
def test_wrong_input_is_not_tried_again(worker, folder):
    status, _, errors = launched(folder, "--workers", 2, "--max-restarts", 1, "train.py", "end", worker, 2)
    assert status == 2 and not (folder / "begun-1-1").exists()
    assert errors == ("" if worker == 0 else "worker 1: worker 1 start 0 train.py end 1 2\n")  # the chief's is shown


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_after_a_death_all_start_again(fault, folder):
    launcher = start("--workers", 2, "--max-restarts", 1, "train.py", "wait", cwd=folder, command=LAUNCH)
    for time_ in range(2):
        for worker in range(2):
            wait_for(folder / f"begun-{worker}-{time_}")
        first, second = children(launcher.pid)
        os.kill(second, fault)
        if fault == signal.SIGSTOP:
            os.kill(first, signal.SIGKILL)  # as one that loses the other ends
        wait_until(lambda pids=(first, second): all(map(is_over, pids)), "the end of both")
    status, output, errors = finish(launcher)
    cause = "was killed by SIGKILL" if fault == signal.SIGKILL else "hangs: it is stopped (SIGSTOP)"
    ends = [f"error: worker 1 {cause}\n{left} restart(s) left\n" for left in (1, 0)]
    assert (status, errors) == (1, "".join(ends)) and output.count("worker 0") == 2


@pytest.mark.parametrize("told", ["the launcher", "a worker"])
def test_sigterm_lets_all_save(told, folder):
    launcher = start("--workers", 2, "--max-restarts", 9, "train.py", "wait", cwd=folder, command=LAUNCH)
    for worker in range(2):
        wait_for(folder / f"begun-{worker}-0")
    os.kill(launcher.pid if told == "the launcher" else children(launcher.pid)[1], signal.SIGTERM)
    status, output, errors = finish(launcher)
    assert (status, errors) == (143, "") and output.endswith("saved\n") and log(folder, 1).endswith("saved\n")


def test_a_second_signal_waits_for_no_one(folder):
    (folder / "deaf.py").write_text(SCRIPT.replace("sys.exit(143)", "pass"))
    launcher = start("--workers", 2, "deaf.py", "wait", cwd=folder, command=LAUNCH)
    for worker in range(2):
        wait_for(folder / f"begun-{worker}-0")
    launcher.send_signal(signal.SIGTERM)
    wait_until(lambda: "saved" in log(folder, 1), "the first signal")
    launcher.send_signal(signal.SIGTERM)
    assert finish(launcher)[0] == 143


@pytest.mark.parametrize(("leave", "status"), [(True, 0), (False, 143)])
def test_who_does_not_listen_may_end_in_time_or_is_killed(leave, status, folder):
    (folder / "deaf.py").write_text(SCRIPT.replace("sys.exit(143)", "pass"))
    seconds, run = 1000 if leave else 0.1, "raise SystemExit(__main__.main())"
    hasty = f"from keras_replicas import __main__, processes; processes.TO_SAVE = {seconds}; {run}"
    command = (sys.executable, "-c", hasty, "launch")
    launcher = start("--workers", 2, "deaf.py", "wait", cwd=folder, command=command)
    for worker in range(2):
        wait_for(folder / f"begun-{worker}-0")
    launcher.send_signal(signal.SIGTERM)
    if leave:
        (folder / "done").touch()
    assert finish(launcher)[0] == status


def test_a_signal_after_a_death_still_lets_the_others_save(folder):
    wait = "Path('told').touch()\n    while not Path('ready').exists():\n        time.sleep(0.01)"
    saving = SCRIPT.replace("sys.exit(143)", f"{wait}\n    sys.exit(143)")
    saving += "if task == 1:\n    sys.exit(1)\nwhile True:\n    time.sleep(0.01)\n"
    (folder / "saving.py").write_text(saving)
    launcher = start("--workers", 2, "--max-restarts", 9, "saving.py", cwd=folder, command=LAUNCH)
    wait_for(folder / "begun-0-0")
    wait_until(lambda: len(children(launcher.pid)) < 2, "the death")
    launcher.send_signal(signal.SIGTERM)
    wait_for(folder / "told")
    time.sleep(3)  # more than the others get without a signal
    (folder / "ready").touch()
    status, _, errors = finish(launcher)
    assert (status, "restart" in errors) == (143, False)


@pytest.mark.parametrize(("workers", "given"), [(2, ["0,1", "2,3"]), (5, ["0", "1", "2", "3", "4"])])
def test_each_worker_has_gpus_of_its_own(tmp_path, workers, given):
    """By a stand-in for `nvidia-smi`; what the workers find in their environment is real."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nfor i in 0 1 2 3 4; do echo GPU $i: NVIDIA H100; done\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "train.py").write_text("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    launcher = start("--workers", workers, "train.py", cwd=tmp_path, command=LAUNCH, env=environment)
    status, output, errors = finish(launcher)
    assert status == 0
    assert errors == ("1 GPU(s) stay unused: all workers must have the same number\n" if workers == 2 else "")
    assert [output.strip(), *(log(tmp_path, worker).strip() for worker in range(1, workers))] == given


@pytest.mark.parametrize(("ignored", "status"), [(True, 0), (False, 143)])
def test_under_nohup_it_goes_on_when_the_terminal_closes(folder, ignored, status):
    hangup = signal.SIG_IGN if ignored else signal.SIG_DFL
    launcher = start(
        *("--workers", 1, "train.py", "wait"),
        cwd=folder,
        command=LAUNCH,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
    )
    wait_for(folder / "begun-0-0")
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    (folder / "done").touch()
    assert finish(launcher)[0] == status


def test_workers_do_not_outlive_their_launcher(folder):
    launcher = start("--workers", 2, "train.py", "wait", cwd=folder, command=LAUNCH)
    for worker in range(2):
        wait_for(folder / f"begun-{worker}-0")
    workers = children(launcher.pid)
    launcher.kill()
    finish(launcher)
    wait_until(lambda: all(map(is_over, workers)), "the workers' end")


def test_ctrl_c_on_a_terminal_lets_all_save(folder):
    """The screen is a terminal for the script too, whose bar moves."""
    bar = "for i in range(4): print(f'\\x1b[1m{i}/3\\x1b[0m', end='\\r' if i < 3 else '\\n', flush=True)\n"
    (folder / "bar.py").write_text(SCRIPT.replace("while", f"assert task or sys.stdout.isatty()\n{bar}while"))
    screen, theirs = pty.openpty()
    launcher = subprocess.Popen(
        [*LAUNCH, "--workers", "2", "bar.py", "wait"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(1), os.O_RDWR)),  # the first terminal opened is the session's
    )
    os.close(theirs)
    shown = b""
    while b"3/3" not in shown or not (folder / "begun-1-0").exists():
        shown += os.read(screen, 2**16) if b"3/3" not in shown else b""
    workers = children(launcher.pid)
    assert len(workers) == 2
    os.write(screen, b"\x03")
    with contextlib.suppress(OSError):  # how a terminal tells that nobody is at the other end
        while new := os.read(screen, 2**16):
            shown += new
    os.close(screen)
    assert launcher.wait() == 143 and all(map(is_over, workers))
    assert b"\x1b[1m2/3\x1b[0m\r\x1b[1m3/3" in shown and b"saved" in shown


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


ENDS = ("--epochs", "2", "--max-steps", "40", "--replicas", "1")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process, on one replica."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    status, _, errors = finish(start("run", "bert_mlm", *OPTIONS, "--batch-size", 8, *ENDS, "--workdir", workdir))
    assert (status, errors) == (0, "")
    return workdir


@pytest.mark.slow
def test_two_workers_that_are_stopped_and_killed_compute_what_one_process_does(alone, tmp_path):
    workdir, logs = tmp_path / "run", tmp_path / "logs"
    words = ("--workers", 2, "--max-restarts", 1, "--log-dir", logs, "bert_mlm", *OPTIONS, "--batch-size", 4, *ENDS)
    # Saved after each step: SIGTERM comes to a step that is saved already.
    words = ("launch", *words, "--checkpoint-every", 1, "--workdir", workdir)
    launcher = start(*words)
    wait_for(workdir / "steps.jsonl", 5)
    launcher.send_signal(signal.SIGTERM)
    status, output, _ = finish(launcher)
    assert status == 143 and "Stopped by a signal after step" in output
    launcher = start(*words)
    wait_for(workdir / "steps.jsonl", len(steps_of(workdir)) + 5)
    os.kill(children(launcher.pid)[1], signal.SIGKILL)
    status, output, errors = finish(launcher)
    assert status == 0 and errors.endswith("error: worker 1 was killed by SIGKILL\n1 restart(s) left\n")
    assert "batch: 4 examples x 2 replica(s) = 8" in output and "Traceback" not in output
    assert "validation loss" in output and "validation loss" not in (logs / "worker-1.log").read_text()
    results = results_of(workdir)
    assert (results["workers"], results["replicas"], results["global_batch_size"], results["steps"]) == (2, 2, 8, 40)
    assert_equal(workdir, alone)


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
    message = "error: worker 1 was started differently from the chief: seed 1, not 0"
    assert refused == [(2, message)] * 2 and not (tmp_path / "run").exists()

    for folder in ("common", "recipes", "keras_replicas"):
        shutil.copytree(ROOT / folder, tmp_path / "project" / folder)
    with (tmp_path / "project/keras_replicas/order.py").open("a") as file:
        file.write("# A change.\n")
    refused = by_hand([words, words], (tmp_path, tmp_path), (ROOT, tmp_path / "project"))
    assert refused[0] == refused[1] and refused[0][0] == 2
    assert re.fullmatch(r"error: worker 1 was started differently from the chief: code '\w+', not '\w+'", refused[0][1])

    (tmp_path / "elsewhere").mkdir()
    refused = by_hand([words, words], (tmp_path, tmp_path / "elsewhere"))
    message = "error: worker 1 does not see the chief's folder run: use a shared file system"
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


# A worker whose model starts from its own index.
OTHER_WEIGHTS = """
import sys
from keras_replicas import Checkpoints, make_strategy, worker_index
from common.run.command_line import run
import keras

def restore(folder):
    with make_strategy(1).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.set_weights([weight * 0 + worker_index() for weight in model.get_weights()])
    Checkpoints(folder, model=model).restore()

run(restore, sys.argv[1])
"""


@pytest.mark.slow
def test_workers_with_other_weights_are_refused(tmp_path):
    addresses = free_addresses(2)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", OTHER_WEIGHTS, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"TF_CONFIG": json.dumps(worker_config(addresses, index)), "KERAS_BACKEND": "tensorflow"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for status, _, errors in map(finish, workers):
        message = r"error: worker 1 starts from different weights .*: checksum of the weights \d+, not \d+\n"
        assert status == 2 and re.search(message, errors)


# A worker that says it has one device more than it has, or chose another precision, than the chief.
DIFFERENT = """
import dataclasses, sys
from keras_replicas import make_strategy, worker_index
from common.run.command_line import run
from common.run.runs import RecipeRun

@dataclasses.dataclass
class Config:
    workdir: str
    batch_size: int = 8
    lr_scaling: str = "none"
    overwrite: bool = False

def main(config):
    make_strategy()
    opened = RecipeRun("a", config)
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
def test_a_worker_that_does_not_come_is_named(tmp_path):
    addresses = free_addresses(2)
    hosts = ("--hosts", ",".join(addresses), "--node-rank", 1, "--join-timeout", 2, "--log-dir", tmp_path)
    status, _, errors = finish(start("launch", *hosts, "bert_mlm", *OPTIONS, "--workdir", tmp_path / "run"))
    assert status == 2 and errors.endswith(f"these workers have not joined within 2 s: {addresses[0]}\n")
