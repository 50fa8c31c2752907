# SPDX-License-Identifier: Apache-2.0
"""`cp`: copies a page, the modules of `common` that it reaches, and a test. The library is a package that it needs."""

import json
import keyword
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import packages_distributions
from modulefinder import ModuleFinder
from pathlib import Path

from keras_replicas import UserError
from recipes._names import ROOT, recipe_path

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def copy_recipe(name: str, folder: str, vendor: bool = False, helpers: str = "common") -> None:
    """Copies a recipe, with `vendor` the library too, and prints how to run it; `common` is called `helpers` there.

    Raises a `UserError` when a name is wrong, another file is in the way, or nothing can be written.
    """
    taken = {"keras_replicas", *keyword.kwlist, *sys.stdlib_module_names, *packages_distributions()} - {"common"}
    if not helpers.isidentifier() or helpers in taken | {name, f"test_{name}"}:
        raise UserError(f"--as {helpers}: give a name that Python can import, and that no other module has")
    if not folder:  # such as an unset variable; it would be the current folder
        raise UserError("give the name of a folder, such as my_project")
    files = {Path(folder, path): content for path, content in contents(name, vendor, helpers).items()}
    try:
        for path, content in files.items():
            parents = [parent for parent in path.parents if os.path.lexists(parent) and not parent.is_dir()]
            if parents or (os.path.lexists(path) and not (path.is_file() and path.read_bytes() == content)):
                raise UserError(f"{[path, *parents][-1]} is in the way: move it, or copy to another folder")
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot copy to {folder}: {error}") from None
    print(*files, f"\nIn {folder}:\n  pip install -r requirements.txt\n  python {name}.py", sep="\n")
    print(f"  python test_{name}.py\nor, in an environment of its own: uv run {name}.py")


def contents(name: str, vendor: bool, helpers: str) -> dict[str, bytes]:
    """What a copy holds, by path with / between its parts; arguments as for `copy_recipe`."""
    page, needs = recipe_path(name), requirements(vendor)
    files = {f"{name}.py": as_script(page, helpers, needs), "requirements.txt": "\n".join([*needs, ""]).encode()}
    test = (ROOT / "recipes/_copied_test.py").read_bytes()
    files[f"test_{name}.py"] = test.replace(b"recipes.bert_mlm", name.encode())
    files[f"{helpers}/LICENSE"] = (ROOT / "LICENSE").read_bytes()  # with the code: a project has its own licence
    for path in (ROOT / "common/__init__.py", *modules_used(page)):
        files[f"{helpers}/{path.relative_to(ROOT / 'common').as_posix()}"] = path.read_bytes()
    library = [path for path in (ROOT / "keras_replicas").rglob("*.*") if path.suffix != ".pyc"]
    for path in sorted(library) if vendor else ():
        files[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    return files


def as_script(page: Path, helpers: str, needs: list[str]) -> bytes:
    """The page with its needs in its head (PEP 723), for `uv run`; what it imports and tells of is what is there."""
    licence, text = page.read_text(encoding="utf-8").split("\n", maxsplit=1)
    text = re.sub(r"(?m)^( *(?:from|import)) common\b", rf"\1 {helpers}", text)
    text = text.replace(f"python -m recipes run {page.stem}", f"python {page.stem}.py")
    versions, packages = json.dumps(PROJECT["requires-python"]), json.dumps(needs, indent=4)
    head = f"/// script\nrequires-python = {versions}\ndependencies = {packages}\n///\n"
    return f"{licence}\n{textwrap.indent(head, '# ')}{text}".encode()


def modules_used(page: Path) -> list[Path]:
    """The modules of `common` that a page imports, anywhere in it, directly or through another of them."""
    finder = ModuleFinder([str(ROOT)], excludes=["keras_replicas"])
    finder.run_script(str(page))
    paths = [Path(file) for module in finder.modules.values() if (file := vars(module)["__file__"])]
    return sorted(path for path in paths if path != page and path.name != "__init__.py")


def requirements(vendor: bool) -> list[str]:
    """What a copy needs, for pip: the library from this clone's remote, or from this folder; or all packages."""
    if vendor:
        return [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["recipes"]]
    ours = shutil.which("git") and _git("ls-files", "recipes/_copy.py")  # not a repository that it only lies in
    remote = _git("remote", "get-url", "origin") if ours else ""
    address = f"git+{pip_address(remote)}@{_git('rev-parse', 'HEAD')}" if remote else ROOT.resolve().as_uri()
    return [f"{PROJECT['name']}[recipes] @ {address}"]


def pip_address(remote: str) -> str:
    """A remote as pip takes it after `git+`, without what follows a `?`, and over https without user and password."""
    remote = re.sub(r"^(https?://)(?:[^/]*@)?([^?]+).*", r"\1\2", remote.removeprefix("file://"))
    remote = re.sub(r"^([\w.@-]+):/?(?!/)", r"ssh://\1/", remote)  # git's short form of ssh
    local = "file://localhost" + (ROOT / remote).resolve().as_uri().removeprefix("file://")  # pip may ask for a host
    return remote if "://" in remote else local


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()
