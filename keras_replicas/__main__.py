# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m keras_replicas launch | doctor`. Only `doctor` imports TensorFlow."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from keras_replicas.errors import UserError
from keras_replicas.launch import add_options, launch

GUIDE = """\
Keras 3's fit, right on N replicas under tf.distribute, and resumed to the bit.

  python -m keras_replicas launch --workers 2 train.py   run a script on two workers; -m for a module
  python -m keras_replicas doctor                        verify on this machine that training is exact

--help after a command lists its options.
"""


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser`."""
        self.exit(2, f"error: {message}. See {self.prog} --help\n")


def command_of(script: str, is_module: bool, arguments: list[str]) -> list[str]:
    """The command that runs a script or module. Raises a `UserError` if there is no such script."""
    if not is_module and not Path(script).is_file():
        raise UserError(f"there is no script {script}; give -m before the name of a module")
    return [sys.executable, *(["-m"] if is_module else []), script, *arguments]


def main() -> int:
    """Reads the command line, does what it says, and returns the exit status."""
    parser = Parser(prog="python -m keras_replicas", description="Without a command it prints a short guide.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    start = commands.add_parser("launch", help="run a script on several workers")
    add_options(start)
    start.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    start.add_argument("script", metavar="SCRIPT", help="what each worker runs, with its own arguments after it")
    start.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's arguments")
    check = commands.add_parser("doctor", help="verify on this machine that training is exact")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument("--workers", type=int, default=1, metavar="N", help="also train on N workers")
    options = parser.parse_args()
    match options.command:
        case "launch":
            return launch(options, command_of(options.script, options.is_module, options.arguments))
        case "doctor":
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
            from keras_replicas.doctor import doctor

            return doctor(as_json=options.json, workers=options.workers)
    print(GUIDE)
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    raise SystemExit(status)
