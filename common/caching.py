# SPDX-License-Identifier: Apache-2.0
"""Results that are slow to compute and depend only on their inputs, cached as files in the user's cache folder."""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from common.files import flush

READ_AT_ONCE = 2**22  # bytes


def cached_file(name: str, inputs: Iterable[bytes | str], make: Callable[[Path], None]) -> Path:
    """The file that `make` writes for these inputs, made only when it is missing or damaged.

    Args:
        name: the file's name; a hash of the inputs and the CRC-32 of its content are put before it.
        inputs: everything that the file's content depends on.
        make: writes the file to the path it is given, which is renamed into place when complete, so that a file in the
            cache is complete, whatever was interrupted. It must not ask for a cached file itself.

    Returns:
        A path in `$XDG_CACHE_HOME/keras-data-parallel-recipes` (by default under `~/.cache`); where that cannot be
        written, in a folder that is deleted at the process's exit.

    Raises:
        OSError: when the disk is full.
    """
    digest = hashlib.sha256()
    for piece in inputs:
        piece = piece.encode() if isinstance(piece, str) else piece
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
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
        path = folder / f"{key}-{_crc32(unfinished):08x}-{name}"
        os.replace(unfinished, path)
        return path


def _find(folder: Path, key: str, name: str) -> Path | None:
    """The file, if it exists and its content matches the checksum in its name."""
    for path in folder.glob(f"{key}-????????-{name}"):
        with contextlib.suppress(OSError):  # it cannot be read, or was just removed
            if path.name == f"{key}-{_crc32(path):08x}-{name}":
                return path
    return None


def _crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while part := file.read(READ_AT_ONCE):
            crc32 = zlib.crc32(part, crc32)
    return crc32


def _users_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keras-data-parallel-recipes"
    except RuntimeError:  # a user without a home
        return _temporary_folder()


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[Path]:
    """The cache's folder, where one process writes at a time, or one of this process alone."""
    with contextlib.ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((cache / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of a machine want the same files: one makes, the others wait
        except OSError:  # it must not be written, or its file system has no locks
            yield _temporary_folder()
        else:
            yield cache


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="recipes-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
