"""The first cell of the notebooks: it gets the recipes and the packages, from wherever it is run. Without a network."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from notebooks import generate
from tests.conftest import ROOT

COLLECTION = "keras-data-parallel-recipes"
PROJECT = f"""
[project]
name = "{COLLECTION}"
requires-python = ">=3.11"
dependencies = ["some-words>=2,<3"]
[project.optional-dependencies]
notebooks = ["ipykernel>=99"]
"""
FILES = {
    "recipes/__init__.py": "",
    "recipes/__main__.py": "print('the recipes')",
    "recipes/_packages.py": (ROOT / "recipes/_packages.py").read_text(),
    "pyproject.toml": PROJECT,
    "notebooks/README.md": "# Notebooks",
}
# As a notebook goes on: it imports the packages, and starts processes that need the recipes.
GOES_ON = """
import some_words
print(some_words.WORDS, flush=True)
subprocess.run([sys.executable, "-m", "recipes"], check=True)
"""
QUESTION = "The recipes are not here."


def git(*words, cwd="."):
    # Nothing of whoever runs the tests.
    nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    options = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *options, *words], cwd=cwd, check=True, env=os.environ | nobody, capture_output=True)


def wheel(folder, name, version, files, requires=()):
    """Writes a wheel of these files."""
    folder.mkdir(exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    needs = [f"Requires-Dist: {package}\n" for package in requires]
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.11\n"
    files = files | {
        f"{stem}.dist-info/METADATA": head + "".join(needs),
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{stem}.dist-info/RECORD"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(record, "".join(f"{path},,\n" for path in (*files, record)))


def words(folder, version):
    wheel(folder, "some-words", version, {"some_words.py": f"WORDS = 'words {version}'"})


@pytest.fixture
def remote(tmp_path):
    """The address of a small collection."""
    for path, text in FILES.items():
        (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / path).write_text(text)
    git("init", "-q", cwd=tmp_path / "source")
    git("add", "-A", cwd=tmp_path / "source")
    git("commit", "-qm", "all", cwd=tmp_path / "source")
    git("clone", "-q", "--bare", tmp_path / "source", tmp_path / "remote.git")
    return (tmp_path / "remote.git").as_uri()


@pytest.fixture
def kernel(tmp_path):
    """Runs the cell in a Python of its own, with `some-words` in a version; returns the exit status and the output."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "python"], check=True)
    python = tmp_path / "python/bin/python"
    (tmp_path / "tools").mkdir()
    for package in ("pip", "packaging"):  # each kernel has packaging, as ipykernel needs it
        (tmp_path / "tools" / package).symlink_to(Path(sysconfig.get_path("purelib"), package))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PYTHONPATH": str(tmp_path / "tools"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}

    def run(cwd, typed="", has=None, path=os.environ["PATH"], **settings):
        if has:
            words(tmp_path / "had", has)
            pip = [python, "-m", "pip", "install", "-q", "--find-links", tmp_path / "had", f"some-words=={has}"]
            subprocess.run(pip, check=True, env=env)
        cell = generate.INSTALL
        for name, value in settings.items():
            cell, found = re.subn(f'^{name} = ""', f'{name} = "{value}"', cell, flags=re.MULTILINE)
            assert found == 1
        cwd.mkdir(exist_ok=True)
        command = [python, "-c", cell + GOES_ON]
        done = subprocess.run(command, cwd=cwd, env=env | {"PATH": path}, input=typed, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def goes_on(answer, version="2.1"):
    status, output = answer
    assert status == 0, output
    assert output.endswith(f"words {version}\nthe recipes\n")
    assert f"some-words {version}" in output
    return output


def test_in_a_clone_nothing_is_fetched_nor_asked(remote, kernel, tmp_path):
    git("clone", "-q", remote, tmp_path / "clone")
    for folder in (tmp_path / "clone/notebooks", tmp_path / "clone"):
        has = "2.1" if folder.name == "notebooks" else None
        assert QUESTION not in goes_on(kernel(folder, has=has))
        assert {path.name for path in folder.iterdir() if not path.name.startswith((".", "__"))} <= {
            *(name.split("/")[0] for name in FILES), "README.md",
        }  # fmt: skip


def test_a_clone_without_the_recipes_gets_them_from_its_own_remote(remote, kernel, tmp_path):
    git("clone", "-q", "--sparse", remote, tmp_path / "clone")
    git("sparse-checkout", "set", "notebooks", cwd=tmp_path / "clone")
    assert not (tmp_path / "clone/recipes").exists()
    assert QUESTION not in goes_on(kernel(tmp_path / "clone/notebooks", has="2.1"))
    assert (tmp_path / "clone/notebooks" / COLLECTION / "recipes/__main__.py").exists()


def test_an_address_that_was_set_comes_before_the_clones_remote(remote, kernel, tmp_path):
    git("clone", "-q", "--sparse", remote, tmp_path / "clone")
    git("sparse-checkout", "set", "notebooks", cwd=tmp_path / "clone")
    git("remote", "set-url", "origin", "https://127.0.0.1:1/none.git", cwd=tmp_path / "clone")
    goes_on(kernel(tmp_path / "clone/notebooks", has="2.1", ADDRESS=remote))


def test_elsewhere_it_asks_for_the_address_once(remote, kernel, tmp_path):
    output = goes_on(kernel(tmp_path / "empty", typed=f"{remote}\n", has="2.1"))
    assert QUESTION in output and "Address, as https://" in output
    assert (tmp_path / "empty" / COLLECTION / "recipes/__main__.py").exists()
    assert QUESTION not in goes_on(kernel(tmp_path / "empty"))


def test_it_does_not_ask_where_the_address_is_in_it(remote, kernel, tmp_path):
    assert QUESTION not in goes_on(kernel(tmp_path / "empty", has="2.1", ADDRESS=remote))
    # Nor does it take the remote of somebody else's project.
    git("clone", "-q", remote, tmp_path / "theirs")
    git("rm", "-qr", "recipes", cwd=tmp_path / "theirs")
    assert QUESTION in kernel(tmp_path / "theirs")[1]


def test_an_address_that_git_cannot_clone(kernel, tmp_path):
    status, output = kernel(tmp_path / "empty", typed="https://bob:secret@127.0.0.1:1/none.git\n")
    assert status == 1
    assert "Set ADDRESS above" in output and "Traceback" not in output and "secret" not in output


def test_without_git_it_says_so(kernel, tmp_path):
    status, output = kernel(tmp_path / "empty", path=str(tmp_path))
    assert status == 1 and "git, which gets them, is not installed" in output and "Traceback" not in output


def test_without_internet_all_comes_from_a_folder_of_wheels(remote, kernel, tmp_path):
    words(tmp_path / "wheels", "2.1")
    recipes = {path: text for path, text in FILES.items() if path.startswith("recipes/")}
    needs = ("some-words>=2,<3", 'ipykernel>=99; extra == "notebooks"')
    wheel(tmp_path / "wheels", COLLECTION, "0.1", recipes, needs)
    output = goes_on(kernel(tmp_path / "empty", WHEELS=tmp_path / "wheels"))
    assert "installing\n    some-words" in output and "ipykernel" not in output
    assert not [*(tmp_path / "empty").iterdir()]


def test_a_folder_without_the_recipes_wheel(kernel, tmp_path):
    status, output = kernel(tmp_path / "empty", WHEELS=tmp_path / "none")
    assert status == 1 and "pip could not install the recipes from WHEELS" in output and "Traceback" not in output


def test_a_folder_named_recipes_is_not_taken_for_them(remote, kernel, tmp_path):
    (tmp_path / "empty/recipes").mkdir(parents=True)
    goes_on(kernel(tmp_path / "empty", has="2.1", ADDRESS=remote))


def test_only_what_is_missing_is_installed(remote, kernel, tmp_path):
    git("clone", "-q", remote, tmp_path / "clone")
    words(tmp_path / "wheels", "2.1")
    assert "installing" in goes_on(kernel(tmp_path / "clone", WHEELS=tmp_path / "wheels"))
    words(tmp_path / "wheels", "2.2")
    assert "installing" not in goes_on(kernel(tmp_path / "clone", WHEELS=tmp_path / "wheels"))


def test_a_wrong_version_is_replaced_and_the_kernel_must_be_restarted(remote, kernel, tmp_path):
    git("clone", "-q", remote, tmp_path / "clone")
    words(tmp_path / "wheels", "2.1")
    (packages,) = tmp_path.glob("python/lib/python*/site-packages")
    (packages / "broken-1.0.dist-info").mkdir()  # as an interrupted installation leaves it
    status, output = kernel(tmp_path / "clone", has="1.0", WHEELS=tmp_path / "wheels")
    assert status == 1
    assert "some-words 1.0 -> 2.1" in output and "restart the kernel" in output and "Traceback" not in output
    assert "installing" not in goes_on(kernel(tmp_path / "clone", WHEELS=tmp_path / "wheels"))


def test_what_pip_says_is_shown_where_it_fails(remote, kernel, tmp_path):
    git("clone", "-q", remote, tmp_path / "clone")
    status, output = kernel(tmp_path / "clone")
    assert status == 1
    assert "pip could not install them:\n" in output and "No matching distribution found for some-words" in output


def test_another_python_is_told(remote, kernel, tmp_path):
    git("clone", "-q", remote, tmp_path / "clone")
    (tmp_path / "clone/pyproject.toml").write_text(PROJECT.replace(">=3.11", "<3"))
    status, output = kernel(tmp_path / "clone")
    assert status == 1 and "choose a kernel with Python <3" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/somebody/recipes.git", "https://github.com/somebody/recipes"),
        ("https://somebody:secret@github.com/somebody/recipes/", "https://github.com/somebody/recipes"),
        ("git@github.com:123/recipes.git", "https://github.com/123/recipes"),
        ("ssh://git@gitlab.example.com:22/group/sub/recipes.git", "https://gitlab.example.com/group/sub/recipes"),
        ("ssh://git@ssh.github.com:443/somebody/recipes.git", "https://github.com/somebody/recipes"),
        ("https://git.example.com:8443/group/recipes.git", "https://git.example.com:8443/group/recipes"),
        ("https://github.com/somebody/recipes.git?access_token=secret", "https://github.com/somebody/recipes"),
        ("http://localhost:3000/somebody/recipes", ""),
        ("http://127.0.0.1:3000/somebody/recipes.git", ""),
        ("/srv/recipes.git", ""),
        ("../recipes.git", ""),
        ("file:///srv/recipes.git", ""),
        ("", ""),
    ],
)
def test_the_address_is_that_of_the_clones_remote_and_has_no_secret(remote, address, tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/generate.py").touch()
    git("init", "-q", cwd=tmp_path)
    if remote:
        git("remote", "add", "origin", remote, cwd=tmp_path)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.public_address() == ""  # nor is it that of a repository that the collection only lies in
    git("add", "notebooks", cwd=tmp_path)
    assert generate.public_address() == address
