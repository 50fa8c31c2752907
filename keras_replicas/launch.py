# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_replicas launch`: starts a script's workers, shows one screen, and restarts all after one dies.

Only the workers import TensorFlow.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from keras_replicas.cluster import MOST, is_address, rank, tf_config, worker_config
from keras_replicas.errors import UserError
from keras_replicas.gpus import gpu_shares
from keras_replicas.screen import Screen

TO_SAVE = 60  # seconds for workers that are asked to stop
TO_FOLLOW = 2  # seconds for the others to end by themselves once one has failed
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)  # after saving, or if there was nothing to save
LAST_LINES = 5  # of a dead worker's log that are shown


def add_options(parser: argparse.ArgumentParser, script: str) -> None:
    """Gives a parser the launcher's options. All that comes after the script's name is the script's.

    Args:
        parser: of `python -m keras_replicas launch`, for example.
        script: what the help calls the script, such as `SCRIPT`.
    """
    add = parser.add_argument
    add("-m", action="store_true", dest="module", help="run a module, as `python -m` does")
    add("--workers", "--nproc-per-node", type=whole(1), metavar="N", help="start N workers on this machine")
    add("--hosts", metavar="H1:PORT,H2:PORT", help="addresses of all workers, the chief's first; one starts here")
    add("--node-rank", type=whole(0), metavar="I", help="index of this machine in --hosts, from 0")
    add("--max-restarts", type=whole(0), default=0, metavar="K", help="restart all up to K times after a worker dies")
    add("--join-timeout", type=whole(1), default=300, metavar="S", help="seconds to wait for all workers (300)")
    add(
        "--log-dir",
        type=Path,
        default=Path("logs"),
        metavar="DIR",
        help="folder of each worker's log, worker-I.log (logs)",
    )
    add("script", metavar=script, nargs="?")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="its own options")


def whole(least: int) -> Callable[[str], int]:
    """The `type` of an option of `argparse` that is a whole number from `least` to `MOST`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= MOST:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {MOST}, not {text!r}")
        return int(text)

    return read


def launch(options: argparse.Namespace) -> int:
    """Runs a script's workers until they are done, and returns the exit status.

    - 0: all are done.
    - 2: a script refused its input, or the input is wrong here. That is not tried again.
    - 143: stopped by a signal; each worker had a minute to save.
    - Otherwise a worker died, and no restart is left: its own status, or 1 if it was killed or hung.

    Args:
        options: those of `add_options`.

    Raises:
        UserError: when there is no such script, the workers' addresses are wrong, there are fewer GPUs than workers, or
            the logs cannot be written.
    """
    command = command_of(options)
    ranks = [rank(config) for config in tf_configs(options)]  # wrong addresses are refused before anything is written
    gpus, left = gpu_shares(options.workers) if options.workers else ([], 0)
    if left:
        print(f"{left} GPU(s) stay unused: all workers must have the same number", file=sys.stderr, flush=True)
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        for each in ranks:
            log_of(options.log_dir, each).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {options.log_dir} ({error.strerror}). Give another --log-dir") from error
    with tempfile.TemporaryDirectory(prefix="workers-") as temporary:
        # TensorFlow writes generated code there, and a worker that is killed leaves it behind.
        os.environ |= {"TMPDIR": temporary, "PYTHONUNBUFFERED": "1"}
        os.environ |= {"JOIN_TIMEOUT": str(options.join_timeout), "LAUNCH_ID": uuid.uuid4().hex}
        for left in reversed(range(options.max_restarts + 1)):
            workers = Workers(tf_configs(options), command, options.log_dir, gpus)
            status, cause, again = workers.wait()
            print(cause, end="", file=sys.stderr, flush=True)
            if not again:
                break
            print(f"{left} restart(s) left", file=sys.stderr, flush=True)
    return status


def command_of(options: argparse.Namespace) -> list[str]:
    """The command of each worker. Raises a `UserError` if there is no such script or module."""
    if not options.script:
        raise UserError("give a script, such as train.py, after the launcher's options, or a module after -m")
    if options.module:
        if not importlib.util.find_spec(options.script.partition(".")[0]):
            raise UserError(f"there is no module {options.script}")
        return [sys.executable, "-m", options.script, *options.arguments]
    if not Path(options.script).exists():
        raise UserError(f"there is no script {options.script}")
    return [sys.executable, options.script, *options.arguments]


def tf_configs(options: argparse.Namespace) -> list[dict]:
    """The `TF_CONFIG` of each worker that this process starts. Raises a `UserError` if the addresses are wrong."""
    given = tf_config()
    if options.workers is not None:
        if given or options.hosts:
            raise UserError("--workers starts all workers on this machine; leave it out when hosts are given")
        addresses = free_addresses(options.workers)
        return [worker_config(addresses, i) for i in range(options.workers)]
    if given:
        return [given]
    if not options.hosts or options.node_rank is None:
        raise UserError("give --workers N for N workers on this machine, or --hosts h1:port,h2:port --node-rank I")
    hosts = options.hosts.split(",")
    if wrong := [host for host in hosts if not is_address(host)]:
        raise UserError(f"--hosts must be like h1:8888,h2:8888; {wrong[0]!r} is not host:port")
    if len(set(hosts)) < len(hosts):
        raise UserError(f"--hosts lists an address twice: {options.hosts}")
    if options.node_rank >= len(hosts):
        raise UserError(f"--node-rank must be from 0 to {len(hosts) - 1}, not {options.node_rank}")
    return [worker_config(hosts, options.node_rank)]


def free_addresses(count: int) -> list[str]:
    """Loopback addresses with free ports."""
    with contextlib.ExitStack() as until_all_are_found:
        sockets = [until_all_are_found.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def log_of(folder: Path, rank: int) -> Path:
    """A worker's log: a launch begins it anew, and a restart goes on."""
    return folder / f"worker-{rank}.log"


