"""`cp`: a recipe and exactly the helpers it uses, which run alone."""

import json
import modulefinder
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from recipes._contents import TEST, imports, modules_used
from recipes._copy import MANIFEST
from tests.conftest import ROOT
from tests.test_structure import RECIPES

EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def cp(recipe, *words):
    words = [sys.executable, "-m", "recipes", "cp", recipe.stem, *map(str, words)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


def alone():
    """For a program with this repository off its path: with -S, which leaves out the editable install."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    return {**os.environ, "PYTHONPATH": site}


@EACH_RECIPE
def test_a_copy_is_the_recipe_and_exactly_what_it_uses(recipe, tmp_path):
    copy = tmp_path / "mine"
    done = cp(recipe, copy)
    assert (done.returncode, done.stderr) == (0, "")
    used = {str(path.relative_to(ROOT)) for path in modules_used(recipe)}
    copied = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    test = f"test_{recipe.name}"
    others = {"common/__init__.py", "common/LICENSE", "requirements.txt", MANIFEST}
    assert copied == {recipe.name, test} | others | used
    *files, needs, run, run_test = filter(None, done.stdout.splitlines())
    assert set(files) == {str(copy / name) for name in copied}
    assert needs == f"It needs what {copy}/requirements.txt lists. In {copy}:"
    assert (run.strip(), run_test.strip()) == (f"python {recipe.name}", f"python {test}")
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
    line = b"import recipes.bert_mlm as recipe\n"
    assert (copy / test).read_bytes() == TEST.read_bytes().replace(line, f"import {recipe.stem} as recipe\n".encode())


@EACH_RECIPE
def test_a_copy_in_a_package_imports_nothing_of_another(recipe, tmp_path):
    """Beside a `common` and a `my` of the user's own, to which nothing is done."""
    for name in ("common", "my"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = 1\n")
    done = cp(recipe, tmp_path, "--package", "my.train")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"  python -m my.train.{recipe.stem}\n  python test_{recipe.name}\n")
    assert [(path.parent.name, path.read_text()) for path in sorted(tmp_path.glob("*/__init__.py"))] == [
        ("common", "MINE = 1\n"),
        ("my", "MINE = 1\n"),
    ]
    inside = {str(path.relative_to(tmp_path / "my/train")): path for path in tmp_path.glob("my/train/**/*.py")}
    assert inside.keys() == {recipe.name, "common/__init__.py"} | {
        str(p.relative_to(ROOT)) for p in modules_used(recipe)
    }
    for name, path in inside.items():
        original = recipe if name == recipe.name else ROOT / name
        here = {word.replace("my.train.common", "common") for word in imports(path)}
        assert here == imports(original) and not {"common", "recipes"} & {word.split(".")[0] for word in imports(path)}
    assert f"my.train.{recipe.stem}" in imports(tmp_path / f"test_{recipe.name}")


@EACH_RECIPE
def test_requirements_are_those_of_its_files(recipe, tmp_path):
    cp(recipe, tmp_path)
    requirements = (tmp_path / "requirements.txt").read_text().splitlines()
    assert set(requirements) <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    names = {line.split(">")[0] for line in requirements}
    assert {"tensorflow", "keras", "keras-nlp", "tyro", "tensorboard"} <= names
    assert ("tqdm" in names) == (recipe.stem == "glue_custom_loop")


@pytest.mark.parametrize("own", ["pyproject.toml", "requirements.txt"])
def test_a_project_gets_a_fragment_of_its_pyproject(own, tmp_path):
    (tmp_path / own).write_text("# mine\n")
    cp(ROOT / "recipes/bert_mlm.py", tmp_path)
    cp(ROOT / "recipes/bert_mlm.py", tmp_path / "beside")
    fragment = tomllib.loads((tmp_path / "pyproject.fragment.toml").read_text())["project"]
    assert fragment["dependencies"] == (tmp_path / "beside/requirements.txt").read_text().splitlines()
    assert (
        fragment["requires-python"]
        == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    )
    assert (tmp_path / own).read_text() == "# mine\n" and len(list(tmp_path.glob("*.t*t"))) == (own != "pyproject.toml")


def test_nothing_is_overwritten(tmp_path):
    recipe = ROOT / "recipes/bert_mlm.py"
    (tmp_path / "common/devices").mkdir(parents=True)
    (tmp_path / "keras_replicas/strategy.py").write_text("mine")
    (tmp_path / "test_bert_mlm.py").symlink_to("nowhere")
    refused = cp(recipe, tmp_path)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr == (
        f"error: {tmp_path}/test_bert_mlm.py, {tmp_path}/keras_replicas/strategy.py already exist(s). "
        "Move what is yours, or copy into a package: --package NAME\n"
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "keras_replicas/strategy.py"]
    (tmp_path / "my/train.py").parent.mkdir()
    (tmp_path / "my/train.py").write_text("")
    hidden = cp(recipe, tmp_path, "--package", "my.train.deep")
    assert hidden.stderr == f"error: --package my.train.deep would hide {tmp_path}/my/train.py; give another name\n"
    assert hidden.returncode == 2 and sorted(path.name for path in (tmp_path / "my").iterdir()) == ["train.py"]


def test_a_file_with_the_name_of_a_folder_is_in_the_way(tmp_path):
    (tmp_path / "common").write_text("mine")
    refused = cp(ROOT / "recipes/bert_mlm.py", tmp_path)
    assert refused.returncode == 2 and f"{tmp_path}/keras_replicas/errors.py, " in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["common"]


@pytest.mark.parametrize("name", ["common", MANIFEST])
def test_a_broken_link_or_a_folder_is_in_the_way(name, tmp_path):
    (tmp_path / "common").symlink_to("nowhere") if name == "common" else (tmp_path / MANIFEST).mkdir()
    refused = cp(ROOT / "recipes/bert_mlm.py", tmp_path)
    assert refused.returncode == 2 and f"{tmp_path}/{name}" in refused.stderr and "already exist(s)" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]


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
    away = {"cwd": tmp_path, "env": alone()}
    assert subprocess.run([sys.executable, "-S", "-c", "import common"], **away, capture_output=True).returncode == 1
    runs = [
        subprocess.Popen([sys.executable, "-S", str(copy / recipe.name), "--workdir=copied", *options], **away),
        subprocess.Popen([sys.executable, str(recipe), f"--workdir={tmp_path}/original", *options], cwd=ROOT),
    ]
    assert [run.wait() for run in runs] == [0, 0]
    copied, original = (json.loads(Path(tmp_path, name, "results.json").read_text()) for name in ("copied", "original"))
    for figure in ("steps", "train_loss", "val_loss", "val_accuracy"):
        assert copied[figure] == original[figure]
    assert copied["steps"] == 6
    assert (tmp_path / "copied/steps.jsonl").read_bytes() == (tmp_path / "original/steps.jsonl").read_bytes()


