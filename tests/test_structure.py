"""The rules of the house that a machine can hold."""

import ast
from pathlib import Path

import keras_hub
import keras_nlp
import pytest

from recipes.__main__ import imports

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.py") if not path.name.startswith("_"))
MODULES = sorted((ROOT / "common").glob("*.py"))


def test_keras_nlp_is_keras_hub():
    assert keras_nlp.models.BertMaskedLM is keras_hub.models.BertMaskedLM


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_common_never_imports_recipes(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "recipes"]


def test_imports_in_common_form_no_circle():
    arrows = {path.stem: {n.split(".")[1] for n in imports(path) if n.startswith("common.")} for path in MODULES}
    while arrows:
        leaves = {name for name, others in arrows.items() if not others & set(arrows)}
        assert leaves, f"a circle among {sorted(arrows)}"
        arrows = {name: others for name, others in arrows.items() if name not in leaves}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_one_page_that_imports_no_other(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "recipes"]
    assert len(path.read_text().splitlines()) <= 250
    functions = {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert {"Config", "make_datasets", "build_model", "train_and_evaluate", "main"} <= functions


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_helper_bears_the_name_of_a_package(path):
    assert path.stem not in {"tokenizers", "datasets", "keras", "tensorflow", "tensorboard", "tyro", "numpy"}
