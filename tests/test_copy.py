"""`cp`: a recipe and exactly the helpers that it uses, which run where this project is not."""

import modulefinder
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from common.run import runs
from keras_replicas.errors import UserError
from recipes import _copy
from recipes._copy import TEST, copy_recipe, modules_used, pip_address, requirements
from recipes._names import recipes
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", recipes())
def test_a_copy_is_the_recipe_and_exactly_what_it_uses(name, tmp_path, capsys):
    copy_recipe(name, tmp_path, vendor=False)
    copied = files_in(tmp_path)
    helpers = {str(path.relative_to(ROOT)) for path in modules_used(recipes()[name])}
    others = {f"{name}.py", f"test_{name}.py", "common/__init__.py", "common/LICENSE", "requirements.txt"}
    assert copied.keys() == helpers | others
    # No helper is left out or copied for nothing: Python's own search, by another way than ours, agrees.
    for room in {path.parent for path in tmp_path.glob("common/*/*.py")}:  # which modulefinder asks for
        (room / "__init__.py").touch()
    finder = modulefinder.ModuleFinder(path=[str(tmp_path)])
    finder.run_script(str(tmp_path / f"{name}.py"))
    found = {str(Path(module.__file__).relative_to(tmp_path)) for module in finder.modules.values() if module.__file__}
    assert {path for path in found if not path.endswith("/__init__.py")} == helpers | {f"{name}.py"}
    for path in helpers | {"common/__init__.py"}:
        assert copied[path] == (ROOT / path).read_bytes()
    assert copied[f"{name}.py"] == recipes()[name].read_bytes()
    assert copied["common/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    line = b"\nimport recipes.bert_mlm as recipe\n"
    assert copied[f"test_{name}.py"] == TEST.read_bytes().replace(line, f"\nimport {name} as recipe\n".encode())
    *told, last = capsys.readouterr().out.splitlines()
    assert set(told[: told.index("")]) == {str(tmp_path / path) for path in copied}
    assert last == f"  python test_{name}.py"


@pytest.fixture
def git_in(tmp_path, monkeypatch):
    """Runs git in a folder; the collection is said to be in `tmp_path/"its own"`."""
    ours = tmp_path / "its own"
    (ours / "recipes").mkdir(parents=True)
    (ours / "recipes/_copy.py").touch()
    (ours / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    monkeypatch.setattr(_copy, "ROOT", ours)
    nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    options = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]

    def git(folder, *words):
        command = ["git", *options, *words]
        done = subprocess.run(command, cwd=folder, env=os.environ | nobody, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return git


def test_a_copy_depends_on_the_library_where_this_clone_is_from(git_in, tmp_path):
    ours = tmp_path / "its own"
    here = f"keras-replicas[recipes] @ file://{tmp_path}/its%20own"
    assert requirements(vendor=False) == [here]
    git_in(tmp_path, "init", "-q")  # somebody else's repository, which it only lies in
    git_in(tmp_path, "remote", "add", "origin", "https://example.com/another.git")
    assert requirements(vendor=False) == [here]
    git_in(ours, "init", "-q")
    git_in(ours, "add", "-A")
    git_in(ours, "commit", "-qm", "all")
    assert requirements(vendor=False) == [here]
    git_in(ours, "remote", "add", "origin", "https://me:secret@example.com/our/clone.git")
    (line,) = requirements(vendor=False)
    commit = git_in(ours, "rev-parse", "HEAD")
    assert line == f"keras-replicas[recipes] @ git+https://example.com/our/clone.git@{commit}"
    assert Requirement(line).name == Requirement(here).name == PROJECT["name"]


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.com/a/b.git?token=secret", "https://example.com/a/b.git"),
        ("git@example.com:a/b.git", "ssh://git@example.com/a/b.git"),
        ("host:/a/b.git", "ssh://host/a/b.git"),
        ("ssh://git@example.com:22/a/b.git", "ssh://git@example.com:22/a/b.git"),
        ("/srv/a b.git", "file://localhost/srv/a%20b.git"),
        ("file:///srv/b.git", "file://localhost/srv/b.git"),
        ("../b.git", (ROOT.resolve().parent / "b.git").as_uri().replace("file://", "file://localhost")),
    ],
)
def test_pip_takes_the_address_of_any_remote(remote, address):
    assert pip_address(remote) == address


