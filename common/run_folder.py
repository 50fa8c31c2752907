# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: opened by one process at a time, and resumed only with the options that started it."""

import datetime
import fcntl
import hashlib
import importlib.metadata
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import keras_replicas
from keras_replicas import UserError, agree, exchange, is_chief

from .files import one_line, read_json, write_json
from .untrusted import check_run

Result = TypeVar("Result")
INPUTS = ("commit of ", "sha256 of ")  # so begin the names of options that are the identities of files
LAUNCH_ID = "LAUNCH_ID"  # environment variable by which a launcher identifies the workers that it restarts
PACKAGES = ("tensorflow", "keras", "keras-hub", "tokenizers", "numpy")  # their versions may change what is computed


class Run:
    """A run that `open_run` has opened. At the end of its `with`, another process may open it.

    It keeps its files in `folder`; `results` is the content of `results.json`, None while the run is not complete.
    """

    def __init__(self, folder: Path, saved: dict[str, Any], lock: TextIO | None = None):
        self.folder, self._saved, self._lock = folder, saved, lock
        self.results = read_json(folder / "results.json")

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Records and returns what `make` returns, which JSON must hold; a resumed run, what its start recorded."""
        if name not in self._saved["kept"]:
            self._saved["kept"][name] = make()
            if self._lock:
                write_json(self.folder / "config.json", self._saved)
        return self._saved["kept"][name]

    def begin_with(self, name: str, value: Any) -> None:
        """Raises a `UserError` on all workers unless they have the same value, and a resumed run that of its start."""
        agree({name: value}, f"has another {name} than the chief")
        if self.keep(name, lambda: value) != value:
            raise UserError(f"{self.folder} holds a run with another {name}. Give another folder, or overwrite it")

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Writes `results.json`, which makes the run complete, and returns it; {} for workers other than the chief."""
        if not is_chief():
            return {}
        if inputs := {name: value for name, value in self._saved["options"].items() if name.startswith(INPUTS)}:
            results = results | {"inputs": inputs}
        write_json(self.folder / "results.json", results)
        return results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._lock:
            self._lock.close()


def open_run(folder: str | None, options: dict[str, Any], *, overwrite: bool = False) -> Run:
    """Starts a run in a folder, or opens the one that was started there, to be resumed; all workers call it.

    Args:
        folder: created if missing; None for a run that writes nothing, such as a dry one.
        options: of the run, which JSON must hold; they are kept in `config.json`, and must be the same to resume it.
        overwrite: whether to move a run that is there aside, with its folder, and start afresh; but not one that was
            interrupted and has the same options, nor one that the same launcher started: these are resumed.

    Raises a `UserError` on all workers, when they differ in options, packages or code, or do not share the folder; when
    it cannot be written, holds files but no run, is open in another process, or has a run with other options.
    """
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    folders = Path(keras_replicas.__file__).parent, Path(__file__).parent
    files = [*sorted(file for each in folders for file in each.rglob("*.py")), Path(sys.argv[0])]  # what workers run
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()[:12]
    agree(options | versions | {"code": code}, "was started differently from the chief")
    if folder is None:
        return Run(Path(os.devnull), {"kept": {}})
    place = Path(folder).resolve()
    run = chief_alone(lambda: _open(place, options, overwrite))
    saved = read_json(place / "config.json") or {}
    agree({"opened": saved.get("opened")}, f"does not see the chief's folder {place}: use a shared file system")
    run = run or Run(place, saved)
    if run.results and is_chief():
        print(f"The run in {folder} is complete; overwrite it to start afresh.", flush=True)
    return run


def chief_alone(work: Callable[[], Result]) -> Result | None:
    """Has the chief alone do some work, and returns its result; the other workers wait, and get None.

    A `UserError` of the chief's is raised on every worker.
    """
    result, error = None, None
    if is_chief():
        try:
            result = work()
        except UserError as refused:
            error = str(refused)
    exchange({"error": error})
    return result


def _open(folder: Path, options: dict[str, Any], overwrite: bool) -> Run:
    launch = os.environ.get(LAUNCH_ID)
    with one_line(f"cannot write to the folder {folder}", ": give another", (OSError, RuntimeError)):
        files = {path for path in folder.rglob("[!.]*") if path.is_file() and path.suffix != ".log"}
        if folder / "config.json" in files:
            check_run(folder)
        saved = read_json(folder / "config.json") or {}
        if files and not all(isinstance(saved.get(name), dict) for name in ("kept", "options")):
            raise UserError(f"{folder} holds files, but no run: give another folder")
        lock = _locked(folder)
        if files == {folder / "config.json"}:  # nothing came of it: a run with other options may begin
            saved = {}
        resumes = saved.get("options") == options and not (folder / "results.json").exists()
        if saved and overwrite and not resumes and not (launch and saved.get("launch") == launch):
            if Path.cwd().is_relative_to(folder):
                raise UserError(f"{folder} holds the current folder, and cannot be moved aside: go to another one")
            aside = folder.with_name(f"{folder.name}.old-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}")
            folder.rename(aside)
            print(f"The old run is now in {aside}; delete it when you no longer need it.", flush=True)
            lock, saved = _locked(folder), {}
            for log in aside.rglob("*.log") if launch else ():  # the launcher is writing them
                (folder / log.relative_to(aside)).parent.mkdir(parents=True, exist_ok=True)
                log.rename(folder / log.relative_to(aside))
        known = saved.get("options", options)
        if different := [name for name in known | options if known.get(name) != options.get(name)]:
            shown = ", ".join(f"{name} {known.get(name)!r}, not {options.get(name)!r}" for name in different[:9])
            raise UserError(f"{folder} holds a run with other options: {shown}. Give another folder, or overwrite it")
        saved = {"options": options, "launch": launch, "opened": uuid.uuid4().hex, "kept": saved.get("kept", {})}
        write_json(folder / "config.json", saved)
        return Run(folder, saved, lock)


def _locked(folder: Path) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is running in {folder}: wait for it, or give another folder") from None
    return lock
