# SPDX-License-Identifier: Apache-2.0
"""`cp`: copies recipes with exactly the helpers they use, and brings the collection's later changes into a copy.

A copy's manifest holds every file as it was copied: the base of a three-way merge between the user's changes and the
collection's. The base is in the manifest, compressed, rather than in git's history, which a package or a shallow clone
lacks and a rebase drops; and in one file, which is replaced as a whole, so that base and hashes agree.
"""

import base64
import hashlib
import keyword
import os
import shutil
import sys
import sysconfig
import unicodedata
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from common.files import UNFINISHED, flush, read_json, remove_unfinished, write_json
from keras_replicas import UserError
from recipes._contents import FRAGMENT, REQUIREMENTS, ROOT, contents, imports, project, recipe_path, recipes
from recipes._merge import MARKER, Changes, Copied, compare, describe, difference, in_the_way, read, where

MANIFEST = "recipes-manifest.json"
FORMAT = 1  # of the manifest
# The collection's own folders, which a copy in them would damage.
FOLDERS = (".ci", ".git", "benchmarks", "common", "docs", "guides", "notebooks", "recipes", "tests")


def copy_recipe(name: str, folder: Path, package: str | None) -> int:
    """Copies a recipe, the helpers it uses, a test, the licence, and a list of the packages needed; prints the files.

    Args:
        name: the recipe's.
        folder: the project's; other recipes may have been copied there.
        package: the package that the copy goes into, such as `my.train`; None for that of the recipes there, if any.

    Returns:
        The exit status: 1 if the list of packages is left with a conflict.

    Raises:
        UserError: when there is a copy of the recipe, or an older copy of another; when the user has renamed a helper
            that the recipe uses; when a file is in the way, nothing can be written there, or the folder or the package
            is unsuitable.
    """
    recipe_path(name)
    if package is not None:
        _check_package(package, folder)
    for place in (folder, folder.joinpath(*(package or "").split("."))):
        real, root = place.resolve(), ROOT.resolve()
        if real.is_relative_to(root) and (real.relative_to(root).parts or FOLDERS)[0] in FOLDERS:
            raise UserError(f"{place} is this collection itself: copy to a folder of your own")
    there = read_manifest(folder) if (folder / MANIFEST).is_file() else Copied(package or "")
    if package not in (None, there.package):
        raise UserError(f"the copies in {folder} are in {there.package or 'no package'}: copy to another folder")
    if name in there.recipes:
        raise UserError(
            f"{folder} has a copy of {name}. To bring it up to date: python -m recipes cp --update {folder}"
        )
    packages = _list_of_packages(folder, there, name)
    if contents(there.recipes, there.package, packages) != there.texts:
        raise UserError(f"{folder} has copies from {there.origin}. First: python -m recipes cp --update {folder}")
    names = (*there.recipes, name)
    new = contents(names, there.package, packages)
    changes = compare(folder, there, new)
    obstacles = [path for path in new if path not in changes.texts]
    obstacles += _restore(folder, changes, contents((name,), there.package, packages).keys() & there.texts.keys())
    if not (folder / MANIFEST).is_file() and in_the_way(folder, MANIFEST):
        obstacles.append(MANIFEST)
    if obstacles:
        advice = "Move what is yours, or copy into a package: --package NAME"
        raise UserError(f"{', '.join(str(folder / path) for path in obstacles)} already exist(s). {advice}")
    _write(folder, changes, there.package, names)
    print(*(folder / path for path in changes.writes), folder / MANIFEST, *changes.unsettled, sep="\n")
    program = f"-m {there.package}.{name}" if there.package else f"{name}.py"
    print(f"\nIt needs what {folder / packages} lists. In {folder}:")
    print(f"  python {program}\n  python test_{name}.py")
    return 1 if changes.unsettled else 0


