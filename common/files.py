# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files."""

import json
import math
import os
import re
import uuid
from pathlib import Path
from typing import Any

# Suffix of a file that is being written: unique to this process, and unlike any other program's.
UNFINISHED = f".{uuid.uuid4().hex[:12]}.unfinished"


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file, or it is empty, truncated or not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Any) -> None:
    """Writes atomically: a reader never finds half a file, not even after a power cut.

    NaN and infinity are written as null.
    """
    write_whole(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a text as `write_json` does."""
    unfinished = path.with_name(path.name + UNFINISHED)
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


def remove_unfinished(folder: Path) -> None:
    """Removes the unfinished files of killed processes. Call it where no other process may write."""
    for path in folder.glob("*.unfinished"):
        if re.fullmatch(r".+\.[0-9a-f]{12}\.unfinished", path.name) and path.is_file():
            path.unlink()


def finite(content: Any) -> Any:
    """The same with None for NaN and infinity, which JSON lacks."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
