# SPDX-License-Identifier: Apache-2.0
"""JSON files, written so that no kill leaves half of one."""

import json
import math
import os
from pathlib import Path
from typing import Any


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
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or the new name could be on the disk before the text
    os.replace(unfinished, path)


def finite(content: Any) -> Any:
    """The content with None for NaN and infinity, which JSON lacks."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