def check(folder: Path, diff: bool) -> int:
    """Prints what the user has changed in a copy, and what the collection has; with `diff`, what an update would do.

    Returns:
        The exit status: 1 if there is news from the collection.

    Raises:
        UserError: when there is no copy, or its manifest is damaged or of a newer format.
    """
    there, changes = _news(folder)
    print(f"{' '.join(there.recipes) or 'no recipe'}: copied from {there.origin}; now it is {_describe(_version())}")
    for row in (*changes.own, *changes.news):
        print(row)
    print(difference(folder, changes) if diff else "")
    print(
        f"To take the news: python -m recipes cp --update {folder}" if changes.news else "no news from the collection"
    )
    return 1 if changes.news else 0


def update(folder: Path, dry_run: bool, diff: bool) -> int:
    """Brings the collection's changes into a copy, merged with the user's, and prints them.

    Args:
        folder: that of the copy.
        dry_run: write nothing.
        diff: print what changes in the folder.

    Returns:
        The exit status: 1 if something is left for the user to settle.

    Raises:
        UserError: as `check`, and when conflicts of the last update are left, or a file cannot be written.
    """
    there, changes = _news(folder)
    places = where(folder, there).values()
    if conflicts := [place for place in places if MARKER in (read(folder, place) or b"").replace(b"\r\n", b"\n")]:
        raise UserError(
            f"resolve the conflicts of the last update first, at {MARKER.decode().strip()!r}: {' '.join(conflicts)}"
        )
    print(*(changes.news or ["no news from the collection"]), sep="\n")
    if diff:
        print(difference(folder, changes))
    if not dry_run:
        _write(folder, changes, there.package, [name for name in there.recipes if name in recipes()])
    return 1 if changes.unsettled else 0


