# SPDX-License-Identifier: Apache-2.0
"""Merges what a user and the collection have each changed in a copy, with git's own tools.

Nothing of the user's is lost: what is edited is merged, what is deleted stays deleted, what is renamed keeps its name,
and a file that the collection never wrote is never written to.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_replicas import UserError
from recipes._contents import Files

MARKER = b"<<<<<<< yours\n"


@dataclass(frozen=True)
class Copied:
    """What has been copied to a folder."""

    package: str = ""  # the one that the copy is in; empty: none
    recipes: tuple[str, ...] = ()
    texts: Files = field(default_factory=dict)  # as copied
    places: dict[str, str] = field(default_factory=dict)  # where files are that the user has renamed, by path
    origin: str = ""  # the version copied, in words


@dataclass
class Changes:
    """What the user has changed, what the collection has, and what an update does with it."""

    own: list[str] = field(default_factory=list)  # a line for each file copied
    news: list[str] = field(default_factory=list)  # a line for each that the collection has changed
    unsettled: list[str] = field(default_factory=list)  # lines of `news` that the user has to look at
    writes: Files = field(default_factory=dict)
    removes: list[str] = field(default_factory=list)
    texts: Files = field(default_factory=dict)  # of the new manifest, like `places`
    places: dict[str, str] = field(default_factory=dict)

    def tell(self, word: str, what: str, unsettled: bool = False) -> None:
        """Adds a line to `news`."""
        self.news.append(line(word, what))
        self.unsettled += self.news[-1:] * unsettled


def line(word: str, what: str) -> str:
    """A row of the two columns that are printed, where a name that is not UTF-8 is escaped."""
    return f"{word:10} {os.fsencode(what).decode(errors='backslashreplace')}"


def compare(folder: Path, there: Copied, new: Files, keep: bool = False) -> Changes:
    """Compares a copy with what the collection would copy now. It writes nothing.

    Args:
        folder: that of the project.
        there: what has been copied to it.
        new: what the collection would copy now.
        keep: leave what the collection has removed.
    """
    base, changes = there.texts, Changes()
    places = where(folder, there)
    mine = {path: read(folder, place) for path, place in places.items()}
    lost = {path: base[path] for path, text in mine.items() if text is None}
    beside = {file for path in base for file in (folder / path).parent.glob("*.py")} if lost else set()
    strange = {file.relative_to(folder).as_posix() for file in beside} - set(places.values())
    found = {place: text for place in strange if (text := read(folder, place)) is not None}
    for path, place in _renames(lost, found).items():
        places[path], mine[path] = place, found[place]
    crlf = {path for path, text in mine.items() if text and as_lf(text) != text and b"\r" not in base[path]}
    mine |= {path: as_lf(mine[path] or b"") for path in crlf}
    moves = _renames(_without(base, new), _without(new, base))
    before = {path: path for path in base if path in new} | {path: old for old, path in moves.items()}

    for path, text in base.items():
        if mine[path] is None:
            changes.own.append(line("deleted", path))
        elif places[path] != path:
            changes.own.append(line("renamed", f"{path} -> {places[path]}{', edited' * (mine[path] != text)}"))
        else:
            changes.own.append(line("as copied" if mine[path] == text else "edited", path))
    for path, text in new.items():
        if path in before:
            old = before[path]
            _bring(folder, changes, (old, base[old]), (places[old], mine[old]), (path, text))
        elif in_the_way(folder, path, (text,)):
            changes.tell("added", f"{path}: a file of yours is in the way; move it, then update again", unsettled=True)
        else:
            changes.tell("added", path)
            changes.texts[path] = text
            if read(folder, path) is None:
                changes.writes[path] = text
    for path, old in before.items():
        if old in crlf and (place := changes.places.get(path, path)) in changes.writes:
            changes.writes[place] = changes.writes[place].replace(b"\n", b"\r\n")
    for path in _without(_without(base, new), moves):
        if mine[path] is None:
            changes.tell("removed", f"{path}: as you did")
        elif keep or places[path] != path or mine[path] != base[path]:
            changes.tell("removed", f"{path}: {places[path]} stays, as a file of your own", unsettled=True)
        else:
            changes.tell("removed", path)
            changes.removes.append(path)
    return changes


def where(folder: Path, there: Copied) -> dict[str, str]:
    """The places of what has been copied, by path."""
    taken, places = set(there.places.values()), {}
    for path in there.texts:
        place = there.places.get(path, path)
        renamed_back = place != path and path not in taken and read(folder, place) is None
        places[path] = path if renamed_back and read(folder, path) is not None else place
    return places


def _bring(
    folder: Path, changes: Changes, base: tuple[str, bytes], mine: tuple[str, bytes | None], new: tuple[str, bytes]
) -> None:
    """Decides about a file of both copy and collection; `base`, `mine` and `new` are each its path and content."""
    (old, was), (place, text), (path, now) = base, mine, new
    target = path if place == old else place
    binary = b"\0" in (text or b"") and text not in (was, now) and was != now  # to git, like any text in UTF-16
    merged, conflicts = (text, False) if text is None or binary else _merge(text, was, now)
    what = path if path == old else f"{old} -> {path}"
    word = "changed" if path == old else "moved"
    problem = f"{place} is not UTF-8, and cannot be merged; save it as that" if binary else ""
    if not binary and target != place and in_the_way(folder, target, (now, merged)):
        problem = "a file of yours is in the way; move it"
    if problem:
        changes.tell(word, f"{what}: {problem}, then update again", unsettled=True)
        changes.texts[old] = was  # as if the collection had not changed it yet
        if place != old:
            changes.places[old] = place
        return
    changes.texts[path] = now
    if target != path:
        changes.places[path] = target
    if (path, now) != (old, was):
        here = f" ({target})" if target != path else ""
        if conflicts:
            changes.tell(
                word, f"{what}{here}: CONFLICT with your edits, at {MARKER.decode().strip()!r}", unsettled=True
            )
        elif text is None:
            changes.tell(word, f"{what}: yours is deleted, and stays so")
        elif text != was and now != was:
            changes.tell(word, f"{what}{here}: {'as you did' if text == now else 'merged with your edits'}")
        else:
            changes.tell(word, f"{what}{here}")
    if merged is not None and (merged, target) != (text, place):
        changes.writes[target] = merged
    if text is not None and target != place:
        changes.removes.append(place)


def read(folder: Path, path: str) -> bytes | None:
    """A file's content; None if there is no such file. Raises a `UserError` if it cannot be read."""
    try:
        return (folder / path).read_bytes() if (folder / path).is_file() else None
    except OSError as error:
        raise UserError(f"cannot read {folder / path}: {error.strerror}") from None


