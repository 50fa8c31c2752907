"""Rules on imports, and on the parts of a recipe."""

import ast
import graphlib
import importlib.util
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, imported

RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.py") if not path.name.startswith("_"))
MODULES = sorted((ROOT / "common").rglob("*.py"))
PACKAGES = sorted(path.parent for path in (ROOT / "common").glob("*/__init__.py"))


def imports(path):
    return imported(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parent.parts))


def test_helpers_import_no_recipe_and_take_no_config():
    """Helpers take values; `command_line` alone takes a config, to call `main(config)`."""
    for path in MODULES:
        assert not [name for name in imports(path) if name.split(".")[0] == "recipes"], path
        tree = ast.parse(path.read_text())
        arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert "config" not in arguments or path.name == "command_line.py", path


def test_what_benchmarks_run_in_processes_exists():
    named = set()
    for path in (ROOT / "benchmarks").rglob("*.py"):
        named.update(re.findall(r'"(benchmarks[\w.]*):(\w+)"', path.read_text()))
    assert named
    for module, function in named:
        tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, module


def test_no_module_is_hidden_by_a_package():
    for path in ROOT.glob("[!.]*/**/__init__.py"):
        assert not path.parent.with_suffix(".py").exists(), path


def test_imports_in_common_form_no_cycle():
    """Neither between modules nor between subpackages."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    modules = {path: {files[name] for name in imports(path) if name in files} for path in MODULES}
    packages = {}
    for package in PACKAGES:
        files_imported = set().union(*(modules[file] for file in package.glob("*.py")))
        others = {*PACKAGES} - {package}
        packages[package] = {path.parent for path in files_imported} & others
    for graph in (modules, packages):
        list(graphlib.TopologicalSorter(graph).static_order())  # a CycleError names the cycle


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_have_the_same_parts_and_stand_alone(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "recipes"]
    tree = ast.parse(path.read_text())
    parts = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {"Config", "make_datasets", "build_model", "train_and_evaluate", "main"} <= parts
    attributes = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert attributes.count("fit") == (not path.stem.startswith("glue"))
