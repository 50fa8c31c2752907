# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole or not at all."""

import json
import math
import os
import re
import uuid
from pathlib import Path
from typing import Any

# What a file that is being written has behind its name: of this process alone, and like no other program's.
UNFINISHED = f".{uuid.uuid4().hex[:12]}.unfinished"


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no such file, or it is empty, cut short or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_json(path: Path, content: Any) -> None:
    """Writes whole or not at all: a reader never finds half a file, not after a power cut either.

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
    """Removes the files that killed processes were writing there. Call it where no other process may write."""
    for path in folder.glob("*.unfinished"):
        if re.fullmatch(r".+\.[0-9a-f]{12}\.unfinished", path.name) and path.is_file():
            path.unlink()


def finite(content: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not have."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