def as_lf(text: bytes) -> bytes:
    """A text that has CRLF throughout, as in a checkout on Windows, with LF instead; any other text unchanged."""
    ends = text.count(b"\r\n")
    return text.replace(b"\r\n", b"\n") if ends == text.count(b"\r") == text.count(b"\n") else text


def difference(folder: Path, changes: Changes) -> str:
    """What an update would change in the folder, as a unified diff; empty for nothing."""
    paths = {*changes.writes, *changes.removes}
    before = {path: text for path in sorted(paths) if (text := read(folder, path)) is not None}
    patch = _compare_trees(before, changes.writes, "-p", "-M").decode(errors="replace")
    return re.sub("^(rename (?:from|to) )[ab]/", r"\1", patch, flags=re.MULTILINE)  # as in a patch of a repository


def describe(folder: Path, paths: Sequence[str]) -> dict[str, Any]:
    """The `commit` of a git clone, None if the folder is not one, and whether the paths in it are `dirty`."""
    nothing = {"commit": None, "dirty": False}
    try:
        found = _git("rev-parse", "--show-toplevel", "HEAD", folder=folder)
    except UserError:  # there is no git
        return nothing
    top, _, commit = found.stdout.decode().strip().partition("\n")
    if found.returncode or Path(top).resolve() != folder.resolve():  # another project's clone, with this one in it
        return nothing
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--", *paths, folder=folder).stdout)}


def _without(files: Files, others: Files | dict[str, str]) -> Files:
    return {path: text for path, text in files.items() if path not in others}


def in_the_way(folder: Path, path: str, allowed: Sequence[bytes | None] = ()) -> bool:
    """Whether there is something that writing a file would destroy, or that prevents it; a broken link counts."""
    for parent in list(Path(path).parents)[:-1]:
        if os.path.lexists(folder / parent) and not (folder / parent).is_dir():
            return True
    text = read(folder, path)
    return os.path.lexists(folder / path) and (text is None or not {text, as_lf(text)} & {*allowed})


def _merge(mine: bytes, base: bytes, new: bytes) -> tuple[bytes, bool]:
    """A text with both changes made, and whether they conflict."""
    if mine in (base, new) or base == new:
        return (mine if base == new else new), False
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("mine", mine), ("base", base), ("new", new)):
            Path(folder, name).write_bytes(text)
        labels = ("-L", "yours", "-L", "as copied", "-L", "the collection's")
        done = _git("merge-file", "-p", *labels, "mine", "base", "new", folder=Path(folder))
    if done.returncode > 127:  # up to that, it is the number of conflicts
        raise UserError(f"git merge-file failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout, done.returncode > 0


def _renames(old: Files, new: Files) -> dict[str, str]:
    """The paths of new files that git takes for old ones, by the old paths."""
    if not old or not new:
        return {}
    names = _compare_trees(old, new, "--name-status", "-z", "-M", "--diff-filter=R")
    words = os.fsdecode(names).split("\0")
    return {a.removeprefix("a/"): b.removeprefix("b/") for a, b in zip(words[1::3], words[2::3], strict=False)}


def _compare_trees(old: Files, new: Files, *options: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        for tree, files in (("a", old), ("b", new)):
            Path(folder, tree).mkdir()
            for path, text in files.items():
                Path(folder, tree, path).parent.mkdir(parents=True, exist_ok=True)
                Path(folder, tree, path).write_bytes(text)
        # Without the user's own settings, of which `diff.orderFile` may name a missing file.
        plain = ("--no-index", "--no-prefix", "--no-ext-diff", "--no-textconv", "--no-color", "-O/dev/null")
        done = _git("diff", *plain, *options, "a", "b", folder=Path(folder))
    if done.returncode > 1:  # 1: there are differences
        raise UserError(f"git diff failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _git(*words: str, folder: Path) -> "subprocess.CompletedProcess[bytes]":
    # Without that of a git hook that may be running this.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    }
    try:
        return subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True)
    except FileNotFoundError:
        raise UserError("git is not installed; changes are compared and merged with it") from None
