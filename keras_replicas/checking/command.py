# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_replicas check FILE:FUNCTION`."""

import argparse
import runpy
import sys
from pathlib import Path

import tensorflow as tf

from keras_replicas.checking import check
from keras_replicas.checking.report import table_of
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
    function = runpy.run_path(file, run_name=Path(file).stem).get(name)
    if not callable(function):
        raise UserError(f"{file} has no function {name!r}: give FILE:FUNCTION, as in models.py:sample")
    result = check(function, batch_size=options.batch_size, replicas=options.replicas, steps=options.steps)
    print(result)
    if result.differences:
        print(table_of(result.differences, options.replicas))
    return 0 if result else 1
