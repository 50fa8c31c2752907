"""The rules of the house that a machine can hold."""

import ast

import keras_hub
import keras_nlp
import pytest

from tests.conftest import ROOT, imported

RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.py") if not path.name.startswith("_"))
MODULES = sorted((ROOT / "common").rglob("*.py"))
ROOMS = sorted(path.parent for path in (ROOT / "common").glob("*/__init__.py"))


def imports(path):
    return imported(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parent.parts))


COMMANDS = [path for path in (ROOT / "recipes").glob("*.py") if path not in RECIPES]


# What it is now: it may become smaller. The aim is 3,300 lines for `common`, and 9,000 for the tests.
@pytest.mark.parametrize(
    ("files", "lines"),
    [(MODULES, 3_580), (COMMANDS, 800), ([*(ROOT / "tests").glob("*.py")], 9_970)],
    ids=["common", "commands", "tests"],
)
def test_the_house_is_small(files, lines):
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= lines


def test_keras_nlp_is_keras_hub():
    assert keras_nlp.models.BertMaskedLM is keras_hub.models.BertMaskedLM


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_common_never_imports_recipes(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "recipes"]


def test_helpers_take_values_and_no_config():
    """But for `main(config)`, which `command_line` calls."""
    for path in MODULES:
        arguments = {node.arg for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.arg)}
        assert "config" not in arguments or path.name == "command_line.py", path


def in_order(arrows):
    """The names, each after all that it points to."""
    found = []
    while len(found) < len(arrows):
        leaves = {name for name, others in arrows.items() if name not in found and others <= {*found, name}}
        assert leaves, f"a circle among {sorted(set(arrows) - set(found))}"
        found += sorted(leaves)
    return found


def modules_imported(path):
    """The modules of `common` that a file imports."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    return {files[name] for name in imports(path) if name in files}


def test_imports_in_common_form_no_circle():
    in_order({path: modules_imported(path) for path in MODULES})


def test_imports_between_rooms_run_one_way():
    arrows = {room: {path.parent for file in room.glob("*.py") for path in modules_imported(file)} for room in ROOMS}
    in_order({room: others & {*ROOMS} for room, others in arrows.items()})


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_a_room_says_what_lives_there(room):
    assert ast.get_docstring(ast.parse((room / "__init__.py").read_text()))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_one_page_that_imports_no_other(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "recipes"]
    loop = path.stem == "glue_custom_loop"  # whose point is its loop
    tree = ast.parse(path.read_text())
    assert len(path.read_text().splitlines()) <= (220 if loop else 160)
    parts = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {"Config", "make_datasets", "build_model", "train_and_evaluate", "main"} <= parts.keys()
    main_part = parts["train_and_evaluate"]
    lines = path.read_text().splitlines()[main_part.lineno - 1 : main_part.end_lineno]
    assert len(list(filter(None, lines))) <= (90 if loop else 40)  # blank lines only divide it
    ours = {
        name.asname or name.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if (node.module or "").startswith(("common", "keras_replicas"))
    } | {*parts}
    names = [node for statement in main_part.body for node in ast.walk(statement) if isinstance(node, ast.Name)]
    used = ours & {node.id for node in names} - {node.id for node in names if isinstance(node.ctx, ast.Store)}
    assert path.stem.startswith("glue") or len(used) <= 12, used
    calls = [
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert calls.count("fit") == (not path.stem.startswith("glue"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_helper_bears_the_name_of_a_package(path):
    assert path.stem not in {"tokenizers", "datasets", "keras", "tensorflow", "tensorboard", "tyro", "numpy"}
