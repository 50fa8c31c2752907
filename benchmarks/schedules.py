# SPDX-License-Identifier: Apache-2.0
"""Random schedules of one to three faults, to runs of a small model on two workers, each compared to the bit.

If stopped, it resumes where it was; where a trial fails, all stay in `results/schedules.jsonl.unfinished`. The runs'
disk of 4 MB and their two hosts are made by root.
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults import children, end, left_behind, steps_in, until
from benchmarks.hosts import ADDRESSES, cut, mend, on, two_hosts
from benchmarks.machine import ROOT, add_row, code_of, commit, finish_rows, unfinished_rows
from keras_replicas import UserError

SCHEDULES = 60
STEPS, EVERY = 320, 10  # of a run; from a checkpoint to the next


def main(arguments: argparse.Namespace) -> None:
    """Makes the trials that are missing; ends with status 1 if one of all failed."""
    schedules = len(FAULTS) if arguments.quick else SCHEDULES
    rows, code = [] if arguments.quick else unfinished_rows("schedules"), commit()
    with tempfile.TemporaryDirectory() as folder:
        expected = Run(Path(folder, "undisturbed")).weights_at_end()
        for seed in sorted({*range(schedules)} - {row["seed"] for row in rows}):
            chance = random.Random(seed)
            names = [list(FAULTS)[seed]] if arguments.quick else chance.choices(list(FAULTS), k=chance.randint(1, 3))
            rows.append(trial(seed, chance, names, Path(folder, str(seed)), expected) | {"commit": code})
            if not arguments.quick:
                add_row("schedules", rows[-1])
            print(rows[-1], flush=True)
    print(table(rows))
    if not all(row["identical"] and not row["left"] for row in rows):
        raise SystemExit(1)
    if not arguments.quick:
        finish_rows("schedules")


def trial(seed: int, chance: random.Random, names: list[str], workdir: Path, expected: list[np.ndarray]) -> dict:
    """One run with some faults, by their names in `FAULTS`, each at a random step.

    Returns:
        A row with the `seed`; the `faults`, each with the step before it; how often the run was `started` again by
        hand, as after a full disk; the seconds; whether the weights are `identical` to the expected ones; and what is
        `left` behind, or why the run did not end as it should.
    """
    began, faults = time.monotonic(), []
    with a_disk(workdir), two_hosts() if "one way cut" in names else contextlib.nullcontext([]) as hosts:
        run = Run(workdir, chance, hosts)
        steps = sorted(chance.sample(range(3 * EVERY, STEPS - EVERY, 15), len(names)))
        try:
            for name, step in zip(names, steps, strict=True):
                run.wait_for(lambda step=step: steps_in(workdir) >= step)
                faults.append([name, steps_in(workdir)])
                FAULTS[name](run)
            weights = run.weights_at_end()
            same = [weight.tobytes() for weight in weights] == [weight.tobytes() for weight in expected]
            left = left_behind(workdir, run.temporary, [])
        except (RuntimeError, TimeoutError) as error:
            same, left = False, [repr(error)]
        finally:
            end(run.launchers)
    row = {"seed": seed, "faults": faults, "started": run.started, "seconds": round(time.monotonic() - began, 1)}
    return row | {"identical": same, "left": left}


@contextlib.contextmanager
def a_disk(folder: Path) -> Iterator[None]:
    """A file system of 4 MB at a folder, which root can mount; gone after the block."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]).returncode:
        raise UserError("needs root, who may mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class Run:
    """A run of `train` on two workers, which restarts after a death.

    Args:
        workdir: its folder.
        chance: of the faults.
        hosts: names of those on which the workers are; else both are on this machine.
    """

    def __init__(self, workdir: Path, chance: random.Random | None = None, hosts: list[str] | None = None):
        self.workdir, self.chance, self.hosts, self.started = workdir, chance or random.Random(0), hosts or [], 0
        self.checkpoints, self.temporary = workdir / "checkpoints", Path(f"{workdir}.tmp")
        self.temporary.mkdir()
        self.launchers = self._start()

    def _start(self) -> list[subprocess.Popen]:
        words = [sys.executable, "-m", "keras_replicas", "launch", "--max-restarts", "20"]
        words += ["--log-dir", f"{self.workdir}.logs"]
        script = ["-m", "benchmarks.schedules", str(self.workdir)]
        addresses = ",".join(f"{address}:8888" for address in ADDRESSES)
        commands = [
            on(host, *words, "--hosts", addresses, "--node-rank", str(i), *script) for i, host in enumerate(self.hosts)
        ]
        environment = os.environ | {"TMPDIR": str(self.temporary), "TF_CPP_MIN_LOG_LEVEL": "3"}
        with Path(f"{self.workdir}.log").open("a") as log:
            return [
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
                for command in commands or [[*words, "--workers", "2", *script]]
            ]

    def workers(self) -> list[int]:
        """Process ids of those that run."""
        with contextlib.suppress(FileNotFoundError):  # a launcher has ended
            return [worker for launcher in self.launchers for worker in children(launcher.pid)]
        return []

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Waits until something has happened; starts the run again when it has ended before, as after a full disk."""

        def happened_or_ended() -> bool:
            return happened() or all(launcher.poll() is not None for launcher in self.launchers)

        until(happened_or_ended)
        while not happened() and any(launcher.returncode for launcher in self.launchers) and self.started < 3:
            self.started += 1
            self.launchers = self._start()
            until(happened_or_ended)

    def weights_at_end(self) -> list[np.ndarray]:
        """The weights that the run ends with."""
        self.wait_for(lambda: all(launcher.poll() == 0 for launcher in self.launchers))
        if any(launcher.returncode for launcher in self.launchers):
            raise RuntimeError(Path(f"{self.workdir}.log").read_text()[-2000:])
        with np.load(self.workdir / "weights.npz") as file:
            return [file[name] for name in file.files]

    def kill(self, *workers: int) -> None:
        """Sends SIGKILL to workers."""
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)

    def kill_one(self) -> None:
        """Sends SIGKILL to one of both, once both run."""
        self.wait_for(lambda: len(self.workers()) == 2)
        self.kill(*self.workers()[self.chance.randrange(2) :][:1])


def killed_while_it_saves(run: Run) -> None:
    """The chief is killed while it writes a checkpoint."""
    run.wait_for(lambda: any(run.checkpoints.glob("*_temp")) or steps_in(run.workdir) >= STEPS)
    run.kill(*run.workers()[:1])


def killed_while_it_restores(run: Run) -> None:
    """A worker is killed, and one of the next ones before it has gone on: as it imports, joins, restores or traces."""
    before = {*run.workers()}
    run.kill_one()
    run.wait_for(lambda: len(run.workers()) == 2 and before.isdisjoint(run.workers()))
    time.sleep(run.chance.uniform(0, 7))
    run.kill_one()


def flipped_bit(run: Run) -> None:
    """Both are killed, and a bit of the latest checkpoint is not what it was."""
    run.kill(*run.workers())
    latest = max(run.checkpoints.glob("ckpt-*.index"), key=lambda path: int(path.stem.removeprefix("ckpt-")))
    path = run.chance.choice(sorted(run.checkpoints.glob(f"{latest.stem}.*")))
    content = bytearray(path.read_bytes())
    content[run.chance.randrange(len(content))] ^= 1 << run.chance.randrange(8)
    path.write_bytes(content)


def full_disk(run: Run) -> None:
    """There is no room for some steps."""
    filling = run.workdir / "filling"
    with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
        while file.write(b"0" * 4096):
            pass
    last, deadline = steps_in(run.workdir) + run.chance.randrange(5, 25), time.monotonic() + 5
    until(lambda: steps_in(run.workdir) >= last or time.monotonic() > deadline)
    filling.unlink()


def slow_worker(run: Run) -> None:
    """A worker stands still for some seconds."""
    run.wait_for(lambda: len(run.workers()) == 2)
    for worker in run.workers()[run.chance.randrange(2) :][:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGSTOP)
            time.sleep(run.chance.uniform(0.5, 5))
            os.kill(worker, signal.SIGCONT)


def one_way_cut(run: Run) -> None:
    """What one host sends is lost, and nobody is told, until the workers have given up."""
    workers = run.workers()
    cut(run.hosts, only=run.chance.randrange(2))
    run.wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    mend(run.hosts)


FAULTS: dict[str, Callable[[Run], None]] = {
    "a worker killed": Run.kill_one,
    "both killed": lambda run: run.kill(*run.workers()),
    "killed while it saves": killed_while_it_saves,
    "killed while it restores": killed_while_it_restores,
    "flipped bit": flipped_bit,
    "full disk": full_disk,
    "slow worker": slow_worker,
    "one way cut": one_way_cut,
}


def table(rows: list[dict[str, Any]]) -> str:
    """How often each fault was in a schedule, and of these schedules, how many ended with the same bits."""
    drawn = collections.Counter(name for row in rows for name, _ in row["faults"])
    good = [row for row in rows if row["identical"] and not row["left"]]
    held = collections.Counter(name for row in good for name in {name for name, _ in row["faults"]})
    of = collections.Counter(name for row in rows for name in {name for name, _ in row["faults"]})
    lines = ["| fault | times | schedules with it | same to the bit, nothing left |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {drawn[name]} | {of[name]} | {held[name]} |" for name in FAULTS]
    lines += [f"| all | {sum(drawn.values())} | {len(rows)} | {len(good)} |"]
    return "\n".join([*lines, "", code_of(rows)])


def train(folder: Path) -> None:
    """What each worker does."""
    import keras

    import keras_replicas as kr

    strategy = kr.make_strategy()
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(STEPS * 2, 8)).astype("float32")
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential(
            [layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.2), layers.Dense(1)]
        )
        model.compile("adam", "mse")
        model = kr.data_parallel(model)
    checkpoints = kr.Checkpoints(folder / "checkpoints", every=EVERY)
    model.fit(x, x[:, :1], batch_size=16, epochs=8, verbose=0, callbacks=[kr.StepLog(folder), checkpoints])
    if kr.is_chief():
        np.savez(folder / "weights.npz", *model.get_weights())


if __name__ == "__main__":
    train(Path(sys.argv[1]))