def read_manifest(folder: Path) -> Copied:
    """What has been copied to a folder.

    Raises:
        UserError: when it has no manifest, or one that is damaged or of a newer format.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(f"there is no {path}. Give a folder that python -m recipes cp NAME DEST has copied a recipe to")
    manifest = read_json(path) or {}
    if manifest.get("format", FORMAT) != FORMAT:
        raise UserError(f"{path} is of a newer version of this collection: update the collection first")
    try:
        texts = {name: zlib.decompress(base64.b64decode(file["base"])) for name, file in manifest["files"].items()}
        hashes = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
        places = {name: file["place"] for name, file in manifest["files"].items() if "place" in file}
        if hashes != {name: file["sha256"] for name, file in manifest["files"].items()}:
            raise ValueError("a wrong hash")
        package, names = manifest["package"], manifest["recipes"]
        if not all(_is_inside(path) for path in [*texts, *places.values()]):
            raise ValueError("a path that is none in the folder")
        if any(str(parent) in texts for path in texts for parent in PurePosixPath(path).parents):
            raise ValueError("a file in a file")
        if package and not _is_package(package):
            raise ValueError("not a package")
        paths = {f"{package.replace('.', '/')}/{name}.py".lstrip("/") for name in names if name.isidentifier()}
        if not isinstance(names, list) or len(paths & texts.keys()) != len(names) or bool(names) != bool(texts):
            raise ValueError("recipes and files that do not go together")
        origin = _describe(manifest)
        origin.encode()  # a ValueError for what cannot be printed
        return Copied(package, tuple(names), texts, places, origin)
    except (KeyError, TypeError, AttributeError, ValueError, zlib.error):
        raise UserError(f"{path} is damaged: restore it, as from your version control") from None


def _is_inside(path: str) -> bool:
    """Whether a path is that of a file in the folder, as this program writes it."""
    parts = PurePosixPath(path)
    os.fsencode(path)  # a ValueError for what cannot be a name
    plain = str(parts) == path != "." and "\0" not in path
    return plain and not parts.is_absolute() and ".." not in parts.parts


def _restore(folder: Path, changes: Changes, needed: Collection[str]) -> list[str]:
    """Adds to `changes` the files that the user has deleted and the new recipe needs, to be written again.

    Returns:
        The paths where something is in the way.

    Raises:
        UserError: when the user has renamed something that the recipe needs, and so would not find.
    """
    places = {path: changes.places.get(path, path) for path in sorted(needed)}
    deleted = [path for path, place in places.items() if read(folder, place) is None]
    if renamed := [f"{path} -> {place}" for path, place in places.items() if path != place and path not in deleted]:
        raise UserError(
            f"the recipe needs what you have renamed: {', '.join(renamed)}. Rename it back, or copy to another folder"
        )
    for path in deleted:
        changes.writes[path] = changes.texts[path]
        changes.places.pop(path, None)
    return [path for path in deleted if in_the_way(folder, path)]


def _news(folder: Path) -> tuple[Copied, Changes]:
    there = read_manifest(folder)
    names = [name for name in there.recipes if name in recipes()]
    new = contents(names, there.package, _list_of_packages(folder, there))
    # If a recipe is gone from the collection, what only it used stays with its copy.
    return there, compare(folder, there, new, keep=len(names) < len(there.recipes))


def _write(folder: Path, changes: Changes, package: str, names: Iterable[str]) -> None:
    """Removes nothing before all is written, and writes the manifest last: if interrupted, it can be done again."""
    files = {
        path: {"sha256": hashlib.sha256(text).hexdigest(), "base": base64.b64encode(zlib.compress(text, 9)).decode()}
        | ({"place": changes.places[path]} if path in changes.places else {})
        for path, text in sorted(changes.texts.items())
    }
    about = "Written by `python -m recipes cp`, which needs it to bring later changes of the recipes into this copy."
    manifest = {"about": about, "format": FORMAT} | _version() | {"package": package, "recipes": list(names)}
    try:
        for parent in {folder} | {(folder / path).parent for path in changes.texts}:
            remove_unfinished(parent)  # of an interrupted update
        for path, text in changes.writes.items():
            _write_whole(folder / path, text)
        for path in changes.removes:
            (folder / path).unlink()
        write_json(folder / MANIFEST, manifest | {"files": files})
    except OSError as error:
        raise UserError(f"cannot copy to {folder}: {error}") from None


def _write_whole(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve()  # so that a link stays one
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.write_bytes(text)
    if path.exists():
        shutil.copymode(path, unfinished)
    flush(unfinished)
    unfinished.replace(path)


def _list_of_packages(folder: Path, there: Copied, name: str | None = None) -> str:
    """The file that lists the packages needed: not a `requirements.txt` if there is another, or a `pyproject.toml`."""
    if there.texts:
        return FRAGMENT if FRAGMENT in there.texts else REQUIREMENTS
    ours = contents((name,), "", REQUIREMENTS)[REQUIREMENTS] if name else None  # there after an interrupted copy
    theirs = (folder / REQUIREMENTS).exists() and read(folder, REQUIREMENTS) != ours
    return FRAGMENT if theirs or (folder / "pyproject.toml").exists() else REQUIREMENTS


def _is_package(name: str) -> bool:
    # Python looks for a name's normal form, which on the disk is another name.
    return unicodedata.normalize("NFKC", name) == name and all(
        part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")
    )


def _check_package(package: str, folder: Path) -> None:
    parts = package.split(".")
    if not _is_package(package):
        raise UserError(f"--package {package!r} is not the name of a package; give one such as my.train")
    installed = {
        name.split(".")[0] for path in [*recipes().values(), *ROOT.glob("common/*/*.py")] for name in imports(path)
    }
    installed |= {path.name.split(".")[0] for path in Path(sysconfig.get_path("purelib")).iterdir()}
    if parts[0] in (installed - {"common"}) | sys.stdlib_module_names | {"test"}:  # `test` is Python's too
        raise UserError(f"--package {package} would hide the package {parts[0]} that Python imports; give another name")
    if parts[0] in {f"test_{name}" for name in recipes()}:
        raise UserError(f"--package {package} would be hidden by {folder / parts[0]}.py; give another name")
    for end in range(1, len(parts) + 1):
        if (module := folder.joinpath(*parts[:end]).with_suffix(".py")).exists():
            raise UserError(f"--package {package} would hide {module}; give another name")


def _version() -> dict[str, Any]:
    return {"version": project()["version"]} | describe(ROOT, ("recipes", "common", "pyproject.toml", "LICENSE"))


def _describe(version: Mapping[str, Any]) -> str:
    commit = (
        f" ({version['commit'][:7]}{', with changes not committed' * version['dirty']})" if version["commit"] else ""
    )
    return f"version {version['version']}{commit}"
