"""`python -m keras_replicas launch`: real processes, on this machine."""

import argparse
import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.faults import children
from keras_replicas.cluster import worker_config
from keras_replicas.errors import UserError
from keras_replicas.launch import free_addresses, tf_configs
from tests.conftest import ROOT, python, wait_until

LAUNCH = [sys.executable, "-m", "keras_replicas", "launch"]
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


def start(*words, cwd=ROOT, command=LAUNCH, env=(), **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | dict(env)
    return subprocess.Popen([*command, *map(str, words)], cwd=cwd, env=environment, **options)


def finish(process):
    """Exit status, output and errors of a process, which may take its time, but not for ever."""
    try:
        output, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, output, errors


def launched(folder, *words):
    return finish(start(*words, cwd=folder))


def waiting(folder, *words, workers=2, script="train.py", command=LAUNCH, **options):
    """A launcher whose workers have all begun, and wait."""
    launcher = start("--workers", workers, *words, script, "wait", cwd=folder, command=command, **options)
    begun(folder, workers)
    return launcher


def log(folder, worker):
    return (folder / f"logs/worker-{worker}.log").read_text()


def begun(folder, workers=2, start=0):
    """Waits until that start of all workers has begun."""
    for worker in range(workers):
        wait_until((folder / f"begun-{worker}-{start}").exists, f"start {start} of worker {worker}")


def is_over(pid):
    return not Path(f"/proc/{pid}").exists()


# Words after `launch`, the environment, and what is answered.
WRONG = [
    ("--workers 0 train.py", {}, "--nproc-per-node: must be a whole number from 1 to 999999, not '0'"),
    ("--workers 1 --max-restarts -1 train.py", {}, "--max-restarts: must be a whole number from 0 to 999999, not '-1'"),
    ("--workers 1 --join-timeout 0 train.py", {}, "--join-timeout: must be a whole number from 1 to 999999, not '0'"),
    ("--workers 1 --join-timeout 10000000000 train.py", {}, "from 1 to 999999, not '10000000000'"),
    ("--workers 2 train.py", {"SLURM_STEP_NUM_TASKS": "abc"}, "SLURM_STEP_NUM_TASKS must be a whole number from 1 to"),
    ("--workers 2 train.py", {"TF_CONFIG": "{'worker': 1"}, "TF_CONFIG is malformed"),
    ("--workers 2 --hosts a:1,b:1 --node-rank 0 train.py", {}, "leave it out where --hosts or TF_CONFIG is given"),
    ("train.py", {}, "give --workers N for N workers on this machine, or --hosts"),
    ("--hosts a:1,b:1 train.py", {}, "give --workers N for N workers on this machine, or --hosts"),
    ("--hosts a:1,b:x --node-rank 0 train.py", {}, "'b:x' is not host:port"),
    ("--hosts a:1,a:1 --node-rank 0 train.py", {}, "'a:1' is not host:port, or is listed twice"),
    ("--hosts a:1,b:1 --node-rank 2 train.py", {}, "--node-rank must be from 0 to 1, not 2"),
    ("--workers 2", {}, "give a script, such as train.py"),
    ("--workers 2 nowhere.py", {}, "there is no script nowhere.py"),
    ("--workers 2 -m nowhere.train", {}, "there is no module nowhere.train"),
    ("--workers 2 --log-dir /proc/logs train.py", {}, "cannot write to /proc/logs"),
    ("--workers 2 --restarts 1 train.py", {}, "unrecognized arguments: --restarts"),
]


@pytest.mark.parametrize(("words", "environment", "message"), WRONG)
def test_what_is_wrong_is_told_before_anything_starts(words, environment, message, folder, no_tensorflow):
    done = finish(start(*words.split(), cwd=folder, env=no_tensorflow | environment))
    assert done[:2] == (2, "") and message in done[2] and done[2].count("\n") == 1
    assert not (folder / "logs").exists()


@pytest.mark.parametrize("words", ["", "--help", "launch --help", "doctor --help"])
def test_the_guide_and_help_need_no_tensorflow(words, no_tensorflow):
    status, output, errors = finish(start(*words.split(), command=LAUNCH[:-1], env=no_tensorflow))
    assert (status, errors) == (0, "") and "python -m keras_replicas" in output


def test_a_recipe_is_launched_by_its_name():
    done = python("-m", "recipes", "launch", "--workers", 2, "bert")
    assert done.returncode == 2 and "there is no recipe bert. Choose one of: bert_from_scratch bert_mlm" in done.stderr
    done = python("-m", "recipes", "launch", "--workers", 1, "bert_mlm", "--help")
    assert (done.returncode, done.stderr) == (0, "") and "--mask-rate" in done.stdout


def test_the_addresses_of_workers(monkeypatch):
    of_two = argparse.Namespace(workers=2, hosts=None, node_rank=None)
    of_hosts = argparse.Namespace(workers=None, hosts="a:1,b:2", node_rank=1)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    first, second = tf_configs(of_two)
    assert first["cluster"] == second["cluster"] and (first["task"]["index"], second["task"]["index"]) == (0, 1)
    assert tf_configs(of_hosts) == [worker_config(["a:1", "b:2"], 1)]
    given = worker_config(["c:3", "d:4"], 0)
    monkeypatch.setenv("TF_CONFIG", json.dumps(given))
    assert tf_configs(of_hosts) == [given]  # the environment comes first
    with pytest.raises(UserError, match="leave it out"):
        tf_configs(of_two)
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
def test_a_status_is_the_scripts_and_wrong_input_is_not_tried_again(worker, folder):
    words = "--workers", 2, "--max-restarts", 1, "train.py", "end", worker
    status, _, errors = launched(folder, *words, 2)
    assert status == 2 and not (folder / "begun-1-1").exists()
    assert errors == ("" if worker == 0 else "worker 1: worker 1 start 0 train.py end 1 2\n")  # the chief's is shown
    status, output, errors = launched(folder, *words, 3)
    assert status == 3 and output.count("worker 0") == 2
    told = "" if worker == 0 else "; logs/worker-1.log ends:"
    assert errors.count(f"error: worker {worker} ended with status 3{told}\n") == 2
    assert errors.endswith("0 restart(s) left\n")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_after_a_death_all_start_again(fault, folder):
    launcher = waiting(folder, "--max-restarts", 1)
    for number in range(2):
        begun(folder, start=number)
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
    launcher = waiting(folder, "--max-restarts", 9)
    os.kill(launcher.pid if told == "the launcher" else children(launcher.pid)[1], signal.SIGTERM)
    status, output, errors = finish(launcher)
    assert (status, errors) == (143, "") and output.endswith("saved\n") and log(folder, 1).endswith("saved\n")


@pytest.mark.parametrize(
    ("then", "seconds", "status"), [("a second signal", 1000, 143), ("leave", 1000, 0), ("time passes", 0.1, 143)]
)
def test_who_does_not_listen_may_end_in_time_or_is_killed(then, seconds, status, folder):
    (folder / "deaf.py").write_text(SCRIPT.replace("sys.exit(143)", "pass"))
    run = "raise SystemExit(__main__.main())"
    hasty = f"from keras_replicas import __main__, processes; processes.TO_SAVE = {seconds}; {run}"
    launcher = waiting(folder, script="deaf.py", command=(sys.executable, "-c", hasty, "launch"))
    launcher.send_signal(signal.SIGTERM)
    if then == "a second signal":
        wait_until(lambda: "saved" in log(folder, 1), "the first signal")
        launcher.send_signal(signal.SIGTERM)
    if then == "leave":
        (folder / "done").touch()
    assert finish(launcher)[0] == status


def test_a_signal_after_a_death_still_lets_the_others_save(folder):
    wait = "Path('told').touch()\n    while not Path('ready').exists():\n        time.sleep(0.01)"
    saving = SCRIPT.replace("sys.exit(143)", f"{wait}\n    sys.exit(143)")
    saving += "if task == 1:\n    sys.exit(1)\nwhile True:\n    time.sleep(0.01)\n"
    (folder / "saving.py").write_text(saving)
    launcher = start("--workers", 2, "--max-restarts", 9, "saving.py", cwd=folder)
    begun(folder)
    wait_until(lambda: len(children(launcher.pid)) < 2, "the death")
    launcher.send_signal(signal.SIGTERM)
    wait_until((folder / "told").exists, "the signal")
    time.sleep(3)  # more than the others get without a signal
    (folder / "ready").touch()
    status, _, errors = finish(launcher)
    assert (status, "restart" in errors) == (143, False)


def test_each_worker_has_gpus_of_its_own(folder, nvidia_smi):
    """What the workers find in their environment is real."""
    nvidia_smi(*(f"GPU {i}: NVIDIA H100" for i in range(5)))
    (folder / "train.py").write_text("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    unused = "1 GPU(s) stay unused: all workers must have the same number\n"
    assert launched(folder, "--workers", 2, "train.py") == (0, "0,1\n", unused) and log(folder, 1) == "2,3\n"


@pytest.mark.parametrize(("ignored", "status"), [(True, 0), (False, 143)])
def test_under_nohup_it_goes_on_when_the_terminal_closes(folder, ignored, status):
    hangup = signal.SIG_IGN if ignored else signal.SIG_DFL
    launcher = waiting(folder, workers=1, preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup))
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    (folder / "done").touch()
    assert finish(launcher)[0] == status


def test_workers_do_not_outlive_their_launcher(folder):
    launcher = waiting(folder)
    workers = children(launcher.pid)
    launcher.kill()
    finish(launcher)
    wait_until(lambda: all(map(is_over, workers)), "the workers' end")


def test_ctrl_c_on_a_terminal_lets_all_save(folder):
    """The screen is a terminal for the script too, whose bar moves."""
    bar = "for i in range(4): print(f'\\x1b[1m{i}/3\\x1b[0m', end='\\r' if i < 3 else '\\n', flush=True)\n"
    (folder / "bar.py").write_text(SCRIPT.replace("while", f"assert task or sys.stdout.isatty()\n{bar}while"))
    screen, theirs = pty.openpty()
    options = dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | {"start_new_session": True}
    # The first terminal that is opened is the session's.
    options["preexec_fn"] = lambda: os.close(os.open(os.ttyname(1), os.O_RDWR))
    launcher = start("--workers", 2, "bar.py", "wait", cwd=folder, **options)
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


@pytest.mark.slow
def test_workers_that_do_not_come_are_named(folder):
    *others, _ = addresses = free_addresses(3)
    (folder / "waits.py").write_text("from keras_replicas import make_strategy\nmake_strategy()")
    hosts = ("--hosts", ",".join(addresses), "--node-rank", 2, "--join-timeout", 2)
    host, port = others[0].split(":")
    with socket.create_server((host, int(port))):  # its machine takes the call, and it says nothing
        status, _, errors = launched(folder, *hosts, "waits.py")
    assert status != 0 and f"these workers have not joined within 2 s: {', '.join(sorted(others))}" in errors


def test_after_a_kill_nothing_is_waited_for(tmp_path):
    code = """
import os, sys
from pathlib import Path
from keras_replicas import cluster, processes
processes.TO_FOLLOW = 10**6
script = "import os, time; '\\"index\\": 1' in os.environ['TF_CONFIG'] and os.kill(os.getpid(), 9); time.sleep(10**6)"
workers = processes.Workers([sys.executable, "-c", script], Path("."), [])
workers.start([cluster.worker_config(["a:1", "b:1"], index) for index in range(2)])
print(workers.wait())
"""
    done = python("-c", code, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=600)
    assert done.stdout == "(1, 'error: worker 1 was killed by SIGKILL\\n', True)\n", done.stderr