def packaged(recipe, folder):
    """A copy in a package, beside another `common`, and the command of its test."""
    (folder / "common").mkdir()
    (folder / "common/__init__.py").write_text("raise ImportError('another')\n")
    cp(recipe, folder, "--package", "my.train")
    return [sys.executable, "-S", f"test_{recipe.name}"]


@pytest.mark.slow
@EACH_RECIPE
def test_the_test_of_a_copy_passes(recipe, tmp_path):
    test = packaged(recipe, tmp_path)
    passed = subprocess.run(test, cwd=tmp_path, env=alone(), capture_output=True, text=True)
    assert passed.returncode == 0 and passed.stdout.endswith("\npassed: two replicas compute what one does\n"), (
        passed.stderr
    )


@pytest.mark.slow
def test_the_test_of_a_copy_finds_a_learning_rate_that_grows_with_the_replicas(tmp_path):
    test = packaged(ROOT / "recipes/bert_mlm.py", tmp_path)
    scaling = tmp_path / "my/train/common/training/scaling.py"
    scaling.write_text(scaling.read_text() + "\n\ndef learning_rate_factor(rule, replicas):\n    return replicas\n")
    test[2:2] = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    failed = subprocess.run(test, cwd=tmp_path, env=alone(), capture_output=True, text=True)
    assert failed.returncode == 1 and "1 failed" in failed.stdout
