# SPDX-License-Identifier: Apache-2.0
"""Files: written atomically, and cached in the user's cache folder where they depend only on their inputs."""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# Suffix of a file that is being written: unique to this process, and unlike any other program's.
UNFINISHED = f".{uuid.uuid4().hex[:12]}.unfinished"
# Patterns of the files in a KerasHub preset, with a classifier's labels.
PRESET = (
    *("config.json", "metadata.json", "preprocessor.json", "task.json", "tokenizer.json", "labels.json", "assets"),
    *("model*.weights.*", "task*.weights.*"),
)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file, or it is truncated or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Any) -> None:
    """Writes JSON as `write_whole` does, with null for NaN and infinity."""
    write_whole(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes atomically: a reader never finds half a file, not even after a power cut."""
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.write_text(text, encoding="utf-8")
    flush(unfinished)  # or the new name could be on the disk before the text
    os.replace(unfinished, path)


def flush(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def remove_unfinished(folder: Path) -> None:
    """Removes the unfinished files of killed processes. Call it only while no other process can write there."""
    for path in folder.glob("*.unfinished"):
        if re.fullmatch(r".+\.[0-9a-f]{12}\.unfinished", path.name) and path.is_file():
            path.unlink()


def finite(content: Any) -> Any:
    """The content with None for NaN and infinity, which JSON lacks."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def cached_file(name: str, inputs: Iterable[bytes | str], make: Callable[[Path], None]) -> Path:
    """The file that `make` writes for these inputs, made only when it is missing or damaged.

    Args:
        name: the file's name; hashes of the inputs and of its content are put before it.
        inputs: everything that the file's content depends on.
        make: writes the file to the path it is given, which is renamed into place when complete, so that no
            interruption leaves part of a file in its place. It must not ask for a cached file itself.

    Returns:
        A path in `$XDG_CACHE_HOME/keras-data-parallel-recipes` (by default under `~/.cache`) or, if that cannot be
        written, in a folder that is deleted when the process exits.

    Raises:
        OSError: when the disk is full.
    """
    digest = hashlib.sha256()
    for piece in inputs:
        piece = piece.encode() if isinstance(piece, str) else piece
        digest.update(len(piece).to_bytes(8, "little") + piece)
    key = digest.hexdigest()[:20]
    cache = _users_folder()
    if path := _find(cache, key, name):
        return path
    with _locked(cache) as folder:
        if path := _find(folder, key, name):
            return path
        for damaged in folder.glob(f"{key}-????????-{name}"):
            damaged.unlink()
        unfinished = folder / "unfinished"
        make(unfinished)
        flush(unfinished)  # or the new name could be on the disk before the content
        path = folder / f"{key}-{_checksum(unfinished)}-{name}"
        os.replace(unfinished, path)
        return path


def _find(folder: Path, key: str, name: str) -> Path | None:
    """The file, if it exists and its content matches the checksum in its name."""
    for path in folder.glob(f"{key}-????????-{name}"):
        with contextlib.suppress(OSError):  # it cannot be read, or was just removed
            if path.name == f"{key}-{_checksum(path)}-{name}":
                return path
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:8]


def _users_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keras-data-parallel-recipes"
    except RuntimeError:  # a user without a home
        return _temporary_folder()


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[Path]:
    """The cache folder, locked so that one process writes at a time, or else a folder of this process alone."""
    with contextlib.ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((cache / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # a machine's workers want the same files: one makes them, the others wait
        except OSError:  # it is not writable, or its file system has no locks
            yield _temporary_folder()
        else:
            yield cache


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="recipes-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
