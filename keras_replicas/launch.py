# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes launch`: starts a recipe's workers, shows one screen for all, and restarts them after one dies.

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
from collections.abc import Iterable
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


def launch(arguments: argparse.Namespace, recipe: Path) -> int:
    """Runs a recipe's workers until they are done, and returns the exit status.

    0: done. 1: a worker died, and no restart is left. 2: the input is wrong. 143: stopped by a signal, after saving.

    Raises:
        UserError: when an option is out of bounds, the workers' ranks cannot be determined, or there are fewer GPUs
            than workers.
    """
    check_bounds(arguments, workers=1, parameter_servers=0, restarts=0, join_timeout=1)
    command = [sys.executable, str(recipe), *arguments.options]
    if {"-h", "--help"} & set(arguments.options):
        return subprocess.call(command)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--workdir", type=Path, default=Path("runs", recipe.stem))
    workdir = finder.parse_known_args(arguments.options)[0].workdir
    gpus, left = gpu_shares(arguments.workers) if arguments.workers else ([], 0)
    if left:
        print(f"{left} GPU(s) stay unused: all workers must have the same number", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="workers-") as temporary:
        # TensorFlow writes generated code there, and a worker that is killed leaves it behind.
        os.environ |= {"TMPDIR": temporary, "JOIN_TIMEOUT": str(arguments.join_timeout), "LAUNCH_ID": uuid.uuid4().hex}
        logs = Path(temporary) if "--dry-run" in arguments.options else workdir / "logs"  # a dry run writes nothing
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write to the work directory {workdir} ({error.strerror}). Give another --workdir"
            ) from error
        restarts_left = arguments.restarts + 1
        while restarts_left:
            workers = Workers(places(arguments), command, logs, restarts_left - 1, gpus)
            status, cause = workers.wait()
            restarts_left = workers.restarts_left
            if status != 1:
                print(cause, end="", file=sys.stderr)
                return status
            print(f"\n{cause}{restarts_left} restart(s) left", file=sys.stderr, flush=True)
    return 1


