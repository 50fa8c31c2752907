# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_replicas check FILE:FUNCTION`."""

import argparse
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_replicas.checking import check
from keras_replicas.checking.report import table_of
from keras_replicas.checking.runs import line_of
from keras_replicas.errors import UserError
from keras_replicas.strategy import make_strategy


def command(options: argparse.Namespace) -> int:
    """Prints what `check` finds of the function that the command line names, and returns the exit status.

    Raises:
        UserError: when there is no such function, or as `check`.
    """
    tf.get_logger().setLevel("ERROR")  # else it warns of the many functions that are traced
    file, colon, name = options.function.rpartition(":")
    if not colon:
        raise UserError(f"{name!r} names no function: give FILE:FUNCTION, as in models.py:sample")
    if not Path(file).is_file():
        raise UserError(f"there is no file {file!r}: give FILE:FUNCTION, as in models.py:sample")
    make_strategy(options.replicas)  # before the file uses a device
    sys.path.insert(0, str(Path(file).resolve().parent))
    function = _run_file(file).get(name)
    if not callable(function):
        raise UserError(f"{file} has no function {name!r}: give FILE:FUNCTION, as in models.py:sample")
    if any(each.default is each.empty for each in _positional(function)):
        raise UserError(f"{name} must take no arguments: check calls it to make the model and the data")
    try:
        result = check(function, batch_size=options.batch_size, replicas=options.replicas, steps=options.steps)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name}, or plain Keras with what it returns, fails with {line_of(error)}. Train the model by plain Keras "
            "first"
        ) from error
    print(result)
    if result.differences:
        print(table_of(result.differences, options.replicas))
    return 0 if result else 1


def _run_file(file: str) -> dict[str, Any]:
    """The names that a Python file defines.

    Raises:
        UserError: when it fails.
    """
    try:
        return runpy.run_path(file, run_name=Path(file).stem)
    except Exception as error:
        raise UserError(f"{file} fails with {line_of(error)}") from error


def _positional(function: Callable) -> list[inspect.Parameter]:
    """The parameters of a function but for those of `*args` and `**kwargs`."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each for each in inspect.signature(function).parameters.values() if each.kind not in kinds]
