# SPDX-License-Identifier: Apache-2.0
"""Results that are slow to make and depend only on their inputs, kept as files under the user's cache folder."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def cached_file(name: str, inputs: Iterable[bytes | str], make: Callable[[Path], None]) -> Path:
    """The file that `make` writes for these inputs, made only when it is not there yet.

    Args:
        name: the file's name; a hash of the inputs is put before it.
        inputs: everything that the file's content depends on.
        make: writes the file to the path it is given, which is renamed into place when complete, so that a file in the
            cache is whole, whatever was interrupted. It must not ask for a cached file itself.

    Returns:
        A path in `$XDG_CACHE_HOME/keras-data-parallel-recipes` (by default under `~/.cache`).
    """
    digest = hashlib.sha256()
    for piece in inputs:
        piece = piece.encode() if isinstance(piece, str) else piece
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keras-data-parallel-recipes"
    path = folder / f"{digest.hexdigest()[:20]}-{name}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of a machine want the same files: one makes, the others wait
            if not path.exists():
                make(folder / "unfinished")
                os.replace(folder / "unfinished", path)
    return path
