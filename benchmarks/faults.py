# SPDX-License-Identifier: Apache-2.0
"""Does to runs on two workers what clusters do to jobs, and compares each with an undisturbed run.

If stopped, it resumes where it was; where a trial fails, all stay in `results/faults.jsonl.unfinished`. A cut is
between two network namespaces, which root may make.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py

from benchmarks.hosts import ADDRESSES, cut, mend, on, two_hosts
from benchmarks.machine import ROOT, add_row, commit, finish_rows, unfinished_rows

CHECKPOINT_EVERY = 20
OPTIONS = (
    *("--corpus", "LICENSE", "--model", "nano", "--vocabulary-size", "300", "--seq-length", "16", "--batch-size", "4"),
    *("--dropout", "0.1", "--epochs", "12", "--checkpoint-every", str(CHECKPOINT_EVERY)),
)
Fault = Callable[[list[int], Path, Sequence[str]], None]  # takes the workers' process ids, work directory, hosts
A_RUN = 600  # seconds within which every run has ended, with time to spare


def main(arguments: argparse.Namespace) -> None:
    """Makes the trials that are missing, and ends with status 1 if one of all failed."""
    with two_hosts():
        pass  # whoever may not make them learns it now, not after all other faults
    rows, code = [] if arguments.quick else unfinished_rows("faults"), commit()
    with tempfile.TemporaryDirectory() as folder:
        expected = undisturbed(Path(folder, "undisturbed"))
        for fault, (times, _) in FAULTS.items():
            done = {row["number"] for row in rows if row["fault"] == fault}
            for number in sorted({*range(1 if arguments.quick else times)} - done):
                row = trial(fault, number, Path(folder, f"{fault} {number}"), *expected)
                rows.append(row | {"commit": code})
                if not arguments.quick:
                    add_row("faults", rows[-1])
                print(rows[-1], flush=True)
    if not all(row["identical"] and not row["left"] for row in rows):
        raise SystemExit(1)
    if not arguments.quick:
        finish_rows("faults")


def undisturbed(workdir: Path) -> tuple[dict[str, Any], int]:
    """The weights at the end of a run that nothing happens to, and its steps."""
    subprocess.run(commands(workdir)[0], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=A_RUN)
    return weights_of(workdir), steps_in(workdir)


def weights_of(workdir: Path) -> dict[str, Any]:
    """Every array of a run's preset, backbone and head, by its name."""
    weights: dict[str, Any] = {}
    for path in sorted((workdir / "preset").glob("*.weights.h5")):
        with h5py.File(path) as file:
            names: list[str] = []
            file.visit(names.append)
            weights |= {f"{path.stem} {name}": file[name][()] for name in names if isinstance(file[name], h5py.Dataset)}
    return weights


def commands(workdir: Path, hosts: Sequence[str] = ()) -> list[list[str]]:
    """The command of a run on two workers that restarts after a death, or one command for each host."""

    def launch(*place: str) -> list[str]:
        logs = ("--log-dir", str(workdir.with_name(f"{workdir.name} logs")))
        words = [sys.executable, "-m", "recipes", "launch", *place, "--max-restarts", "1", *logs, "bert_mlm"]
        return [*words, *OPTIONS, "--workdir", str(workdir)]

    if not hosts:
        return [launch("--workers", "2")]
    addresses = ",".join(f"{address}:8888" for address in ADDRESSES)
    return [on(host, *launch("--hosts", addresses, "--node-rank", str(i))) for i, host in enumerate(hosts)]


