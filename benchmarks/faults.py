# SPDX-License-Identifier: Apache-2.0
"""Does to runs on two workers what clusters do to jobs, and compares each with a run that nothing happened to.

    python -m benchmarks.faults        # about 45 minutes; stopped and started again, it goes on where it was

Every trial is a line of `results/faults.jsonl`; the table in the README is made from them.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/faults.jsonl"
CHECKPOINT_EVERY = 20
STEPS = 384
KNOBS = (
    *("--corpus", "LICENSE", "--model", "nano", "--vocabulary-size", "300", "--seq-length", "16", "--batch-size", "4"),
    *("--dropout", "0.1", "--epochs", "12", "--checkpoint-every", str(CHECKPOINT_EVERY)),
)
A_RUN = 180  # seconds within which every run has ended, with time to spare


def main() -> None:
    """Makes the trials that are missing, and ends with status 1 where one of them failed."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        expected = undisturbed(Path(folder, "undisturbed"))
        for fault, (times, _) in FAULTS.items():
            for number in range(sum(row["fault"] == fault for row in rows), times):
                rows.append(trial(fault, number, Path(folder, f"{fault} {number}"), expected))
                with RESULTS.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1], flush=True)
    raise SystemExit(0 if all(row["identical"] and not row["left"] for row in rows) else 1)


def undisturbed(workdir: Path) -> dict[str, bytes]:
    """The weights at the end of a run that nothing happens to."""
    subprocess.run(command(workdir), cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=A_RUN)
    return weights_of(workdir)


def command(workdir: Path) -> list[str]:
    """Of a run on two workers that is started again after a death."""
    launch = [sys.executable, "-m", "recipes", "launch", "--workers", "2", "--restarts", "1", "bert_mlm"]
    return [*launch, *KNOBS, "--workdir", str(workdir)]


def trial(fault: str, number: int, workdir: Path, expected: dict[str, bytes]) -> dict[str, Any]:
    """One run with one fault, at a random step between two checkpoints.

    Returns:
        A row with the `fault` and its `number`; `at_step`, the last one before it; `went_on_from`, the step that was
        restored; `noticed`, the seconds until all workers had ended; whether the weights are `identical` to the
        expected ones; and what is `left`: processes, ports and files that should be gone.
    """
    chance = random.Random(f"{fault} {number}")
    step = chance.randrange(2, STEPS // CHECKPOINT_EVERY - 2) * CHECKPOINT_EVERY + chance.randrange(3, 15)
    temporary = workdir.with_suffix(".tmp")
    temporary.mkdir()
    log = workdir.with_suffix(".log").open("w+")
    start = {"cwd": ROOT, "env": os.environ | {"TMPDIR": str(temporary)}, "stdout": log, "stderr": log}
    launcher = subprocess.Popen(command(workdir), **start)
    until(lambda: steps_in(workdir) >= step)
    workers = children(launcher.pid)
    ports = [int(address.rsplit(":", 1)[1]) for address in addresses_of(workers[0])]
    _, do = FAULTS[fault]
    do(workers, workdir)
    at_step, began = steps_in(workdir), time.monotonic()
    until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    noticed = time.monotonic() - began
    if launcher.wait(A_RUN) == 143:  # stopped, after saving; somebody starts it again
        at_step = steps_in(workdir)
        launcher = subprocess.Popen(command(workdir), **start)
    if launcher.wait(A_RUN):
        log.seek(0)
        raise RuntimeError(f"{fault} {number}: the run ended with {launcher.returncode}:\n{log.read()}")
    return {
        "fault": fault,
        "number": number,
        "at_step": at_step,
        "went_on_from": json.loads((workdir / "results.json").read_text())["resumed_from_step"],
        "noticed": round(noticed, 1),
        "identical": weights_of(workdir) == expected,
        "left": left_behind(workdir, temporary, ports),
    }


def killed(worker: int, number: signal.Signals) -> Callable[[list[int], Path], None]:
    """The fault of a signal to one of the workers."""
    return lambda workers, workdir: os.kill(workers[worker], number)


def killed_while_it_saves(workers: list[int], workdir: Path) -> None:
    """The fault of SIGKILL to the chief while it writes a checkpoint."""
    unfinished = workdir / "checkpoints"
    until(lambda: any(name.endswith("_temp") for name in os.listdir(unfinished)), pause=0)
    os.kill(workers[0], signal.SIGKILL)


# How often each is tried, and what it does to the workers' process ids and the work folder.
FAULTS = {
    "SIGKILL of a worker": (10, killed(1, signal.SIGKILL)),
    "SIGKILL of the chief": (10, killed(0, signal.SIGKILL)),
    "SIGTERM to a worker": (10, killed(1, signal.SIGTERM)),
    "SIGTERM to the chief": (10, killed(0, signal.SIGTERM)),
    "SIGKILL while a checkpoint is written": (10, killed_while_it_saves),
    "SIGSTOP of a worker": (5, killed(1, signal.SIGSTOP)),
    "SIGSTOP of the chief": (5, killed(0, signal.SIGSTOP)),
}


def until(happened: Callable[[], bool], pause: float = 0.002) -> None:
    """Waits for it.

    Raises:
        TimeoutError: when it does not come in the time of a run.
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


def weights_of(workdir: Path) -> dict[str, bytes]:
    """Every array of the run's preset, by its name."""
    weights = {}

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            weights[f"{path.name} {name}"] = item[()].tobytes()

    for path in sorted((workdir / "preset").glob("*.weights.h5")):  # backbone and head
        with h5py.File(path) as file:
            file.visititems(add)
    return weights


def left_behind(workdir: Path, temporary: Path, ports: list[int]) -> list[str]:
    """Processes that know the work folder, ports that are held, and files that are temporary."""
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


if __name__ == "__main__":
    main()
