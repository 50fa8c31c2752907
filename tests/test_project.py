"""What readers and contributors find beside the code: the reference of the public names, the public CI, the version."""

import inspect
import pydoc
import re
import tomllib

import yaml
from packaging.specifiers import SpecifierSet
from sphinx.cmd.build import build_main

import keras_replicas
from tests.conftest import ROOT, python


def test_the_reference_builds_without_a_warning_and_has_each_public_name_and_argument(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = re.search(r"python -m sphinx (.+?)`", (ROOT / "CONTRIBUTING.md").read_text())[1].split()
    assert {"-nW", "build/reference"} < {*words}
    assert build_main([*words[:-1], str(tmp_path)]) == 0, capsys.readouterr().err
    names = {*re.findall(r'id="(keras_replicas\.[\w.]+)"', (tmp_path / "index.html").read_text())}
    assert {f"keras_replicas.{name}" for name in keras_replicas.__all__} < names
    for name in names:
        thing = pydoc.locate(name)
        assert thing is None or thing.__doc__, name  # None: an attribute, which has its words in those of its class
        function = thing.__init__ if inspect.isclass(thing) else thing
        if inspect.isfunction(function):
            for argument in inspect.signature(function).parameters.keys() - {"self", "args", "kwargs"}:
                assert re.search(rf"^ +\**{argument}: |`{argument}`", thing.__doc__ or "", re.M), f"{name}: {argument}"


def test_the_public_ci_runs_each_part_of_ours_but_other_pythons_of_which_it_has_all():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job, parts = workflow["jobs"]["run"], re.findall(r"^(\w+)\(\) \{$", (ROOT / ".ci/run").read_text(), re.M)
    matrix, commands = job["strategy"]["matrix"], [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run install ${{ matrix.part }}"] and workflow["permissions"] == {"contents": "read"}
    named = {"install", *matrix["part"], *(each["part"] for each in matrix["include"])}
    assert named | {"other_python"} == {*parts}
    allowed = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    assert matrix["python"] == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed]


def test_files_that_others_read_are_of_their_form():
    for schema, file in (("github-workflows", ".github/workflows/ci.yml"), ("citation-file-format", "CITATION.cff")):
        done = python("-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", file)
        assert done.returncode == 0, done.stdout


def test_the_version_is_the_changelogs_newest_and_the_citations():
    newest = re.search(r"^## (\S+), ", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert keras_replicas.__version__ == newest == cited
