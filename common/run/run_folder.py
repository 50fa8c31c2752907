# SPDX-License-Identifier: Apache-2.0
"""The files of a run in its work directory, and how a new run replaces an old one there without loss.

`--overwrite` moves the files of the old run to `.replaced/`, and the new run's first checkpoint deletes them. If the
new run ends before that, the next start moves everything back. `config.json`, which records what its run writes, is
the first file of a run, the last to be moved aside or deleted, and the first to be restored, so that a kill at any
moment leaves one of these:

    .replaced/ without config.json    one part of the old run is here, the other where it was
    .replaced/ with config.json       all of the old run is here; outside is what the new run's config.json records
    .discarded/                       the old run, half deleted

Below, `writes` is always what a run writes besides the files of every run, by names of `OF_SOME_RUNS`.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from common.files import PRESET, read_json
from keras_replicas.errors import UserError

_5_DIGITS, _HASH = "[0-9]" * 5, "[0-9a-f]" * 16
_GLUE_FILES = ("CoLA", "MRPC", "QNLI", "RTE", "SST-2", "STS-B")
_SPLITS = ("train", "validation", "test")
# Patterns of the files of every run, and, by name, of those of some recipes only. Users' own files, even in the same
# folders, are left alone.
OF_EVERY_RUN = (
    *("results.json", "steps.jsonl"),
    *("tensorboard/events.out.tfevents.*", "tensorboard/plugins"),
    *("checkpoints/checkpoint", "checkpoints/ckpt-[0-9]*"),
    *(f"preset/{name}" for name in PRESET),
)
OF_SOME_RUNS = {
    "adapter": ("adapter/adapter.lora.h5", "adapter/adapter.json"),
    "best": ("best.json", *(f"best/{name}" for name in PRESET)),
    "data": (
        *("data/manifest.json", "data/tokenizer.json", "data/train-counts.npy", "data/.shards.lock"),
        *(f"data/{split}-{_5_DIGITS}-of-{_5_DIGITS}-[0-9]*.tfrecord" for split in _SPLITS),
        f"data/*.{'[0-9a-f]' * 12}.unfinished",
    ),
    "model_card": ("preset/README.md",),
    "predictions": tuple(f"predictions/{name}.tsv" for name in ("validation", "test", *_GLUE_FILES)),
    "snapshots": ("snapshots/step-[0-9]*", "snapshots/unfinished"),
    "tokens": (f"tokens/{_HASH}",),
}
REPLACED, DISCARDED = ".replaced", ".discarded"


def holds_run(workdir: Path) -> bool:
    """Whether a run was started there: other programs write a `config.json` too, such as Hugging Face's libraries."""
    return {"recipe", "workdir", "overwrite"} <= (read_json(workdir / "config.json") or {}).keys()


def has_progress(workdir: Path) -> bool:
    """Whether a run there is complete, or has a checkpoint to resume from."""
    return (workdir / "results.json").exists() or any(workdir.glob("checkpoints/ckpt-*.index"))


def afresh(workdir: Path) -> str:
    """Advice, for a message, on starting afresh when a run is unfinished, which the same `--overwrite` would resume."""
    return f"give another --workdir, or remove {workdir} to start afresh"


def writes_of(workdir: Path) -> list[str]:
    """The `writes` of the run there; none if there is no run."""
    if not (workdir / "config.json").exists():
        return []
    return (read_json(workdir / "config.json") or {}).get("writes", list(OF_SOME_RUNS))  # 0.1.0 did not record it


def refuse_other_files(workdir: Path, writes: Iterable[str]) -> None:
    """Refuses to start a run in a directory that has a file or folder that it would write, but no run.

    Raises:
        UserError: in that case, and when something else is in the place of a run that is moved aside.
    """
    if holds_run(workdir) or holds_run(workdir / REPLACED):
        if others := [*_never_moved(workdir / REPLACED), *_never_moved(workdir / DISCARDED)]:
            raise UserError(f"{others[0]} is in the way, and not part of a run. Move it, or give another --workdir")
        return
    names = {pattern.split("/")[0] for pattern in _patterns(writes)} | {REPLACED, DISCARDED}
    there = [name for name in sorted(names - _made_before(workdir)) if os.path.lexists(workdir / name)]
    if there:
        raise UserError(
            f"{workdir} holds {', '.join(there)}, but no run: its config.json is missing, or not that of a run. "
            "Give another --workdir"
        )


