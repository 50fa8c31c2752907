# SPDX-License-Identifier: Apache-2.0
"""The recipes by name: each file of this folder whose name begins with a letter is one."""

from pathlib import Path

from keras_replicas import UserError

ROOT = Path(__file__).parent.parent


def recipes() -> dict[str, Path]:
    """The recipes' files by name."""
    return {path.stem: path for path in sorted((ROOT / "recipes").glob("[a-z]*.py"))}


def recipe_path(name: str | None) -> Path:
    """A recipe's file; a `UserError` when no name is given, or no recipe has it."""
    known = recipes()
    if name is None:
        raise UserError(f"give the name of a recipe first, one of: {' '.join(known)}")
    if name not in known:
        raise UserError(f"there is no recipe {name}. Choose one of: {' '.join(known)}")
    return known[name]
