"""What is private of Keras and TensorFlow is named in one file, and is where it was."""

import ast
import functools
import re
from collections import namedtuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas import private
from keras_replicas.strategy import make_strategy
from tests.conftest import ROOT, imported, on_replicas

SEAM = ROOT / "keras_replicas" / "private.py"
FILES = sorted(path for room in ("keras_replicas", "common", "recipes") for path in (ROOT / room).rglob("*.py"))
PRIVATE = ("keras.src", "keras_hub.src", "keras_nlp.src", "tensorflow.python")
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}  # of a named tuple, and of os


Row = namedtuple("Row", "owner name purpose advice")


def rows_of(text: str) -> list[Row]:
    found, owner = [], ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"Of (.*):", line):
            owner = heading[1]
        elif line.startswith("- "):
            found.append(Row(owner, *re.fullmatch(r"- `(\w+)`: (.*); (.*)", line).groups()))
    return found


ROWS = rows_of(private.__doc__)


def private_modules(code: str) -> list[str]:
    found = [*imported(code)]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):  # `keras.src.backend`, once anything has imported it
            found.append(ast.unparse(node).replace("tf.", "tensorflow.", 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # for `importlib` or `getattr`
            found.append(node.value)
            found += [f"{package}.{node.value}" for package in ("keras", "keras_hub") if node.value == "src"]
    return [name for name in found if any(f"{name}.".startswith(f"{package}.") for package in PRIVATE)]


@pytest.mark.parametrize("path", [path for path in FILES if path != SEAM], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_file_imports_private_modules(path):
    assert private_modules(path.read_text(encoding="utf-8")) == []


def attributes_and_definitions(trees) -> tuple[set[str], set[str]]:
    """Names of private attributes that code reads, sets or asks for by `getattr`; and those that it defines itself."""
    used, defined = set(), set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            used |= {each.value for each in node.args if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                stored = [n for n in ast.walk(each) if isinstance(getattr(n, "ctx", None), ast.Store)]
                defined |= {n.id for n in stored if isinstance(n, ast.Name)}
                if isinstance(each, ast.FunctionDef):
                    defined.add(each.name)
                    defined |= {n.attr for n in stored if isinstance(n, ast.Attribute) and each.name == "__init__"}
    return {name for name in used if str(name).startswith("_") and not str(name).startswith("__")}, defined


def test_every_private_attribute_is_in_the_table():
    """As far as a syntax tree can tell: names that the library's own classes define are taken for theirs."""
    trees = [ast.parse(path.read_text()) for path in FILES if path.is_relative_to(SEAM.parent)]
    used, defined = attributes_and_definitions(trees)
    table = {row.name for row in ROWS}
    assert used - defined - table - PUBLIC == set()
    by_name = {"_ema_weights_in_model"}  # in fit_state.py's list
    assert table - used - by_name - {"_make_function", "_maybe_symbolic_build"} == set()  # else remove the row


@functools.cache
def compiled():
    layers = [keras.Input([2]), keras.layers.Dense(2), keras.layers.BatchNormalization()]
    model = on_replicas(*layers, metrics=["mse"])
    owners = {}
    keep = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: owners.update(epochs=model._fit_iterator))
    model.fit(np.ones((4, 2)), np.ones((4, 2)), steps_per_epoch=1, batch_size=4, callbacks=[keep], verbose=0)
    plain = keras.Sequential(layers)
    plain.compile("sgd", "mse")
    return model, plain, owners["epochs"]


def distributed():
    data = tf.data.Dataset.from_tensors(np.ones([2, 2])).unbatch().batch(2)
    return make_strategy(2).experimental_distribute_dataset(data)


OWNERS = {
    "a model": lambda: compiled()[1],
    "a compiled model's losses": lambda: compiled()[0]._compile_loss,
    "what Keras's fit iterates over": lambda: compiled()[2],
    "a loss of a function": keras.losses.MeanSquaredError,
    "a metric of a function": keras.metrics.MeanSquaredError,
    "a layer BatchNormalization": lambda: compiled()[0].layers[1],
    "a layer": lambda: keras.layers.Dense(1),
    "any strategy, by its attribute extended": lambda: make_strategy(2).extended,
    "a layer Dense": lambda: compiled()[0].layers[0],
    "a Keras variable": lambda: compiled()[0].layers[0].kernel,
    "an output of softmax or sigmoid": lambda: keras.ops.softmax(np.ones([1, 2], np.float32)),
    "an optimizer": lambda: compiled()[0].optimizer,
    "a callback SwapEMAWeights": keras.callbacks.SwapEMAWeights,
    "a mirrored strategy, by its attribute extended": lambda: make_strategy(2).extended,
    "a mirrored variable": lambda: compiled()[0].layers[0].kernel.value,
    "a distributed data set's spec": lambda: distributed().element_spec,
    "an iterator over a distributed data set": lambda: iter(distributed()),
    "an adapter of arrays": lambda: private.get_data_adapter(np.ones([2, 2])),
    "the module multi_device_iterator_ops": lambda: private.multi_device_iterator_ops,
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.owner}.{row.name}")
def test_a_private_attribute_is_where_it_was(row):
    gone = f"{row.owner} has no {row.name} ({row.purpose}), as it had in {private.CHECKED_VERSIONS}: {row.advice}"
    assert hasattr(OWNERS[row.owner](), row.name), gone
