"""`cp`: a recipe and exactly the helpers it uses, which run alone."""

import json
import modulefinder
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from recipes.__main__ import modules_used
from tests.conftest import ROOT
from tests.test_structure import RECIPES

EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def cp(recipe, *words):
    words = [sys.executable, "-m", "recipes", "cp", recipe.stem, *map(str, words)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


@EACH_RECIPE
def test_a_copy_is_the_recipe_and_exactly_what_it_uses(recipe, tmp_path):
    copy = tmp_path / "mine"
    done = cp(recipe, copy)
    assert (done.returncode, done.stderr) == (0, "")
    used = {str(path.relative_to(ROOT)) for path in modules_used(recipe)}
    copied = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert copied == {recipe.name, "LICENSE", "requirements.txt", "common/__init__.py"} | used
    *files, run = filter(None, done.stdout.splitlines())
    assert set(files) == {str(copy / name) for name in copied}
    assert run == f"Run it: pip install -r {copy}/requirements.txt && python {copy / recipe.name}"
    # No module of `common` is left out or copied for nothing: Python's own search, by another way than ours, agrees.
    for room in {path.parent for path in copy.glob("common/*/*.py")}:  # which modulefinder asks for
        (room / "__init__.py").touch()
    finder = modulefinder.ModuleFinder(path=[str(copy)])
    finder.run_script(str(copy / recipe.name))
    found = {str(Path(module.__file__).relative_to(copy)) for module in finder.modules.values() if module.__file__}
    assert {name for name in found if not name.endswith("/__init__.py")} == {recipe.name} | used
    for name in {recipe.name, "common/__init__.py"} | used:
        assert (copy / name).read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
        assert (copy / name).read_bytes() == (recipe if name == recipe.name else ROOT / name).read_bytes()


@EACH_RECIPE
def test_requirements_are_those_of_its_files(recipe, tmp_path):
    cp(recipe, tmp_path)
    requirements = (tmp_path / "requirements.txt").read_text().splitlines()
    assert set(requirements) <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    names = {line.split(">")[0] for line in requirements}
    assert {"tensorflow", "keras", "keras-nlp", "tyro", "tensorboard"} <= names
    assert ("tqdm" in names) == (recipe.stem == "glue_custom_loop")


def test_nothing_is_overwritten_unless_asked(tmp_path):
    recipe = ROOT / "recipes/bert_mlm.py"
    (tmp_path / "common/devices").mkdir(parents=True)
    (tmp_path / "common/devices/strategy.py").write_text("mine")
    refused = cp(recipe, tmp_path)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr == f"error: {tmp_path}/common/devices/strategy.py already exist(s); --force overwrites\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "common/devices/strategy.py"]
    assert cp(recipe, tmp_path, "--force").returncode == 0
    assert (tmp_path / "common/devices/strategy.py").read_bytes() == (ROOT / "common/devices/strategy.py").read_bytes()


def test_a_destination_that_is_a_file_is_told_of(tmp_path):
    (tmp_path / "mine").write_text("")
    refused = cp(ROOT / "recipes/bert_mlm.py", tmp_path / "mine")
    assert refused.returncode == 2 and refused.stderr.startswith(f"error: cannot copy to {tmp_path}/mine: ")
    assert refused.stderr.count("\n") == 1


@pytest.mark.slow
@EACH_RECIPE
def test_a_copy_runs_alone_and_gives_the_same_results(recipe, small, tmp_path):
    """By absolute path from another folder, with this repository off the path, beside the original."""
    copy = tmp_path / "mine"
    cp(recipe, copy)
    if recipe.stem not in ("bert_mlm", "bert_from_scratch", "causal_lm"):
        small |= {"task": "roles"}
        del small["corpus"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in small.items() if name != "workdir"]
    # -S leaves out this repository's editable install; the packages come back by PYTHONPATH.
    site = next(path for path in sys.path if path.endswith("site-packages"))
    alone = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": site}}
    assert subprocess.run([sys.executable, "-S", "-c", "import common"], **alone, capture_output=True).returncode == 1
    runs = [
        subprocess.Popen([sys.executable, "-S", str(copy / recipe.name), "--workdir=copied", *options], **alone),
        subprocess.Popen([sys.executable, str(recipe), f"--workdir={tmp_path}/original", *options], cwd=ROOT),
    ]
    assert [run.wait() for run in runs] == [0, 0]
    copied, original = (json.loads(Path(tmp_path, name, "results.json").read_text()) for name in ("copied", "original"))
    for figure in ("steps", "train_loss", "val_loss", "val_accuracy"):
        assert copied[figure] == original[figure]
    assert copied["steps"] == 6
    assert (tmp_path / "copied/steps.jsonl").read_bytes() == (tmp_path / "original/steps.jsonl").read_bytes()
