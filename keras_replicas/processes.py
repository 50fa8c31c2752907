# SPDX-License-Identifier: Apache-2.0
"""The processes of a launch's workers: how they are started, watched and ended."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from keras_replicas.cluster import rank

TO_SAVE = 60  # seconds for workers that are asked to stop
TO_FOLLOW = 2  # seconds for the others to end by themselves once one has failed; none if it was killed
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)  # after saving, or if there was nothing to save
LAST_LINES = 5  # of a dead worker's log that are shown


def log_of(folder: Path, rank: int) -> Path:
    """The log of a worker but the chief: a launch begins it anew, and a restart goes on."""
    return folder / f"worker-{rank}.log"


class Workers:
    """Processes that run a script: the chief's output is this process's own, each other one's goes to a log.

    Args:
        command: the script's.
        logs: folder of the logs, which are appended to.
        gpus: each worker's `CUDA_VISIBLE_DEVICES`; empty if each may use the same as this process.
    """

    def __init__(self, command: list[str], logs: Path, gpus: list[str]):
        self.command, self.folder, self.gpus = command, logs, gpus
        self.processes: dict[int, subprocess.Popen] = {}
        self.asked_to_stop = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._stop)

    def start(self, tf_configs: list[dict]) -> None:
        """Starts a worker for each `TF_CONFIG`, in place of those that have ended."""
        for config in tf_configs:
            visible = {"CUDA_VISIBLE_DEVICES": self.gpus[rank(config)]} if self.gpus else {}
            self._start(rank(config), {"TF_CONFIG": json.dumps(config)} | visible)

    def _start(self, index: int, variables: dict[str, str]) -> None:
        with log_of(self.folder, index).open("ab") if index else contextlib.nullcontext() as log:
            self.processes[index] = subprocess.Popen(
                self.command,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches this process alone, which asks the workers to save
                preexec_fn=_die_with_parent,
            )

    def wait(self) -> tuple[int, str, bool]:
        """Waits for the end of all: the exit status, the cause of a failure, and whether a restart may help."""
        if self.asked_to_stop:  # before, or while they were being started
            self._terminate()
        while not (first := self._failed()) and not self.asked_to_stop:
            if not self._running():
                return 0, "", False
            time.sleep(0.1)
        statuses = {*first.values()}
        one_stopped, one_killed = not statuses.isdisjoint(STOPPED), min(statuses, default=0) < 0
        if one_stopped and not self.asked_to_stop:
            self._terminate()
        deadline = time.monotonic() + (TO_SAVE if self.asked_to_stop or one_stopped else 0 if one_killed else TO_FOLLOW)
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.1)
        failed, hanging, late = self._failed(), self._hanging(), self._running()
        for process in late:
            process.kill()
            process.wait()
        if self.asked_to_stop and not (failed or late):  # done, in spite of the signal
            return 0, "", False
        if self.asked_to_stop or any(status in STOPPED for status in failed.values()):
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
        if index == 0:  # which has said why
            return f"error: worker 0 ended with status {status}\n"
        log = log_of(self.folder, index)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        if status == 2:
            return "".join(f"worker {index}: {line}\n" for line in lines[-1:])
        end = "\n".join(lines)
        return f"error: worker {index} ended with status {status}; {log} ends:\n{end}\n"

    def _terminate(self) -> None:
        for process in self._running():
            process.terminate()

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
