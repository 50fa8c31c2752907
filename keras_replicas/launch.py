# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_replicas launch`: starts the workers of any script, shows one screen for all, and restarts them.

Only the workers import TensorFlow.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from keras_replicas.cluster import is_address, tf_config, worker_config, worker_index
from keras_replicas.errors import UserError
from keras_replicas.gpus import gpu_shares
from keras_replicas.screen import Screen

TO_SAVE = 60  # seconds for workers that are asked to stop
TO_FOLLOW = 2  # seconds for the others to end by themselves once one has failed
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)  # after saving, or if there was nothing to save
LAST_LINES = 5  # of a dead worker's log that are shown
MOST = 999_999  # of any option


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the launcher's options, and what it starts; the names are torchrun's."""
    parser.add_argument("--workers", "--nproc-per-node", type=int, metavar="N", help="start N workers on this machine")
    parser.add_argument("--hosts", metavar="H1:PORT,H2:PORT", help="addresses of all workers, the chief's first")
    parser.add_argument("--node-rank", type=int, metavar="I", help="index of this machine in --hosts, from 0")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="K", help="restart all K times, if one dies")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), metavar="DIR", help="of worker-I.log (logs)")
    parser.add_argument("--join-timeout", type=int, default=300, metavar="S", help="seconds to wait for all workers")


def launch(options: argparse.Namespace, command: list[str]) -> int:
    """Runs workers, each by this command, until they are done, and returns the exit status.

    0: done. 2: wrong input, as told by a worker. 143: stopped by a signal, after saving. Otherwise, if no restart is
    left, the status with which a worker ended first, or 1 if it was killed.

    Raises:
        UserError: when an option is out of bounds, the workers' ranks cannot be determined, there are fewer GPUs than
            workers, or the logs cannot be written.
    """
    for name, least in {"workers": 1, "max_restarts": 0, "join_timeout": 1}.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= MOST:
            must = f"least {least}" if value < least else f"most {MOST}"
            raise UserError(f"--{name.replace('_', '-')} must be at {must}, not {value}")
    gpus, left = gpu_shares(options.workers) if options.workers else ([], 0)
    if left:
        print(f"{left} GPU(s) stay unused: all workers must have the same number", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="workers-") as temporary:
        # TensorFlow writes generated code there, and a worker that is killed leaves it behind.
        os.environ |= {"TMPDIR": temporary, "JOIN_TIMEOUT": str(options.join_timeout), "LAUNCH_ID": uuid.uuid4().hex}
        try:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write logs to {options.log_dir} ({error.strerror}): give a --log-dir") from error
        for restarts_left in range(options.max_restarts, -1, -1):
            status, cause = Workers(tf_configs(options), command, options.log_dir, gpus).wait()
            if status in (0, 2, STOPPED[0]):
                print(cause, end="", file=sys.stderr)
                return status
            print(f"\n{cause}{restarts_left} restart(s) left", file=sys.stderr, flush=True)
    return status


def tf_configs(options: argparse.Namespace) -> list[dict]:
    """The `TF_CONFIG` of each worker that this process starts. Raises a `UserError` if the addresses are wrong."""
    told = tf_config()
    if options.workers is not None:
        if told or options.hosts:
            raise UserError("--workers starts all workers on this machine; leave it out when hosts are given")
        addresses = free_addresses(options.workers)
        return [worker_config(addresses, index) for index in range(options.workers)]
    if told:
        return [told]
    if not options.hosts or options.node_rank is None:
        raise UserError("give --workers N for N workers on this machine, or --hosts h1:port,h2:port --node-rank I")
    hosts = options.hosts.split(",")
    if wrong := [host for host in hosts if not is_address(host)]:
        raise UserError(f"--hosts must be like h1:8888,h2:8888; {wrong[0]!r} is not host:port")
    if len(set(hosts)) < len(hosts):
        raise UserError(f"--hosts lists an address twice: {options.hosts}")
    if not 0 <= options.node_rank < len(hosts):
        raise UserError(f"--node-rank must be from 0 to {len(hosts) - 1}, not {options.node_rank}")
    return [worker_config(hosts, options.node_rank)]


def free_addresses(count: int) -> list[str]:
    """Loopback addresses with free ports."""
    with contextlib.ExitStack() as until_all_are_found:
        sockets = [until_all_are_found.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


class Workers:
    """Processes that run a script, each with a log; the chief's output is also shown.

    Args:
        configs: the `TF_CONFIG` of each.
        command: the script's.
        logs: folder of `worker-I.log`, which are appended to.
        gpus: each worker's `CUDA_VISIBLE_DEVICES`; empty if each may use the same as this process.
    """

    def __init__(self, configs: list[dict], command: list[str], logs: Path, gpus: list[str]):
        self.logs = {worker_index(config): logs / f"worker-{worker_index(config)}.log" for config in configs}
        self.processes: dict[int, subprocess.Popen] = {}
        self.screen, self.asked_to_stop = Screen(logs / "worker-0.log"), False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._stop)
        for config in configs:
            environment = os.environ | {"TF_CONFIG": json.dumps(config)}
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[worker_index(config)]
            self._start(worker_index(config), command, environment)

    def _start(self, index: int, command: list[str], environment: dict[str, str]) -> None:
        with self.logs[index].open("ab") as file:
            screen_ends = () if index else self.screen.open()
            output, errors = screen_ends or (file, file)
            self.processes[index] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches this process alone, which asks the workers to save
                preexec_fn=_die_with_parent,
            )
        for end in screen_ends:
            os.close(end)

    def wait(self) -> tuple[int, str]:
        """Waits for the end of all; returns the exit status, and the cause of a failure."""
        while not (failed := self._failed()):
            if not self._running():
                self.screen.copy(0)
                return 0, ""
            self.screen.copy(0.1)
        first = next(iter(failed.values()))
        stopped = self.asked_to_stop or any(status in STOPPED for status in failed.values())
        if stopped:
            for process in self._running():
                process.terminate()
        deadline = time.monotonic() + (TO_SAVE if stopped else TO_FOLLOW)
        while self._running() and time.monotonic() < deadline:
            self.screen.copy(0.1)
        failed = self._failed()
        cause = self._cause(failed)  # before the kill
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.screen.copy(0)
        if stopped:
            return STOPPED[0], ""
        if min(failed.values()) < 0:
            return 1, cause
        return (2 if 2 in failed.values() else first), cause

    def _running(self) -> list[subprocess.Popen]:
        return [process for process in self.processes.values() if process.poll() is None]

    def _failed(self) -> dict[int, int]:
        return {index: process.returncode for index, process in self.processes.items() if process.poll()}

    def _cause(self, failed: dict[int, int]) -> str:
        """Which worker caused the failure: one that hangs or was killed, rather than those that lost it."""
        for index, process in self.processes.items():
            if process.poll() is None and _state(process.pid) in "Tt":
                return f"error: worker {index} hangs: it is stopped (SIGSTOP)\n"
        index, status = min(failed.items(), key=lambda item: item[1])
        if status < 0:
            return f"error: worker {index} was killed by {signal.Signals(-status).name}\n"
        lines = self.logs[index].read_text(encoding="utf-8", errors="replace").splitlines()
        if status == 2:
            return f"worker {index}: {lines[-1]}\n" if lines and 0 not in failed else ""  # the chief's has been shown
        end = "\n".join(lines[-LAST_LINES:])
        return f"error: worker {index} ended with status {status}; {self.logs[index]} ends:\n{end}\n"

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