def test_a_vendored_copy_holds_the_library_and_lists_all_packages(tmp_path):
    copy_recipe("bert_mlm", tmp_path, vendor=True)
    library = files_in(ROOT / "keras_replicas")
    copied = {path: text for path, text in library.items() if "__pycache__" not in path}
    assert files_in(tmp_path / "keras_replicas") == copied and "model.py" in copied
    packages = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["recipes"]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == packages


def test_a_second_recipe_shares_the_helpers_of_the_first(tmp_path):
    copy_recipe("bert_mlm", tmp_path, vendor=True)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    copy_recipe("text_classifier", tmp_path, vendor=True)
    copy_recipe("bert_mlm", tmp_path, vendor=True)  # nor is a copy of itself in its way
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert {"bert_mlm.py", "text_classifier.py"} <= files_in(tmp_path).keys()


def write(path, text="mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("common/files.py", write),
        ("requirements.txt", write),
        ("keras_replicas/model.py", write),
        ("test_bert_mlm.py", lambda path: path.symlink_to("nowhere")),
        ("bert_mlm.py", Path.mkdir),
        ("common", write),
        ("common", lambda path: path.symlink_to("nowhere")),
        ("", lambda path: path.rmdir() or write(path)),
    ],
)
def test_a_file_in_the_way_is_named_and_nothing_is_written(name, make, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    make(mine / name)
    before = sorted(tmp_path.rglob("*")), files_in(tmp_path)
    with pytest.raises(UserError) as refused:
        copy_recipe("bert_mlm", mine, vendor=True)
    assert str(refused.value) == f"{mine / name} is in the way: move it, or copy to another folder"
    assert (sorted(tmp_path.rglob("*")), files_in(tmp_path)) == before


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("", "argument DEST: give the name of a folder, such as my_project. See python -m recipes cp --help"),
        ("/proc/mine", "cannot copy to /proc/mine: [Errno 2] No such file or directory: '/proc/mine'"),
        ("/dev/null", "/dev/null is in the way: move it, or copy to another folder"),
    ],
)
def test_what_cannot_be_copied_to_is_told_of_in_one_line(folder, told):
    command = [sys.executable, "-m", "recipes", "cp", "bert_mlm", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {told}\n")


@pytest.mark.parametrize("changed", ["bert_mlm.py", "common/files.py", "keras_replicas/model.py"])
def test_workers_compare_the_code_of_a_copy(changed, tmp_path, monkeypatch):
    copy_recipe("bert_mlm", tmp_path, vendor=True)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs.keras_replicas, "__file__", str(tmp_path / "keras_replicas/__init__.py"))
    before = runs.checksum_of_code()
    assert runs.checksum_of_code() == before
    with (tmp_path / changed).open("a") as file:
        file.write("# mine\n")
    assert runs.checksum_of_code() != before


def alone(folder, *words, path=()):
    """Runs Python in a folder with the installed packages, but not this project; returns the status and the output."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), site])}
    command = [sys.executable, "-S", *words]  # -S leaves out what an editable install adds
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_tests_of_vendored_copies_pass_alone(tmp_path):
    names = ("glue_custom_loop", "causal_lm")  # an explicit loop, and `fit`
    for name in names:
        copy_recipe(name, tmp_path, vendor=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    assert all(alone(outside, "-c", f"import {name}")[0] == 1 for name in ("common", "recipes", "keras_replicas"))
    status, said = alone(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert status == 0 and f"{len(names)} passed" in said, said


@pytest.mark.slow
def test_a_copy_runs_with_a_library_from_elsewhere_and_its_test_finds_a_fault(tmp_path):
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    copy_recipe("bert_mlm", copy, vendor=False)
    elsewhere.mkdir()
    (elsewhere / "keras_replicas").symlink_to(ROOT / "keras_replicas")
    status, said = alone(copy, "test_bert_mlm.py", path=[elsewhere])
    assert status == 0 and "\npassed: two replicas compute what one does\n" in said, said
    with (copy / "common/training/scaling.py").open("a") as file:
        file.write("\n\ndef learning_rate_factor(rule, replicas):\n    return replicas\n")
    status, said = alone(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", path=[elsewhere])
    assert status == 1 and "1 failed" in said, said