class Workers:
    """Processes that run a script, each with a log; the chief's output is also shown.

    Args:
        tf_configs: the `TF_CONFIG` of each.
        command: the script's.
        logs: folder of the logs, which are appended to.
        gpus: each worker's `CUDA_VISIBLE_DEVICES`; empty if each may use the same as this process.
    """

    def __init__(self, tf_configs: list[dict], command: list[str], logs: Path, gpus: list[str]):
        self.logs = {rank(config): log_of(logs, rank(config)) for config in tf_configs}
        self.processes: dict[int, subprocess.Popen] = {}
        self.screen, self.asked_to_stop = Screen(log_of(logs, 0)), False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._stop)
        for index, config in zip(self.logs, tf_configs, strict=True):
            visible = {"CUDA_VISIBLE_DEVICES": gpus[index]} if gpus else {}
            self._start(index, command, {"TF_CONFIG": json.dumps(config)} | visible)

    def _start(self, index: int, command: list[str], variables: dict[str, str]) -> None:
        with self.logs[index].open("ab") as file:
            screen_ends = () if index else self.screen.open()
            output, errors = screen_ends or (file, file)
            self.processes[index] = subprocess.Popen(
                command,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches this process alone, which asks the workers to save
                preexec_fn=_die_with_parent,
            )
        for end in screen_ends:
            os.close(end)

    def wait(self) -> tuple[int, str, bool]:
        """Waits for the end of all: the exit status, the cause of a failure, and whether a restart may help."""
        while not (first := self._failed()) and not self.asked_to_stop:
            if not self._running():
                self.screen.copy(0)
                return 0, "", False
            self.screen.copy(0.1)
        stopped = self.asked_to_stop or any(status in STOPPED for status in first.values())
        if stopped and not self.asked_to_stop:
            for process in self._running():
                process.terminate()
        deadline = time.monotonic() + (TO_SAVE if stopped else TO_FOLLOW)
        while self._running() and time.monotonic() < deadline:
            self.screen.copy(0.1)
        failed, hanging, late = self._failed(), self._hanging(), self._running()
        for process in late:
            process.kill()
            process.wait()
        self.screen.copy(0)
        if self.asked_to_stop and not (failed or late):  # done, in spite of the signal
            return 0, "", False
        if stopped or any(status in STOPPED for status in failed.values()):
            return STOPPED[0], "", False
        if hanging is not None:
            return 1, f"error: worker {hanging} hangs: it is stopped (SIGSTOP)\n", True
        if 2 in failed.values() and min(failed.values()) > 0:
            return 2, "" if failed.get(0) == 2 else self._cause(failed, 2), False
        index = min(first, key=lambda each: first[each])  # one that was killed, rather than those that lost it
        return max(first[index], 1), self._cause(first, first[index]), True

    def _cause(self, failed: dict[int, int], status: int) -> str:
        index = next(index for index in failed if failed[index] == status)
        if status < 0:
            return f"error: worker {index} was killed by {signal.Signals(-status).name}\n"
        lines = self.logs[index].read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        if status == 2:
            return "".join(f"worker {index}: {line}\n" for line in lines[-1:])
        end = "\n".join(lines)
        return f"error: worker {index} ended with status {status}; {self.logs[index]} ends:\n{end}\n"

    def _running(self) -> list[subprocess.Popen]:
        return [process for process in self.processes.values() if process.poll() is None]

    def _failed(self) -> dict[int, int]:
        return {index: process.returncode for index, process in self.processes.items() if process.poll()}

    def _hanging(self) -> int | None:
        """A worker that a signal has stopped: the others' failure is its."""
        stopped = (i for i, process in self.processes.items() if process.poll() is None and _state(process.pid) in "Tt")
        return next(stopped, None)

    def _stop(self, *_) -> None:
        """Handles a signal: the first asks the workers to save and exit, the second kills them."""
        for process in self._running():
            process.kill() if self.asked_to_stop else process.terminate()
        self.asked_to_stop = True


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] if sys.platform == "linux" else "?"


def _die_with_parent() -> None:
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
