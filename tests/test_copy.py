"""`cp`: a page and the helpers that it reaches, which run where this project is not."""

import os
import re
import subprocess
import sys
import tomllib

import pytest

from keras_replicas import UserError
from recipes import _copy
from recipes._copy import PROJECT, copy_recipe, pip_address, requirements
from recipes._names import recipes
from tests.conftest import ROOT, files_in, python


def alone(folder, *words, path=""):
    """Runs Python in a folder with the installed packages, but not this project: -S, if its install is editable."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    environment = os.environ | {"PYTHONPATH": f"{site}:{path}"}
    return python("-S", *words, cwd=folder, env=environment)


def test_all_recipes_can_be_in_one_folder_and_what_they_import_is_there(tmp_path):
    for name in (*recipes(), "bert_mlm"):
        copy_recipe(name, str(tmp_path), vendor=True, helpers="helpers")
    done = alone(tmp_path, "-c", "import sys\nfor name in sys.argv[1:]: print(__import__(name).Config)", *recipes())
    assert done.stdout.splitlines() == [f"<class '{name}.Config'>" for name in recipes()], done.stderr


@pytest.mark.parametrize("name", recipes())
def test_a_copied_recipe_names_its_packages_and_commands(name, tmp_path):
    copy_recipe(name, str(tmp_path))
    page = (tmp_path / f"{name}.py").read_text()
    (head,) = re.findall(r"(?m)^# /// script\n((?:#(?:| .*)\n)+?)# ///$", page)  # as in PEP 723
    head = tomllib.loads(re.sub("(?m)^# ?", "", head))
    assert head["requires-python"] == PROJECT["requires-python"]
    assert head["dependencies"] == (tmp_path / "requirements.txt").read_text().splitlines()
    assert f"\n    python {name}.py --" in page
    assert f"\nimport {name} as recipe\n" in (tmp_path / f"test_{name}.py").read_text()
    assert not [path for path, text in files_in(tmp_path).items() if b"-m recipes" in text or b"recipes/" in text]
    assert (tmp_path / "common/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_a_vendored_copy_holds_the_library_and_lists_all_packages(tmp_path, capsys):
    copy_recipe("bert_mlm", str(tmp_path), vendor=True)
    library = files_in(ROOT / "keras_replicas")
    assert files_in(tmp_path / "keras_replicas") == {path: library[path] for path in library if ".pyc" not in path}
    packages = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["recipes"]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == packages
    assert {str(tmp_path / path) for path in files_in(tmp_path)} <= {*capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize("name", ["common/files.py", "keras_replicas/model.py", "common", "test_bert_mlm.py/", ""])
def test_a_file_in_the_way_is_named_and_nothing_is_written(name, tmp_path):
    mine = tmp_path / "mine" / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.mkdir() if name.endswith("/") else mine.write_text("mine")
    with pytest.raises(UserError, match=re.escape(f"{mine} is in the way: move it, or copy to another folder")):
        copy_recipe("bert_mlm", str(tmp_path / "mine"), vendor=True)
    assert {*files_in(tmp_path).values()} <= {b"mine"}


@pytest.mark.parametrize(
    ("folder", "helpers", "told"),
    [("", "common", "give the name of a folder"), ("/proc/mine", "common", "cannot copy to /proc/mine: ")]
    + [("mine", name, f"--as {name}: give a") for name in ("a/b", "class", "keras", "bert_mlm", "test_bert_mlm", "")],
)
def test_why_it_cannot_be_copied_is_told(folder, helpers, told):
    with pytest.raises(UserError, match=told):
        copy_recipe("bert_mlm", folder, helpers=helpers)


def test_a_copy_depends_on_the_library_where_this_clone_is_from(tmp_path, monkeypatch):
    def git(folder, words):
        command = ["git", "-c", "user.name=nobody", "-c", "user.email=nobody@example.com", *words.split()]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    (ours := tmp_path / "its own").joinpath("recipes").mkdir(parents=True)
    (ours / "recipes/_copy.py").touch()
    monkeypatch.setattr(_copy, "ROOT", ours)
    git(tmp_path, "init -q")  # somebody else's repository, which it only lies in
    git(tmp_path, "remote add origin https://example.com/another.git")
    for words in ("init -q", "add -A", "commit -qm all", "remote add origin https://me:secret@example.com/our.git"):
        assert requirements(vendor=False) == [f"keras-replicas[recipes] @ file://{tmp_path}/its%20own"]
        git(ours, words)
    address = f"git+https://example.com/our.git@{git(ours, 'rev-parse HEAD')}"
    assert requirements(vendor=False) == [f"keras-replicas[recipes] @ {address}"]


def test_pip_takes_the_address_of_any_remote():
    addresses = {
        "https://example.com/a/b.git?token=secret": "https://example.com/a/b.git",
        "git@example.com:a/b.git": "ssh://git@example.com/a/b.git",
        "host:/a/b.git": "ssh://host/a/b.git",
        "ssh://git@example.com:22/a/b.git": "ssh://git@example.com:22/a/b.git",
        "file:///srv/a b.git": "file://localhost/srv/a%20b.git",
        "../b.git": f"file://localhost{ROOT.resolve().parent}/b.git",
    }
    assert {remote: pip_address(remote) for remote in addresses} == addresses


@pytest.mark.slow
def test_a_copy_runs_alone_and_its_test_finds_a_fault(tmp_path):
    copy_recipe("bert_mlm", str(vendored := tmp_path / "vendored"), vendor=True, helpers="helpers")
    done = alone(vendored, "test_bert_mlm.py")
    assert done.stdout.endswith("\npassed: two replicas compute what one does\n"), done.stderr
    copy_recipe("bert_mlm", str(copy := tmp_path / "copy"))
    right = (fault := copy / "common/training.py").read_text()
    fault.write_text(right.replace("learning_rate * factor\n", "learning_rate * factor * (1 + replicas / 1000)\n"))
    done = alone(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", path=vendored)  # its library
    assert "Not equal to tolerance" in done.stdout and "1 failed" in done.stdout, done.stdout
