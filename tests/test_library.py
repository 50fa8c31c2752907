"""The library: public names, what may import what, the wheel, and a program that has no more."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import keras_replicas
from tests.conftest import ROOT, imported, python

LIBRARY = sorted((ROOT / "keras_replicas").rglob("*.py"))
USERS = [
    *(path for folder in ("common", "recipes", "guides") for path in sorted((ROOT / folder).rglob("*.py"))),
    *(path for folder in ("guides", "notebooks") for path in sorted((ROOT / folder).glob("*.ipynb"))),
]
# The clone's command line starts the launcher and the doctor, and is in no copy.
COMMANDS = {
    (ROOT / "recipes/__main__.py", "keras_replicas.launch"),
    (ROOT / "recipes/__main__.py", "keras_replicas.__main__"),
    (ROOT / "recipes/_doctor.py", "keras_replicas"),
    (ROOT / "recipes/_doctor.py", "keras_replicas.doctor_models"),
}
PROGRAM = ROOT / "guides/train.py"


def test_public_names_are_typed_and_others_are_missing():
    tree = ast.parse((ROOT / "keras_replicas/__init__.py").read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    types = {(each.name, node.module) for node in typed.body for each in node.names}
    modules = keras_replicas._MODULES.items()
    assert types == {(name, f"keras_replicas.{module}") for name, module in modules}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = keras_replicas.nothing


def test_importing_the_library_loads_nothing(no_tensorflow):
    code = "import sys, keras_replicas as kr; print({'tensorflow', 'keras', 'numpy'} & set(sys.modules), len(dir(kr)))"
    done = python("-c", code, env=no_tensorflow)
    assert done.stdout.startswith("set() "), done.stderr


def from_inside(code):
    """What code imports of the library that is not one of its public names."""
    ours = (name for name in imported(code) if name.startswith("keras_replicas."))
    return [name for name in ours if name.removeprefix("keras_replicas.") not in keras_replicas.__all__]


def code_of(path):
    """A module's, or that of a notebook's cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    code = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    return code.replace("%pip", "pass  #")


def test_helpers_pages_guides_and_notebooks_use_public_names_alone():
    """So that an update of the library breaks no copy."""
    found = {(path, name) for path in USERS for name in from_inside(code_of(path))}
    commands = {(path, name) for path, name in found if {(path, name), (path, name.rpartition(".")[0])} & COMMANDS}
    assert {str(path.relative_to(ROOT)): name for path, name in found - commands} == {}


def test_the_library_knows_no_recipe():
    for path in LIBRARY:
        theirs = {name.split(".")[0] for name in imported(code_of(path))}
        assert not theirs & {"common", "recipes"}, path.name
        assert path.name in ("kerashub.py", "private.py") or not theirs & {"keras_hub", "keras_nlp"}, path.name


def test_the_readme_has_the_program_as_it_is():
    (shown,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown == PROGRAM.read_text()


def test_without_the_extra_a_recipe_says_what_to_install():
    done = python("-S", "-m", "recipes", "run", "bert_mlm", env=plain_environment())  # -S: without any package
    told = "error: the recipes need keras_hub, tokenizers, tyro: pip install -e '.[recipes]' in the clone"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{told}\n")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """What a release's commands make of the project, and find to be right."""
    folder, page = tmp_path_factory.mktemp("wheel"), (ROOT / "CONTRIBUTING.md").read_text()
    commands = re.search(r"^## To release\n.*?```sh\n(.*?)```", page, re.MULTILINE | re.DOTALL)[1]
    commands = commands.replace(".venv/bin/python", sys.executable).replace("build/release", str(folder))
    done = subprocess.run(["bash", "-ec", commands], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def interpreter(wheel, tmp_path_factory):
    """The interpreter of an environment that holds the wheel, and sees this one's packages but nothing else of ours."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    found = folder / "bin/python"
    words = [found, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(words, check=True, env=plain_environment())
    paths = sysconfig.get_paths("venv", {"base": str(folder)})
    Path(paths["purelib"], "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return found


def plain_environment():
    """As a user's, who has set nothing."""
    ours = ("PYTHONPATH", "KERAS_BACKEND", "LAUNCH_ID", "TF_CONFIG")
    return {name: value for name, value in os.environ.items() if name not in ours} | {"CUDA_VISIBLE_DEVICES": ""}


def run(interpreter, folder, *words):
    """A finished process, started in a folder with the user's program alone."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(PROGRAM.read_text())
    return subprocess.run([interpreter, *words], cwd=folder, env=plain_environment(), capture_output=True, text=True)


def evaluation(done):
    """The last line of the program's output: its loss and accuracy."""
    assert done.returncode == 0, done.stderr
    return [float(each) for each in done.stdout.splitlines()[-1].split()]


@pytest.mark.slow
def test_the_wheel_holds_the_library_alone(wheel, interpreter):
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert {path.parts[0] for path in names} == {"keras_replicas", info}
    assert wheel.name.split("-")[1] == keras_replicas.__version__ and Path(info, "licenses/LICENSE") in names
    modules = {path.relative_to(ROOT) for path in LIBRARY}
    assert modules | {Path("keras_replicas/py.typed")} == {path for path in names if path.parts[0] == "keras_replicas"}
    assert subprocess.check_output([interpreter, "-I", "-m", "keras_replicas"], text=True).startswith("usage: ")
    for module in ("common", "recipes"):
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}))"
        assert subprocess.check_output([interpreter, "-I", "-c", code], text=True) == "None\n"


@pytest.mark.slow
def test_the_program_computes_the_same_on_one_replica_two_and_two_workers(interpreter, tmp_path):
    ways = {"1": ["train.py", "1"], "2": ["train.py", "2"]}
    ways["workers"] = ["-m", "keras_replicas", "launch", "--workers", "2", "train.py"]
    found = {name: evaluation(run(interpreter, tmp_path / name, *words)) for name, words in ways.items()}
    for name in found:
        assert found[name] == pytest.approx(found["1"], rel=1e-6)
    assert found["1"][1] > 0.9


@pytest.mark.slow
def test_the_program_that_was_killed_ends_as_if_it_had_not_been(interpreter, tmp_path):
    undisturbed = evaluation(run(interpreter, tmp_path / "undisturbed", "train.py"))
    (folder := tmp_path / "killed").mkdir()
    shutil.copy(PROGRAM, folder)
    options = {"cwd": folder, "env": plain_environment(), "text": True}
    with subprocess.Popen([interpreter, "-u", "train.py"], stdout=subprocess.PIPE, **options) as killed:
        next(line for line in killed.stdout if "Epoch 3/5" in line)
        killed.kill()
    assert killed.returncode == -9
    again = run(interpreter, folder, "train.py")
    assert evaluation(again) == undisturbed
    assert "Epoch 1/5" not in again.stdout and "Epoch 5/5" in again.stdout
