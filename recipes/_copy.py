# SPDX-License-Identifier: Apache-2.0
"""`cp`: copies a recipe, the modules of `common` that it reaches, and a test. The copy depends on the library."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

from keras_replicas import UserError
from recipes._names import ROOT, recipe_path

TEST = ROOT / "recipes/_copied_test.py"


def copy_recipe(name: str, folder: Path, vendor: bool) -> None:
    """Copies a recipe, and prints the files and how to run them.

    Args:
        name: the recipe's.
        folder: created if missing. Other recipes may have been copied there, which share their helpers.
        vendor: copies the library too.

    Raises:
        UserError: when there is no such recipe, another file is in the way, or nothing can be written there.
    """
    files = {folder / path: content for path, content in contents(name, vendor).items()}
    try:
        if (obstacle := in_the_way(files)) is not None:
            raise UserError(f"{obstacle} is in the way: move it, or copy to another folder")
        for path, content in files.items():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot copy to {folder}: {error}") from None
    print(*files, sep="\n")
    print(f"\nIn {folder}:\n  pip install -r requirements.txt\n  python {name}.py\n  python test_{name}.py")


def contents(name: str, vendor: bool) -> dict[str, bytes]:
    """What a copy holds, by path with / between its parts; see `copy_recipe`."""
    recipe = recipe_path(name)
    sources = [ROOT / "common/__init__.py", *sorted(modules_used(recipe))]
    if vendor:
        library = sorted((ROOT / "keras_replicas").rglob("*"))
        sources += [path for path in library if path.is_file() and "__pycache__" not in path.parts]
    files = {f"{name}.py": recipe.read_bytes()}
    files[f"test_{name}.py"] = TEST.read_bytes().replace(b"recipes.bert_mlm", name.encode())
    files |= {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sources}
    files["common/LICENSE"] = (ROOT / "LICENSE").read_bytes()  # with the code: a project has its own licence
    files["requirements.txt"] = "".join(f"{line}\n" for line in requirements(vendor)).encode()
    return files


def in_the_way(files: Mapping[Path, bytes]) -> Path | None:
    """The first path that holds something else than the file to be written there, or than a folder for it."""
    for path, content in files.items():
        for parent in reversed(path.parents):
            if os.path.lexists(parent) and not parent.is_dir():
                return parent
        if os.path.lexists(path) and not (path.is_file() and path.read_bytes() == content):
            return path
    return None


def modules_used(path: Path) -> set[Path]:
    """The files of `common` that a file imports, directly or through another of them."""
    used: set[Path] = set()
    unread = [path]
    while unread:
        for name in imports(unread.pop()):
            module = ROOT / (name.replace(".", "/") + ".py")
            if name.startswith("common.") and module.is_file() and module not in used:
                used.add(module)
                unread.append(module)
    return used


def imports(path: Path) -> set[str]:
    """What a file imports, anywhere in it: modules, and what it takes from them, as in `common.files.flush`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def requirements(vendor: bool) -> list[str]:
    """What a copy needs, for pip: the library from this clone's remote, or from this folder; or all packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if vendor:
        return [*project["dependencies"], *project["optional-dependencies"]["recipes"]]
    ours = _git("ls-files", "recipes/_copy.py")  # and not a repository that this folder only lies in
    remote = _git("remote", "get-url", "origin") if ours else ""
    address = f"git+{pip_address(remote)}@{_git('rev-parse', 'HEAD')}" if remote else ROOT.resolve().as_uri()
    return [f"{project['name']}[recipes] @ {address}"]


def pip_address(remote: str) -> str:
    """A remote as pip takes it after `git+`, without what follows a `?`, and over https without user and password."""
    if found := re.fullmatch(r"(https?://)(?:[^/]*@)?([^?]+).*", remote):
        return found[1] + found[2]
    remote = remote.removeprefix("file://")
    if "://" in remote:
        return remote
    if found := re.fullmatch(r"([\w.@-]+):/?(.+)", remote):  # git's short form of ssh
        return f"ssh://{found[1]}/{found[2]}"
    path = (ROOT / remote).resolve().as_uri()
    return path.replace("file://", "file://localhost")  # some versions of pip take no address without a host


def _git(*words: str) -> str:
    """What git says of this clone; nothing where it fails, or is not installed."""
    if not shutil.which("git"):
        return ""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()
