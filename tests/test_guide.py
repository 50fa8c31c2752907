"""The guide: it has the form of keras.io's, its notebook is generated from it and was run, and it runs on its own."""

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import version

import nbformat
import pytest

from notebooks import tutobook
from tests.conftest import ROOT, imported

GUIDE = tutobook.GUIDES / "data_parallel_training_with_keras_hub.py"
SOURCE = GUIDE.read_text(encoding="utf-8")
NOTEBOOK = nbformat.read(GUIDE.with_suffix(".ipynb"), as_version=4)
HEADER = ["Title", "Author", "Date created", "Last modified", "Description", "Accelerator"]
RESULTS = re.compile(
    r"2 replicas, batch 64, rate 1.41e-03.*validation loss (\S+), unigram baseline (\S+)\n"
    r".*SparseCategoricalCrossentropy: relative difference at most (\S+)\n"
    r"GlobalCrossEntropy: relative difference at most (\S+)\n",
    re.DOTALL,
)


def cells(kind):
    return [cell for cell in NOTEBOOK.cells if cell.cell_type == kind]


def check_results(printed):
    """That replicas are exact with the guide's loss alone; returns how much better than the baseline the model is."""
    loss, baseline, keras_difference, difference = map(float, RESULTS.search(printed).groups())
    assert difference < 1e-6 < 1e-5 < keras_difference
    return baseline - loss


def test_it_has_the_form_of_keras_io_and_imports_what_a_reader_has():
    """Nothing of this project: it is to be read and run without it."""
    lines = SOURCE.splitlines()
    assert lines[0] == lines[7] == '"""' and not lines[8]
    fields = dict(line.split(": ", 1) for line in lines[1:7])
    assert list(fields) == HEADER
    assert all(re.fullmatch(r"\d{4}/\d\d/\d\d", fields[name]) for name in ("Date created", "Last modified"))
    assert re.fullmatch(r"[A-Z].{,98}\.", fields["Description"])
    assert len(lines) <= 250 and not [line for line in lines if len(line) > 90 or line != line.rstrip()]
    assert not [line for line in lines if '"""' in line and line != '"""']  # as keras.io's generator asks for
    others = {name.split(".")[0] for name in imported(SOURCE)} - sys.stdlib_module_names
    assert others == {"keras", "keras_hub", "numpy", "tensorflow"}


def test_it_names_the_versions_installed_and_the_issues_of_the_page():
    named = dict(re.findall(r"(Keras|KerasHub|TensorFlow)\s+(\d+\.\d+)", SOURCE))
    packages = {"Keras": "keras", "KerasHub": "keras-hub", "TensorFlow": "tensorflow"}
    assert named == {name: ".".join(version(package).split(".")[:2]) for name, package in packages.items()}
    page = (ROOT / "docs/keras-under-tf-distribute.md").read_text(encoding="utf-8")
    issues = re.findall(r"\[#(\d+)\]\(https://github.com/keras-team/keras/issues/(\d+)\)", SOURCE)
    assert issues and all(text == link and f"[#{text}]: " in page for text, link in issues)


def test_the_notebook_is_what_is_generated_and_was_run():
    generated = tutobook.notebook_of(GUIDE)
    same = [(c.cell_type, c.source) for c in NOTEBOOK.cells] == [(c.cell_type, c.source) for c in generated.cells]
    assert same, "run `python -m notebooks.tutobook`"
    header, *_ = NOTEBOOK.cells
    assert header.source.startswith("# Data-parallel training") and "**Date created:** 2" in header.source
    code = ast.parse("\n".join(cell.source for cell in cells("code")))
    tree = ast.parse(SOURCE)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    assert ast.dump(code) == ast.dump(tree)
    kinds = [cell.cell_type for cell in NOTEBOOK.cells]
    assert kinds.count("code") > 7  # words stand before each
    assert all(before == "markdown" for before, kind in zip(kinds, kinds[1:], strict=False) if kind == "code")
    assert [cell for cell in cells("markdown") if cell.source.startswith("## ")]
    assert [cell.execution_count for cell in cells("code")] == list(range(1, len(cells("code")) + 1))
    outputs = [output for cell in cells("code") for output in cell.outputs]
    assert {output.get("name") for output in outputs} == {"stdout"}
    assert check_results("".join(output.text for output in outputs)) > 0.05


@pytest.mark.slow
def test_it_runs_alone(tmp_path):
    """From an empty folder, with two epochs of its four, and a part of its text."""
    small = SOURCE.replace("EPOCHS = 4\n", "EPOCHS = 2\n").replace(' + sorted(library.glob("[a-z]*/*.py"))', "")
    assert len(small) < len(SOURCE) - 30
    (tmp_path / GUIDE.name).write_text(small, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("KERAS_BACKEND", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-I", GUIDE.name],  # -I: neither PYTHONPATH nor the user's packages
        cwd=tmp_path,
        env=environment | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    check_results(done.stdout)
    assert {path.name for path in tmp_path.iterdir()} == {GUIDE.name, "logs"}
    assert list(tmp_path.glob("logs/train/events*")) and list(tmp_path.glob("logs/validation/events*"))
