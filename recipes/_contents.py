# SPDX-License-Identifier: Apache-2.0
"""What a copy of recipes holds: exactly the helpers they use, a test of each, and a list of the packages needed."""

import ast
import functools
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from keras_replicas import UserError

ROOT = Path(__file__).parent.parent
TEST = ROOT / "recipes/_copied_test.py"
REQUIREMENTS, FRAGMENT = "requirements.txt", "pyproject.fragment.toml"
Files = dict[str, bytes]  # contents by path, with / between its parts, relative to the project's folder


def recipes() -> dict[str, Path]:
    """The recipes' files by name."""
    return {path.stem: path for path in sorted((ROOT / "recipes").glob("[a-z]*.py"))}


def recipe_path(name: str | None) -> Path:
    """A recipe's file.

    Raises:
        UserError: when no name is given, or no recipe has it.
    """
    known = recipes()
    if name is None:
        raise UserError(f"give the name of a recipe first, one of: {' '.join(known)}")
    if name not in known:
        raise UserError(f"there is no recipe {name}. Choose one of: {' '.join(known)}")
    return known[name]


def contents(names: Iterable[str], package: str, packages: str) -> Files:
    """The files of a copy, from the collection as it is now.

    Args:
        names: of recipes.
        package: the one that the copy goes into; empty for none.
        packages: the file that lists the packages needed, `REQUIREMENTS` or `FRAGMENT`.

    Returns:
        Contents by path in the project, none for no recipes. The recipes and `common` are in the package's folder;
        their tests and the list of packages are in the project's, from which `python` finds the package.
    """
    prefix, inside = (f"{package.replace('.', '/')}/", f"{package}.") if package else ("", "")
    modules = {"common": f"{inside}common", "keras_replicas": f"{inside}keras_replicas"}
    files: Files = {}
    used: set[Path] = set()
    for name in names:
        recipe = recipe_path(name)
        used |= {recipe} | modules_used(recipe) | modules_used(TEST)
        files[f"{prefix}{name}.py"] = with_modules(recipe.read_bytes(), modules)
        files[f"test_{name}.py"] = with_modules(TEST.read_bytes(), modules | {"recipes.bert_mlm": f"{inside}{name}"})
    if not used:
        return {}
    for path in sorted(
        {ROOT / "common/__init__.py", ROOT / "keras_replicas/__init__.py"}
        | {path for path in used if path.parent != ROOT / "recipes"}
    ):
        files[f"{prefix}{path.relative_to(ROOT).as_posix()}"] = with_modules(path.read_bytes(), modules)
    files[f"{prefix}common/LICENSE"] = (ROOT / "LICENSE").read_bytes()  # with the code: a project has its own licence
    requirements = packages_used(used)
    if packages == FRAGMENT:
        needed = "".join(f'    "{package}",\n' for package in requirements)
        requires = f'requires-python = "{project()["requires-python"]}"\ndependencies = [\n{needed}]\n'
        files[FRAGMENT] = (
            f"# What the copied recipes need: add it to your pyproject.toml.\n[project]\n{requires}".encode()
        )
    else:
        files[REQUIREMENTS] = "".join(f"{package}\n" for package in requirements).encode()
    return files


def modules_used(path: Path) -> set[Path]:
    """The files of `common` that a file imports, directly or through another of them."""
    used: set[Path] = set()
    unread = [path]
    while unread:
        for name in imports(unread.pop()):
            module = ROOT / (name.replace(".", "/") + ".py")
            if name.startswith(("common.", "keras_replicas.")) and module.is_file() and module not in used:
                used.add(module)
                unread.append(module)
    return used


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """What a file imports, anywhere in it: modules, and what it takes from them, as in `common.files.flush`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(names)


def packages_used(paths: Iterable[Path]) -> list[str]:
    """The packages that this project requires and the files import, with their versions."""
    names = {name.split(".")[0] for path in paths for name in imports(path)}
    names |= {"tensorboard"}  # its command shows what a run writes
    names |= {"keras_nlp"} if "keras_hub" in names else set()  # the package of the latter installs the former
    packages = project()["dependencies"]
    return [package for package in packages if re.split("[^a-z0-9-]", package)[0].replace("-", "_") in names]


def with_modules(source: bytes, modules: Mapping[str, str]) -> bytes:
    """A program with modules renamed where it imports them, and nothing else changed: no string, no comment, no space.

    Args:
        source: in UTF-8.
        modules: new names by old ones; what is inside a package is renamed with it.
    """

    def renamed(name: str) -> str:
        for old, new in modules.items():
            if name == old or name.startswith(f"{old}."):
                return new + name[len(old) :]
        return name

    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    found: list[tuple[int, str]] = []  # offsets in bytes, as the syntax tree counts, and the names there
    bound: set[str] = set()  # `import common.files` binds `common`, and the program says `common.files` again
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            start = starts[node.lineno - 1] + node.col_offset + len("from")
            found.append((source.index(node.module.encode(), start), node.module))
        if isinstance(node, ast.Import):
            found += [(starts[alias.lineno - 1] + alias.col_offset, alias.name) for alias in node.names]
            bound |= {alias.name.split(".")[0] for alias in node.names if not alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in bound:
            found.append((starts[node.lineno - 1] + node.col_offset, node.id))
    for start, name in sorted(found, reverse=True):
        source = source[:start] + renamed(name).encode() + source[start + len(name.encode()) :]
    return source


def project() -> dict[str, Any]:
    """What `pyproject.toml` says of this project."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
