# SPDX-License-Identifier: Apache-2.0
"""The command line of the library: `python -m keras_replicas`. Nothing here imports TensorFlow before it is needed."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from keras_replicas.errors import UserError
from keras_replicas.launch import add_options, at_least, launch


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, in place of argparse's usage text and message."""
        fail(f"{message}. See {self.prog} --help")


def fail(message: object) -> NoReturn:
    """Ends the process with one line on standard error and exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the doctor's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--replicas", type=at_least(1), metavar="N", help="check N replicas, not 2 and 4")


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Gives a parser the options of `check`."""
    parser.add_argument("function", metavar="FILE:FUNCTION", help="returns (compiled model, x, y[, sample_weight])")
    parser.add_argument("--batch-size", type=at_least(1), default=8, metavar="N", help="over all replicas together")
    parser.add_argument("--replicas", type=at_least(1), default=2, metavar="N", help="replicas on this machine")
    parser.add_argument("--steps", type=at_least(2), default=8, metavar="N", help="steps to train")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what TensorFlow's C++ code says on standard error while it is imported, and prepares Keras's import."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)


def main() -> int:
    """Reads the command line, does what it says, and returns the exit status."""
    parser = Parser(prog="python -m keras_replicas", description="Keras 3's fit, right on N replicas.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_options(commands.add_parser("launch", help="run a script on several workers"), "SCRIPT")
    add_doctor_options(commands.add_parser("doctor", help="verify on this machine that training is exact"))
    add_check_options(commands.add_parser("check", help="verify that your model trains as on one device"))
    options = parser.parse_args()
    match options.command:
        case "launch":
            return launch(options)
        case "doctor":
            with quiet():
                from keras_replicas.doctor import doctor
            return doctor(options)
        case "check":
            with quiet():
                from keras_replicas.checking.command import command
            return command(options)
    parser.print_help()
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        fail(error)
    except BrokenPipeError:  # the reader has gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter reports it at its end
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
