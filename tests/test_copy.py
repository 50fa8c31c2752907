"""`cp`: a page and the helpers that it reaches, which run where this project is not."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from keras_replicas import UserError
from recipes import _copy
from recipes._copy import PROJECT, copy_recipe, pip_address, requirements
from recipes._names import recipes
from tests.conftest import ROOT

UNFINISHED = {*recipes()} - {"bert_mlm"}  # pages that import what is gone


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def alone(folder, *words, path=""):
    """Runs Python in a folder with the installed packages, but not this project."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    command = [sys.executable, "-S", *words]  # -S leaves out what an editable install adds
    environment = os.environ | {"PYTHONPATH": f"{site}:{path}" if path else site}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What Python says when it imports the pages of a folder in which all recipes are, with helpers of another name."""
    folder = tmp_path_factory.mktemp("copies")
    for name in recipes():
        copy_recipe(name, str(folder), vendor=True, helpers="helpers")
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n  try: print(name, importlib.import_module(name).Config)\n"
    code += "  except ImportError as error: print(name, error)\nprint('foreign', {'common', 'recipes'} & {*sys.modules})"
    return dict(line.split(maxsplit=1) for line in alone(folder, "-c", code, *recipes()).stdout.splitlines())


@pytest.mark.parametrize("name", recipes())
def test_all_that_a_copied_page_imports_is_there(name, imported, request):
    request.applymarker(pytest.mark.xfail(name in UNFINISHED, reason="unfinished", strict=True))
    assert (imported[name], imported["foreign"]) == (f"<class '{name}.Config'>", "set()")


@pytest.mark.parametrize("name", recipes())
def test_a_copied_page_is_a_script_that_names_what_is_there(name, tmp_path):
    copy_recipe(name, str(tmp_path))
    page = (tmp_path / f"{name}.py").read_text()
    (head,) = re.findall(r"(?m)^# /// script\n((?:#(?:| .*)\n)+?)# ///$", page)  # as in PEP 723
    assert tomllib.loads(re.sub("(?m)^# ?", "", head)) == {
        "requires-python": PROJECT["requires-python"],
        "dependencies": (tmp_path / "requirements.txt").read_text().splitlines(),
    }
    assert f"\n    python {name}.py --" in ast.get_docstring(ast.parse(page), clean=False)
    assert f"\nimport {name} as recipe\n" in (tmp_path / f"test_{name}.py").read_text()
    assert not [path for path, text in files_in(tmp_path).items() if b"-m recipes" in text or b"recipes/" in text]
    assert (tmp_path / "common/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


# Python files, and their lines.
@pytest.mark.parametrize("name", recipes())
def test_a_copy_is_small(name, tmp_path):
    copy_recipe(name, str(tmp_path))
    files, lines = (16, 1_700) if name == "bert_mlm" else (20, 2_200)
    sizes = [len(path.read_text().splitlines()) for path in tmp_path.rglob("*.py")]
    assert len(sizes) <= files and sum(sizes) <= lines, (len(sizes), sum(sizes))


def test_a_vendored_copy_holds_the_library_and_a_second_recipe_leaves_what_is_there(tmp_path, capsys):
    copy_recipe("bert_mlm", str(tmp_path), vendor=True)
    library = files_in(ROOT / "keras_replicas")
    assert files_in(tmp_path / "keras_replicas") == {path: library[path] for path in library if ".pyc" not in path}
    packages = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["recipes"]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == packages
    assert {str(tmp_path / path) for path in files_in(tmp_path)} <= {*capsys.readouterr().out.splitlines()}
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    for name in ("bert_mlm", "causal_lm"):
        copy_recipe(name, str(tmp_path), vendor=True)
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("name", ["common/files.py", "keras_replicas/model.py", "common", "test_bert_mlm.py/", ""])
def test_a_file_in_the_way_is_named_and_nothing_is_written(name, tmp_path):
    mine = tmp_path / "mine" / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.mkdir() if name.endswith("/") else mine.symlink_to("nowhere")
    with pytest.raises(UserError, match=re.escape(f"{mine} is in the way: move it, or copy to another folder")):
        copy_recipe("bert_mlm", str(tmp_path / "mine"), vendor=True)
    assert not files_in(tmp_path)


@pytest.mark.parametrize("name", ["a/b", "class", "json", "keras", "bert_mlm", "keras_replicas", ""])
def test_helpers_are_not_called_so(name, tmp_path):
    with pytest.raises(UserError, match=f"--as {name}: give a name that Python can import"):
        copy_recipe("bert_mlm", str(tmp_path), helpers=name)


@pytest.mark.parametrize(("folder", "told"), [("", "give the name of a folder"), ("/proc/mine", "cannot copy to /proc/")])
def test_it_is_told_that_nothing_can_be_written_there(folder, told):
    with pytest.raises(UserError, match=told):
        copy_recipe("bert_mlm", folder)


def test_a_copy_depends_on_the_library_where_this_clone_is_from(tmp_path, monkeypatch):
    def git(folder, *words):
        command = ["git", "-C", folder, "-c", "user.name=nobody", "-c", "user.email=nobody@example.com", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "its own/recipes").mkdir(parents=True)
    ours = tmp_path / "its own"
    (ours / "recipes/_copy.py").touch()
    monkeypatch.setattr(_copy, "ROOT", ours)
    assert requirements(vendor=False) == [here := f"keras-replicas[recipes] @ file://{tmp_path}/its%20own"]
    git(tmp_path, "init", "-q")  # somebody else's repository, which it only lies in
    git(tmp_path, "remote", "add", "origin", "https://example.com/another.git")
    assert requirements(vendor=False) == [here]
    git(ours, "init", "-q")
    git(ours, "add", "-A")
    git(ours, "commit", "-qm", "all")
    git(ours, "remote", "add", "origin", "https://me:secret@example.com/our.git")
    where = f"git+https://example.com/our.git@{git(ours, 'rev-parse', 'HEAD')}"
    assert requirements(vendor=False) == [f"keras-replicas[recipes] @ {where}"]
    for remote, address in {
        "https://example.com/a/b.git?token=secret": "https://example.com/a/b.git",
        "git@example.com:a/b.git": "ssh://git@example.com/a/b.git",
        "host:/a/b.git": "ssh://host/a/b.git",
        "ssh://git@example.com:22/a/b.git": "ssh://git@example.com:22/a/b.git",
        "/srv/a b.git": "file://localhost/srv/a%20b.git",
        "file:///srv/b.git": "file://localhost/srv/b.git",
        "../b.git": f"file://localhost{tmp_path}/b.git",
    }.items():
        assert pip_address(remote) == address


@pytest.mark.slow
def test_a_copy_runs_alone_and_its_test_finds_a_fault(tmp_path):
    outside, vendored, copy = (tmp_path / name for name in ("outside", "vendored", "copy"))
    copy_recipe("bert_mlm", str(vendored), vendor=True, helpers="helpers")
    done = alone(vendored, "test_bert_mlm.py")
    assert done.stdout.endswith("\npassed: two replicas compute what one does\n"), done.stderr
    copy_recipe("bert_mlm", str(copy))
    outside.mkdir()
    (outside / "keras_replicas").symlink_to(ROOT / "keras_replicas")
    assert "\n    python bert_mlm.py " in alone(copy, "bert_mlm.py", "--help", path=outside).stdout
    with (copy / "common/training/scaling.py").open("a") as file:
        file.write("\n\nright = scale\n\n\ndef scale(batch_size, rate, replicas, rule):\n")
        file.write("    return batch_size * replicas, rate * (1 + 1e-3 * replicas)\n")
    done = alone(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", path=outside)
    assert "Not equal to tolerance" in done.stdout and "1 failed" in done.stdout, done.stdout