def trial(fault: str, number: int, workdir: Path, expected: dict[str, Any], steps: int) -> dict[str, Any]:
    """One run of so many steps with one fault, at a random step between two checkpoints.

    Returns:
        A row with the `fault` and its `number`; `at_step`, the last step before it; `went_on_from`, the step that was
        restored; `noticed`, the seconds until all workers had ended; whether the weights are `identical` to the
        expected ones; and what is `left`: processes, ports and files that should be gone. Of a run that does not end
        as it should, `left` is the reason, and it has ended.
    """
    chance = random.Random(f"{fault} {number}")
    step = chance.randrange(2, steps // CHECKPOINT_EVERY - 2) * CHECKPOINT_EVERY + chance.randrange(3, 15)
    _, do = FAULTS[fault]
    temporary = workdir.with_suffix(".tmp")
    temporary.mkdir()
    log = workdir.with_suffix(".log").open("w+")
    launchers: list[subprocess.Popen] = []
    row: dict[str, Any] = {"fault": fault, "number": number}

    def start() -> None:
        environment = os.environ | {"TMPDIR": str(temporary)}
        launchers[:] = [
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            for command in commands(workdir, hosts)
        ]

    with two_hosts() if do is link_cut else contextlib.nullcontext([]) as hosts:
        try:
            start()
            until(lambda: steps_in(workdir) >= step)
            workers = [worker for launcher in launchers for worker in children(launcher.pid)]
            addresses = [] if hosts else addresses_of(workers[0])  # those of hosts end with these
            do(workers, workdir, hosts)
            row["at_step"], began = steps_in(workdir), time.monotonic()
            until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
            noticed = time.monotonic() - began
            if hosts:
                mend(hosts)
            if launchers[0].wait(A_RUN) == 143:  # stopped, after saving; it is started again
                row["at_step"] = steps_in(workdir)
                start()
            statuses = [launcher.wait(A_RUN) for launcher in launchers]
            if any(statuses):
                log.seek(0)
                raise RuntimeError(f"it ended with {statuses}: {log.read()[-2000:]}")
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            return row | {"identical": False, "left": [repr(error)]}
        finally:
            end(launchers)
    return row | {
        "went_on_from": json.loads((workdir / "results.json").read_text())["resumed_from_step"],
        "noticed": round(noticed, 1),
        "identical": same_bits(weights_of(workdir), expected),
        "left": left_behind(workdir, temporary, [int(address.rsplit(":", 1)[1]) for address in addresses]),
    }


def end(launchers: list[subprocess.Popen]) -> None:
    """Kills what is left of a run."""
    for launcher in launchers:
        with contextlib.suppress(FileNotFoundError):
            workers = children(launcher.pid)
            launcher.kill()
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
        launcher.wait()


def sent(number: signal.Signals, worker: int) -> Fault:
    """The fault that sends a signal to one of the workers."""
    return lambda workers, workdir, hosts: os.kill(workers[worker], number)


def killed_while_it_saves(workers: list[int], workdir: Path, hosts: Sequence[str]) -> None:
    """The fault that sends SIGKILL to the chief while it writes a checkpoint."""
    unfinished = workdir / "checkpoints"
    until(lambda: any(name.endswith("_temp") for name in os.listdir(unfinished)), pause=0)
    os.kill(workers[0], signal.SIGKILL)


def link_cut(workers: list[int], workdir: Path, hosts: Sequence[str]) -> None:
    """The fault of a network that loses everything without telling anybody."""
    cut(hosts)


# How often each is tried, and what it does.
FAULTS = {
    "SIGKILL of a worker": (10, sent(signal.SIGKILL, 1)),
    "SIGKILL of the chief": (10, sent(signal.SIGKILL, 0)),
    "SIGTERM to a worker": (10, sent(signal.SIGTERM, 1)),
    "SIGTERM to the chief": (10, sent(signal.SIGTERM, 0)),
    "SIGKILL while a checkpoint is written": (10, killed_while_it_saves),
    "SIGSTOP of a worker": (3, sent(signal.SIGSTOP, 1)),
    "SIGSTOP of the chief": (2, sent(signal.SIGSTOP, 0)),
    "network cut between two hosts": (5, link_cut),
}


def until(happened: Callable[[], bool], pause: float = 0.002) -> None:
    """Waits until something has happened.

    Raises:
        TimeoutError: when it has not after the time of a run.
    """
    deadline = time.monotonic() + A_RUN
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(pause)


def steps_in(workdir: Path) -> int:
    """Steps that the run has written down."""
    path = workdir / "steps.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def children(pid: int) -> list[int]:
    """Process ids of a process's children, in the order in which they were started."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def addresses_of(worker: int) -> list[str]:
    """All workers' addresses, from the environment of one."""
    variables = Path(f"/proc/{worker}/environ").read_bytes().decode().split("\0")
    config = next(line.split("=", 1)[1] for line in variables if line.startswith("TF_CONFIG="))
    return json.loads(config)["cluster"]["worker"]


def same_bits(weights: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether two runs have the same arrays, to the bit."""
    return {name: array.tobytes() for name, array in weights.items()} == {
        name: array.tobytes() for name, array in others.items()
    }


def left_behind(workdir: Path, temporary: Path, ports: list[int]) -> list[str]:
    """Processes whose command has the work directory, ports still in use, and temporary files."""
    left = [str(path) for path in [*temporary.rglob("*"), *workdir.rglob("*_temp"), *workdir.rglob("*.unfinished")]]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(workdir).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                left.append(f"process {process.name}")
        except OSError:
            continue  # it has ended
    for port in ports:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            left.append(f"port {port}")
    return left
