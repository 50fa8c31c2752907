"""The guide: its notebook is generated from it and was run, and it runs on its own."""

import ast
import os
import re
import sys

import nbformat
import pytest

from notebooks import tutobook
from tests.conftest import python

GUIDE = tutobook.GUIDES / "data_parallel_training_with_keras_hub.py"
SOURCE = GUIDE.read_text(encoding="utf-8")
NOTEBOOK = nbformat.read(GUIDE.with_suffix(".ipynb"), as_version=4)
RESULTS = re.compile(
    r"2 replicas, batch 64, rate 1.41e-03.*validation loss (\S+), unigram baseline (\S+)\n"
    r".*SparseCategoricalCrossentropy: relative difference at most (\S+)\n"
    r"GlobalCrossEntropy: relative difference at most (\S+)\n",
    re.DOTALL,
)


def check_results(printed):
    """That replicas are exact with the guide's loss alone; returns how much better than the baseline the model is."""
    loss, baseline, keras_difference, difference = map(float, RESULTS.search(printed).groups())
    assert difference < 1e-6 < 1e-5 < keras_difference
    return baseline - loss


def test_it_imports_what_a_reader_has():
    names = re.findall(r"^(?:import|from) (\w+)", SOURCE, re.MULTILINE)
    assert set(names) - sys.stdlib_module_names == {"keras", "keras_hub", "numpy", "tensorflow"}


def test_the_notebook_is_what_is_generated_and_was_run():
    cells = [(cell.cell_type, cell.source) for cell in NOTEBOOK.cells]
    generated = tutobook.notebook_of(GUIDE)
    assert cells == [(cell.cell_type, cell.source) for cell in generated.cells], "run `python -m notebooks.tutobook`"
    code = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
    statements = ast.parse(SOURCE).body
    text = [node for node in statements if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    assert len(ast.parse("\n".join(cell.source for cell in code)).body) == len(statements) - len(text)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert check_results("".join(output.text for cell in code for output in cell.outputs)) > 0.05


@pytest.mark.slow
def test_it_runs_alone(tmp_path):
    """From an empty folder, with two epochs of its four, and a part of its text."""
    small = SOURCE.replace("EPOCHS = 4\n", "EPOCHS = 2\n").replace(' + sorted(library.glob("[a-z]*/*.py"))', "")
    assert len(small) < len(SOURCE) - 30
    (tmp_path / GUIDE.name).write_text(small, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("KERAS_BACKEND", "PYTHONPATH")}
    environment |= {"CUDA_VISIBLE_DEVICES": "-1"}
    done = python("-I", GUIDE.name, cwd=tmp_path, env=environment)  # -I: neither PYTHONPATH nor the user's packages
    assert done.returncode == 0, done.stderr[-2000:]
    check_results(done.stdout)
    assert list(tmp_path.glob("logs/train/events*")) and list(tmp_path.glob("logs/validation/events*"))
