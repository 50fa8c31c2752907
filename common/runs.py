# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: opened by one process at a time, and only by the command that began it."""

import dataclasses
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, TextIO

from common.command_line import UserError

# Knobs that may differ when a run goes on: they do not change what it computes.
FREE_KNOBS = ("workdir", "overwrite", "checkpoint_every", "replicas", "batch_size")


@dataclasses.dataclass
class Run:
    """An open run.

    Attributes:
        workdir: its folder.
        results: those of `results.json`, where the run is complete.
        lock: held as long as the process lives.
    """

    workdir: Path
    results: dict[str, Any] | None
    lock: TextIO

    def split(self, config: Any, replicas: int, peak_learning_rate: float) -> tuple[int, float]:
        """Examples on each replica in a step, and the peak of the learning rate.

        A run that goes on keeps its global batch and its peak for any number of replicas; a new one notes them.

        Raises:
            UserError: when the replicas cannot share that global batch, or the batch size given does not make it.
        """
        path = self.workdir / "config.json"
        saved = json.loads(path.read_text())
        total = saved.setdefault("global_batch_size", config.batch_size * replicas)
        peak = saved.setdefault("peak_learning_rate", peak_learning_rate)
        if total % replicas or config.batch_size not in (saved["batch_size"], total // replicas):
            raise UserError(
                f"{self.workdir} holds a run with a global batch of {total}, which is not {replicas} replicas x "
                f"{config.batch_size}. Give --replicas and --batch-size that make {total}, or --overwrite for a new run"
            )
        write_json(path, saved)
        return total // replicas, peak


def open_run(recipe: str, config: Any) -> Run:
    """Opens the run in `config.workdir`, or begins one there.

    Args:
        recipe: the recipe's name.
        config: its `Config`, with the knobs `workdir` and `overwrite`.

    Raises:
        UserError: when the folder cannot be written, another process has it open, or it holds a run of another recipe
            or with other knobs (the split of the batch excepted).
    """
    workdir = Path(config.workdir)
    wanted = {"recipe": recipe, **dataclasses.asdict(config)}
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if config.overwrite:
            _clear(workdir)
        if (workdir / "config.json").is_file():
            _refuse_other_knobs(workdir, wanted)
        else:
            write_json(workdir / "config.json", wanted)
    except BlockingIOError as error:
        raise UserError(f"another process is running in {workdir}. Wait for it, or give another --workdir") from error
    except OSError as error:
        raise UserError(
            f"cannot write to the work folder {workdir} ({error.strerror}). Give another --workdir"
        ) from error
    results = workdir / "results.json"
    return Run(workdir, json.loads(results.read_text()) if results.is_file() else None, lock)


def write_json(path: Path, content: Any) -> None:
    """Writes whole or not at all: a reader never finds half a file."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _refuse_other_knobs(workdir: Path, wanted: dict[str, Any]) -> None:
    try:
        found = json.loads((workdir / "config.json").read_text())
        different = [name for name in wanted if name not in FREE_KNOBS and found[name] != wanted[name]]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{workdir}/config.json is not of this program. Give another --workdir, or --overwrite"
        ) from error
    if different:
        raise UserError(
            f"{workdir} holds a run with other knobs: "
            + ", ".join(f"{name} {found[name]!r}, not {wanted[name]!r}" for name in different)
            + ". Give another --workdir, or --overwrite to start afresh"
        )


def _clear(workdir: Path) -> None:
    """Removes what a run writes, and nothing else."""
    for name in ("config.json", "results.json", "steps.jsonl"):
        (workdir / name).unlink(missing_ok=True)
    for name in ("tensorboard", "checkpoints", "preset"):
        shutil.rmtree(workdir / name, ignore_errors=True)
