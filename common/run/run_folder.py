# SPDX-License-Identifier: Apache-2.0
"""What a run writes in its folder, and how a new run takes the place of an old one there without loss.

`--overwrite` moves what the old run wrote to `.replaced/`, and the new run's first checkpoint deletes that. Where the
new run ends before it, the next start moves everything back. `config.json` is the last file to be moved aside and the
first to come back, so that a kill at any moment leaves one of these:

    .replaced/ without config.json    one part of the old run is here, the other where it was
    .replaced/ with config.json       all of the old run is here; what a run writes beside it is the new run's
    .discarded/                       the old run, half deleted
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from common.errors import UserError

_PRESET = (
    *("config.json", "metadata.json", "preprocessor.json", "task.json", "tokenizer.json", "README.md", "assets"),
    *("model*.weights.*", "task*.weights.*"),
)
_HASH = "[0-9a-f]" * 16
# Patterns of all that a run writes. What users put beside it, in the same folders too, stays where it is.
WRITTEN = (
    *("results.json", "steps.jsonl", "best.json"),
    *("tensorboard/events.out.tfevents.*", "tensorboard/plugins"),
    *("checkpoints/checkpoint", "checkpoints/ckpt-*"),
    *(f"{folder}/{name}" for folder in ("preset", "best") for name in _PRESET),
    *("predictions/*.tsv", "snapshots/step-[0-9]*", "snapshots/unfinished", f"tokens/{_HASH}"),
    *("data/manifest.json", "data/tokenizer.json", "data/train-counts.npy", "data/*-of-*.tfrecord"),
    *("data/.lock", "data/*.unfinished"),
    "config.json",
)
NAMES = tuple(dict.fromkeys(pattern.split("/")[0] for pattern in WRITTEN))  # of a run's own in its folder
REPLACED, DISCARDED = ".replaced", ".discarded"


def holds_run(workdir: Path) -> bool:
    """Whether a run was begun there: others write a `config.json` too, Hugging Face's libraries for example."""
    return {"recipe", "workdir", "overwrite"} <= (read_json(workdir / "config.json") or {}).keys()


def has_progress(workdir: Path) -> bool:
    """Whether a run there is complete, or has a checkpoint from which it goes on."""
    return (workdir / "results.json").exists() or any(workdir.glob("checkpoints/ckpt-*.index"))


def refuse_other_files(workdir: Path) -> None:
    """Refuses to begin a run in a folder that holds something by a name that a run would write.

    Raises:
        UserError: when it does, and holds no run.
    """
    there = [name for name in sorted(NAMES) if os.path.lexists(workdir / name)]
    if set(there) <= {"data", "tokens"} and "made_from" in (read_json(workdir / "data/manifest.json") or {}):
        return  # shards that were written before the run begins, as a notebook does
    if there and not is_set_aside(workdir) and not holds_run(workdir):
        raise UserError(
            f"{workdir} holds {', '.join(there)}, but no run: its config.json is missing, or not one of a run. "
            "Give another --workdir"
        )


def is_set_aside(workdir: Path) -> bool:
    """Whether a run there waits for the first checkpoint of the one that takes its place."""
    return (workdir / REPLACED).is_dir()


def set_aside(workdir: Path) -> None:
    """Moves what the run there wrote to `.replaced/`.

    Raises:
        UserError: when it cannot be moved.
    """
    replaced = workdir / REPLACED
    replaced.mkdir()
    try:
        _move(_written(workdir), workdir, replaced)
    except OSError as error:
        bring_back(workdir)
        raise UserError(f"cannot set the run in {workdir} aside ({error}). Give another --workdir") from error
    print(f"The old run is in {replaced} until this one has its first checkpoint; then it is deleted.", flush=True)


def bring_back(workdir: Path) -> None:
    """Moves a run that was set aside back, in the place of one that ended before its first checkpoint."""
    shutil.rmtree(workdir / DISCARDED, ignore_errors=True)
    replaced = workdir / REPLACED
    if not replaced.is_dir():
        return
    if (replaced / "config.json").exists():  # so what a run writes beside it is the new run's
        if has_progress(workdir):  # killed just before it was deleted, or complete without a checkpoint, on a full disk
            discard_replaced(workdir)
            return
        for path in _written(workdir):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    _move(_written(replaced)[::-1], replaced, workdir)
    replaced.rmdir()
    print(f"The run that was set aside in {workdir} is back: the one in its place had no checkpoint yet.", flush=True)


def discard_replaced(workdir: Path) -> None:
    """Deletes the run that was set aside, if there is one."""
    if is_set_aside(workdir):
        os.replace(workdir / REPLACED, workdir / DISCARDED)  # at once: half of a run must not come back
        shutil.rmtree(workdir / DISCARDED, ignore_errors=True)  # what is left, the next start deletes


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no such file, or it is empty, cut short or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Any) -> None:
    """Writes whole or not at all: a reader never finds half a file, not after a power cut either."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a text as `write_json` does."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    flush(unfinished)  # or the new name could be on the disk before the text
    os.replace(unfinished, path)


def flush(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _written(folder: Path) -> list[Path]:
    return [path for pattern in WRITTEN for path in sorted(folder.glob(pattern))]


def _move(paths: list[Path], source: Path, target: Path) -> None:
    for path in paths:
        moved = target / path.relative_to(source)
        moved.parent.mkdir(exist_ok=True)
        os.replace(path, moved)
    for name in NAMES:
        with contextlib.suppress(OSError):  # a file, not there, or with something in it
            (source / name).rmdir()
