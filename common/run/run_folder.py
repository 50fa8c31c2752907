# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: opened by one process at a time, and only with the options that started it."""

import dataclasses
import datetime
import fcntl
import logging
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from common.files import read_json, remove_unfinished, write_json
from keras_replicas import UserError, agree, exchange, is_chief

log = logging.getLogger("keras_replicas")
Result = TypeVar("Result")
LAUNCH_ID = "LAUNCH_ID"  # environment variable by which a launcher identifies the workers that it restarts


@dataclasses.dataclass
class Run:
    """An open run; see `open_run`.

    Attributes:
        folder: where it keeps its files.
        saved: the content of `config.json`: the options that the run was started with, and what `keep` recorded.
        results: the content of `results.json`; None while the run is not complete.
    """

    folder: Path
    saved: dict[str, Any]
    results: dict[str, Any] | None = None
    _lock: TextIO | None = None  # held as long as the process lives, by the chief

    def keep(self, name: str, value: Any) -> Any:
        """Records a value, which JSON must hold, and returns it; a resumed run returns what its start recorded."""
        if name not in self.saved:
            self.saved[name] = value
            if self._lock:
                write_json(self.folder / "config.json", self.saved)
        return self.saved[name]

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Writes `results.json`, which makes the run complete, and returns it; {} for workers other than the chief."""
        if not is_chief():
            return {}
        write_json(self.folder / "results.json", results)
        return results


def open_run(
    folder: str | os.PathLike | None, options: Mapping[str, Any], *, free: Collection[str] = (), overwrite: bool = False
) -> Run:
    """Starts a run in a folder, or opens the one that was started there, to be resumed.

    All workers call it; the chief opens the run, and holds a lock on it as long as the process lives. A run that has no
    checkpoint yet is started afresh, even with other options.

    Args:
        folder: created if missing; None for a run that writes nothing, such as a dry one.
        options: of the run, which JSON must hold; kept in `config.json`.
        free: names of options that may differ when the run is resumed.
        overwrite: whether to move a run that is there aside, with its folder, and start afresh; but not one that was
            interrupted and has the same options, nor one that the same launcher started: these are resumed.

    Raises:
        ValueError: on all workers, when they were given different options; when the folder cannot be written, holds
            files but no run, or is open in another process; when its run was started with other options; when the
            workers do not share it.
    """
    agree(dict(options), "was started differently from the chief")
    if folder is None:
        return Run(Path(os.devnull), dict(options))
    folder = Path(folder)
    run = chief_alone(lambda: _open(folder, dict(options), free, overwrite))
    lock = folder / ".lock"
    tokens = exchange({"token": lock.read_text() if lock.is_file() else None})
    for index, theirs in enumerate(tokens):
        if theirs != tokens[0]:
            raise UserError(f"worker {index} does not see the chief's folder {folder}: use a shared file system")
    return run or look_at(folder, dict(options), free)


def look_at(folder: Path, options: dict[str, Any], free: Collection[str] = ()) -> Run:
    """The run that would be started or resumed in a folder; nothing is written. Raises as `open_run` does."""
    saved = _saved(folder)
    if saved is None or not _has_progress(folder):
        return Run(folder, options)
    different = [name for name in options if name not in free and saved.get(name) != options[name]]
    if different:
        raise UserError(
            f"{folder} holds a run with other options: "
            + ", ".join(f"{name} {saved.get(name)!r}, not {options[name]!r}" for name in different)
            + ". Give another folder, or overwrite it"
        )
    return Run(folder, saved, read_json(folder / "results.json"))


def _open(folder: Path, options: dict[str, Any], free: Collection[str], overwrite: bool) -> Run:
    saved = _saved(folder)
    try:
        if saved is None and (others := _other_files(folder)):
            raise UserError(f"{folder} holds {', '.join(others)}, but no run: give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
        remove_unfinished(folder)
        if overwrite and _has_progress(folder) and not _is_resumed(folder, saved or {}, options):
            aside = folder.with_name(f"{folder.name}.old-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}")
            folder.rename(aside)
            log.info("The old run is now in %s; delete it when you no longer need it.", aside)
            folder.mkdir()
            lock = _locked(folder)
        run = look_at(folder, options, free)
        run._lock = lock
        run.saved |= {"launch": os.environ.get(LAUNCH_ID)}
        write_json(folder / "config.json", run.saved)
        return run
    except OSError as error:
        raise UserError(f"cannot write to the folder {folder} ({error.strerror}): give another") from error


def _saved(folder: Path) -> dict[str, Any] | None:
    """The content of `config.json`; None if no run wrote it: other programs have files of that name."""
    saved = read_json(folder / "config.json")
    return saved if saved and "launch" in saved else None


def _other_files(folder: Path) -> list[str]:
    """What a run's folder must not hold before the run; shards may be there, and a launcher's logs."""
    expected = {".lock", "logs"} | ({"data", "tokens"} if (folder / "data/manifest.json").is_file() else set())
    return sorted(path.name for path in folder.iterdir() if path.name not in expected) if folder.is_dir() else []


def _has_progress(folder: Path) -> bool:
    """Whether a run there is complete, or has a checkpoint to be resumed from."""
    return (folder / "results.json").exists() or any(folder.glob("checkpoints/ckpt-*.index"))


def _is_resumed(folder: Path, saved: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether this very command, which overwrites, started the run there."""
    if LAUNCH_ID in os.environ and saved.get("launch") == os.environ[LAUNCH_ID]:
        return True  # even a complete run: a launcher restarts all workers after one dies
    return not (folder / "results.json").exists() and saved | options == saved


def _locked(folder: Path) -> TextIO:
    """The folder's lock, holding a token that tells workers that they see the same file."""
    lock = (folder / ".lock").open("a+", errors="replace")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is running in {folder}: wait for it, or give another folder") from None
    lock.truncate(0)
    lock.write(uuid.uuid4().hex)
    lock.flush()
    return lock


def chief_alone(work: Callable[[], Result]) -> Result | None:
    """Has the chief alone do some work, and returns its result; the other workers wait, and get None.

    Raises:
        UserError: on every worker, when the chief's work raised it.
    """
    result, error = None, None
    if is_chief():
        try:
            result = work()
        except UserError as refused:
            error = str(refused)
    exchange({"error": error})
    return result