def refuse_files_beside(workdir: Path, writes: Iterable[str]) -> None:
    """Raises a `UserError` if a run that replaces the one there would write a file that the old run did not."""
    runs = {*_written(workdir, writes_of(workdir))}
    beside = [path.relative_to(workdir) for path in _written(workdir, writes) if path not in runs]
    if there := [str(path) for path in beside if path.parts[0] not in _made_before(workdir)]:
        raise UserError(
            f"{workdir} holds {', '.join(there)}, which the run there did not write. Give another --workdir"
        )


def set_aside(workdir: Path) -> None:
    """Moves the files of the run there to `.replaced/`. Raises a `UserError` if it cannot."""
    replaced = workdir / REPLACED
    replaced.mkdir()
    try:
        _move(_written(workdir, writes_of(workdir)), workdir, replaced)
    except OSError as error:
        bring_back(workdir)
        raise UserError(f"cannot move the old run in {workdir} aside ({error}). Give another --workdir") from error
    print(f"The old run is kept in {replaced} until the new one has its first checkpoint, then deleted.", flush=True)


def bring_back(workdir: Path) -> None:
    """Restores a run that was moved aside, if its replacement ended before its first checkpoint.

    Raises a `UserError` if a file that neither run wrote is in the way.
    """
    shutil.rmtree(workdir / DISCARDED, ignore_errors=True)
    replaced = workdir / REPLACED
    if not replaced.is_dir():
        return
    if (replaced / "config.json").exists():  # so a run's files outside it are the new run's
        if has_progress(workdir):  # killed just before the deletion, or complete without a checkpoint, on a full disk
            discard_replaced(workdir)
            return
        if (workdir / "config.json").exists():
            for path in _written(workdir, writes_of(workdir)):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    paths = _written(replaced, OF_SOME_RUNS)[::-1]
    for path in (workdir / path.relative_to(replaced) for path in paths):
        if os.path.lexists(path):
            raise UserError(f"{path} is in the way of the old run in {replaced}. Move it")
    _move(paths, replaced, workdir)
    replaced.rmdir()
    print(f"The old run in {workdir} is restored: the one that was to replace it had no checkpoint yet.", flush=True)


def discard_replaced(workdir: Path) -> None:
    """Deletes the run that was moved aside, if there is one."""
    if (workdir / REPLACED).is_dir():
        os.replace(workdir / REPLACED, workdir / DISCARDED)  # in one step: half of a run must not come back
        shutil.rmtree(workdir / DISCARDED, ignore_errors=True)  # the next start deletes what is left


def _patterns(writes: Iterable[str]) -> list[str]:
    return [*OF_EVERY_RUN, *(pattern for name in writes for pattern in OF_SOME_RUNS.get(name, ())), "config.json"]


def _written(folder: Path, writes: Iterable[str]) -> list[Path]:
    return [path for pattern in _patterns(writes) for path in sorted(folder.glob(pattern))]


def _made_before(workdir: Path) -> set[str]:
    """Folders of shards that were written before the run started, as in a notebook."""
    shards = "made_from" in (read_json(workdir / "data/manifest.json") or {})
    return {"data", "tokens"} if shards else set()


def _never_moved(folder: Path) -> list[Path]:
    """The files in `.replaced/` or `.discarded/` that were never moved there; the path itself if it is not a folder."""
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
        return [folder]
    runs = {*_written(folder, OF_SOME_RUNS)}
    return [path for path in folder.rglob("*") if not path.is_dir() and not runs & {path, *path.parents}]


def _move(paths: list[Path], source: Path, target: Path) -> None:
    for path in paths:
        moved = target / path.relative_to(source)
        moved.parent.mkdir(exist_ok=True)
        os.replace(path, moved)
    for name in {pattern.split("/")[0] for pattern in _patterns(OF_SOME_RUNS)}:
        with contextlib.suppress(OSError):  # it is a file, missing, or not empty
            (source / name).rmdir()
