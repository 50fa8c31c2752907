# SPDX-License-Identifier: Apache-2.0
"""For the first cell of each notebook: installs the packages that are missing or have another version."""

import importlib
import importlib.metadata
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
NAME = "keras-data-parallel-recipes"
KERNEL = ("nbformat", "nbclient", "ipykernel")  # to make notebooks; a running one has its own, which Colab needs


def install_missing(wheels: str = "") -> None:
    """Installs the packages that the recipes and the notebooks need and that are missing or have another version.

    Args:
        wheels: a folder of wheels, to do without internet; empty for pip's own index.

    Raises:
        SystemExit: when pip fails, Python is too old or too new, or a package was replaced, so that the kernel may have
            imported the old one.
    """
    python, packages = needed()
    if platform.python_version() not in python:
        raise SystemExit(f"Python {platform.python_version()} does not fit: choose a kernel with Python {python}.")
    if missing := [str(package) for package in packages if not is_there(package)]:
        print("installing", *missing, sep="\n    ", flush=True)
        before = versions()
        where = ["--no-index", "--find-links", wheels] if wheels else []
        command = [sys.executable, "-m", "pip", "install", "-q", *where, *missing]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"pip could not install them:\n{done.stdout}")
        importlib.invalidate_caches()
        after = versions()
        if replaced := sorted(name for name in before if after.get(name) != before[name]):
            told = "".join(f"    {name} {before[name]} -> {after.get(name, 'removed')}\n" for name in replaced)
            raise SystemExit(
                f"Replaced:\n{told}Now restart the kernel, and run the notebook again from its first cell."
            )
    found = [f"{package.name} {importlib.metadata.version(package.name)}" for package in packages]
    print("All packages are here, in the versions that the recipes need:", ", ".join(found))


def needed() -> tuple[SpecifierSet, list[Requirement]]:
    """The versions of Python and the packages, from the clone's `pyproject.toml` or, in a wheel, its metadata."""
    if (ROOT / "pyproject.toml").exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        python, lines = project["requires-python"], project["dependencies"]
        lines = lines + project["optional-dependencies"]["notebooks"]
    else:
        installed = importlib.metadata.metadata(NAME)
        python, lines = installed["Requires-Python"], installed.get_all("Requires-Dist") or []
    packages = [package for package in map(Requirement, lines) if package.name not in KERNEL]
    wanted = [package for package in packages if not package.marker or package.marker.evaluate({"extra": "notebooks"})]
    return SpecifierSet(python), wanted


def is_there(package: Requirement) -> bool:
    """Whether a package is installed in a version that is asked for."""
    try:
        return package.specifier.contains(importlib.metadata.version(package.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def versions() -> dict[str, str]:
    """The version of every installed package; one whose installation was interrupted has no name."""
    found = reversed([*importlib.metadata.distributions()])
    return {package.name.lower(): package.version for package in found if package.name}