def check_bounds(options: argparse.Namespace, **least: int) -> None:
    """Raises a `UserError` for the first option that is given and not between its least value and `MOST`."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and not bound <= value <= MOST:
            must = f"least {bound}" if value < bound else f"most {MOST}"
            raise UserError(f"--{name.replace('_', '-')} must be at {must}, not {value}")


def places(arguments: argparse.Namespace) -> list[dict]:
    """The `TF_CONFIG` of each worker that this process starts. Raises a `UserError` if the addresses are wrong."""
    told = tf_config()
    if arguments.workers is not None:
        if told or arguments.hosts:
            raise UserError("--workers starts all workers on this machine; leave it out when hosts are given")
        sizes = {"worker": arguments.workers}
        if arguments.parameter_servers:
            sizes = {"chief": 1} | sizes | {"ps": arguments.parameter_servers}
        free = iter(free_addresses(sum(sizes.values())))
        jobs = {job: [next(free) for _ in range(size)] for job, size in sizes.items()}
        return [{"cluster": jobs, "task": {"type": job, "index": i}} for job in jobs for i in range(sizes[job])]
    if arguments.parameter_servers:
        raise UserError(
            "--parameter-servers needs --workers; on many machines, set TF_CONFIG with chief, worker and ps"
        )
    if told:
        return [told]
    if not arguments.hosts or arguments.worker_index is None:
        raise UserError("give --workers N for N workers on this machine, or --hosts h1:port,h2:port --worker-index I")
    hosts = arguments.hosts.split(",")
    if wrong := [host for host in hosts if not is_address(host)]:
        raise UserError(f"--hosts must be like h1:8888,h2:8888; {wrong[0]!r} is not host:port")
    if len(set(hosts)) < len(hosts):
        raise UserError(f"--hosts lists an address twice: {arguments.hosts}")
    if not 0 <= arguments.worker_index < len(hosts):
        raise UserError(f"--worker-index must be from 0 to {len(hosts) - 1}, not {arguments.worker_index}")
    return [worker_config(hosts, arguments.worker_index)]


def free_addresses(count: int) -> list[str]:
    """Loopback addresses with free ports."""
    with contextlib.ExitStack() as until_all_are_found:
        sockets = [until_all_are_found.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


class Workers:
    """Processes that run the recipe, each with a log; the chief's output is also shown.

    With parameter servers, all end with the chief, and a worker that dies is restarted alone.

    Args:
        places: the `TF_CONFIG` of each.
        command: the recipe's.
        logs: folder of `worker-I.log`, which are appended to.
        restarts: maximum restarts of single workers; `restarts_left` counts those that are left.
        gpus: each worker's `CUDA_VISIBLE_DEVICES`; empty if each may use the same as this process.
    """

    def __init__(self, places: list[dict], command: list[str], logs: Path, restarts: int, gpus: list[str]):
        self.places = {worker_index(place): place for place in places}
        self.command, self.restarts_left, self.gpus = command, restarts, gpus
        self.logs = {index: logs / f"worker-{index}.log" for index in self.places}
        self.processes: dict[int, subprocess.Popen] = {}
        self.screen, self.asked_to_stop = Screen(logs / "worker-0.log"), False
        served = any("ps" in place["cluster"] for place in places)
        self.leading = [0] if served else list(self.places)  # those that run the recipe; all end with them
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._stop)
        for index in self.places:
            self._start(index)

    def _start(self, index: int) -> None:
        environment = os.environ | {"TF_CONFIG": json.dumps(self.places[index])}
        if self.gpus:  # a chief with parameter servers schedules steps, and servers hold variables: neither needs one
            task = self.places[index]["task"]
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[task["index"]] if task["type"] == "worker" else ""
        with self.logs[index].open("ab") as file:
            screen_ends = () if index else self.screen.open()
            output, errors = screen_ends or (file, file)
            self.processes[index] = subprocess.Popen(
                self.command,
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
            if not self._running(self.leading):
                self._kill_all()
                return 0, ""
            self.screen.copy(0.1)
            self._start_served_again()
        stopped = self.asked_to_stop or any(status in STOPPED for status in failed.values())
        if stopped:
            for process in self._running(self.leading):
                process.terminate()
        deadline = time.monotonic() + (TO_SAVE if stopped else TO_FOLLOW)
        while self._running(self.leading) and time.monotonic() < deadline:
            self.screen.copy(0.1)
        failed = self._failed()
        cause = self._cause(failed)  # before the kill
        self._kill_all()
        if stopped:
            return STOPPED[0], ""
        wrong_input = 2 in failed.values() and min(failed.values()) > 0
        return (2 if wrong_input else 1), cause

    def _kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.screen.copy(0)

    def _start_served_again(self) -> None:
        """Restarts workers that died under parameter servers: the chief has others do their steps meanwhile."""
        for index, status in self._failed().items():
            served = index not in self.leading and self.places[index]["task"]["type"] == "worker"
            if served and status != 2 and self.restarts_left and not self.asked_to_stop:
                self.restarts_left -= 1
                cause = self._cause({index: status})
                print(f"\n{cause}{self.restarts_left} restart(s) left", file=sys.stderr, flush=True)
                self._start(index)

    def _running(self, indices: Iterable[int]) -> list[subprocess.Popen]:
        return [self.processes[index] for index in indices if self.processes[index].poll() is None]

    def _failed(self) -> dict[int, int]:
        return {index: process.returncode for index, process in self.processes.items() if process.poll()}

    def _cause(self, failed: dict[int, int]) -> str:
        """Which worker caused the failure: one that hangs or was killed, rather than those that lost it."""
        for index, process in self.processes.items():
            if process.poll() is None and _state(process.pid) in "Tt":
                return f"error: worker {index} hangs: it is stopped (SIGSTOP)\n"
        index, status = min(failed.items(), key=lambda item: item[1])
        lines = self.logs[index].read_text(encoding="utf-8", errors="replace").splitlines()
        if status < 0:
            return f"error: worker {index} was killed by {signal.Signals(-status).name}\n"
        if status == 2:
            return f"worker {index}: {lines[-1]}\n" if 0 not in failed else ""  # the chief's message has been shown
        end = "\n".join(lines[-LAST_LINES:])
        return f"error: worker {index} ended with status {status}; {self.logs[index]} ends:\n{end}\n"

    def _stop(self, *_) -> None:
        """Handles a signal: the first asks the workers to save and exit, the second kills them."""
        for process in self._running(self.leading):
            process.kill() if self.asked_to_stop else process.terminate()
        self.asked_to_stop = True


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] if sys.platform == "linux" else "?"


def _die_with_parent() -> None:
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
