# SPDX-License-Identifier: Apache-2.0
"""The command line of every recipe, whose options are the fields of its `Config`, and what it shows on the terminal.

Nothing here imports TensorFlow, so that `--help` and invalid options respond at once.
"""

import contextlib
import dataclasses
import errno
import io
import logging
import os
import re
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, TypeVar

import tyro

from keras_replicas import UserError

from .options import FIRST, marks_of, option

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
LOST_WORKER = ("UnavailableError", "DeadlineExceededError", "AbortedError", "CancelledError")


def parse(config_class: type[Config], recipe_doc: str, arguments: Sequence[str] | None = None) -> Config:
    """Reads a recipe's options from the command line.

    `--help` lists the options marked `FIRST` first, and the others in a box of their own, each with its default.

    Args:
        config_class: a dataclass with one field per option; `batch_size` becomes `--batch-size`.
        recipe_doc: the recipe's docstring, shown by `--help`.
        arguments: those after the recipe's name; None for this process's own. With None, Ctrl-C asks the run to save
            and exit, as SIGTERM does; a second Ctrl-C ends the process at once.

    Raises:
        SystemExit: 0 after `--help` and a completion script; 2, after one line on standard error, for invalid options.
    """
    if arguments is None and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # ignored in a script's background
        signal.signal(signal.SIGINT, _ask_to_stop)
    stderr, marks = io.StringIO(), marks_of(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    own_first = sorted(fields, key=lambda name: name not in config_class.__annotations__)
    first, more = ([n for n in own_first if (FIRST in marks[n]) == is_first] for is_first in (True, False))
    parts = {"first": first, "more": more}
    boxes = {name: _part(config_class, {each: fields[each] for each in part}) for name, part in parts.items()}
    boxes["first"] = Annotated[boxes["first"], tyro.conf.arg(name="")]
    in_boxes: Any = dataclasses.make_dataclass("Options", boxes.items())  # tyro writes "more options" above the second
    try:
        with until_reader_leaves(), contextlib.redirect_stderr(stderr):
            found, unknown = tyro.cli(
                in_boxes,
                prog=Path(sys.argv[0]).stem,  # the recipe's name, for `run` and for the file itself
                description=recipe_doc,
                args=arguments,
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
            )
        if unknown:
            raise UserError(f"unknown option {unknown[0]}. The options are: {' '.join(map(option, first + more))}")
        if (backend := os.environ.get("KERAS_BACKEND", "tensorflow")) != "tensorflow":
            raise UserError(f"the recipes need TensorFlow as Keras's backend, not {backend!r}: unset KERAS_BACKEND")
        return config_class(**vars(found.first), **vars(found.more))
    except UserError as error:
        fail(error)
    except SystemExit as exit_:
        if exit_.code != 2:  # None after a completion script
            raise
        fail(_first_paragraph(stderr.getvalue()))


def run(main: Callable[[Config], None], config: Config) -> None:
    """Calls `main(config)`, and turns expected errors into a message and an exit status.

    That is 2 after a `UserError`, and 1 if the disk is full, or another worker has died or cannot be reached. What the
    library logs is printed.
    """
    logger = logging.getLogger("keras_replicas")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [_Printing()]  # one, however often it is called
    try:
        with until_reader_leaves():
            main(config)
    except UserError as error:
        fail(error)
    except Exception as error:
        # TensorFlow's message has the whole graph, and the user made no mistake. A worker that hung gets errors of
        # other types from the workers that gave it up, saying that they have restarted.
        lost = type(error).__name__ in LOST_WORKER or " restarted" in str(error)
        if "TF_CONFIG" not in os.environ or not lost:
            raise
        told = [line for line in str(error).splitlines() if re.search("aborted by|task:|Barrier", line)]
        sys.stdout.flush()
        print(f"error: lost another worker. {' '.join(told)}", file=sys.stderr, flush=True)
        os._exit(1)  # a regular exit waits for the lost worker for some 20 seconds, and keeps the port and the lock


@contextlib.contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Exits with status 141 and no message, as on SIGPIPE, when the reader of the output is gone, as in `... | head`.

    SIGPIPE itself would also end the process at a socket whose other end has closed. If standard output is closed,
    output is dropped; characters that its encoding lacks are printed as `?`. On a full disk, the status is 1, after one
    line.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, not at the interpreter's end
    except BrokenPipeError:
        if not (left := [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]):
            raise
        for stream in left:
            _drop(stream)
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        told = [line for line in str(error).splitlines() if os.strerror(errno.ENOSPC) in line]  # TensorFlow's, too
        if not told:
            raise
        _drop(sys.stdout)
        advice = "Free some space and give the same command again: a run resumes from its last checkpoint"
        print(f"error: {told[0]}. {advice}", file=sys.stderr)
        raise SystemExit(1) from None


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    with contextlib.suppress(OSError):  # it is no file
        poll.register(stream, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _drop(stream: TextIO) -> None:
    """Drops what is written; the interpreter would report at its end what it cannot write."""
    with contextlib.suppress(OSError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(message: object) -> NoReturn:
    """Ends the process with one line on standard error and exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Captures standard error, including C++ output; prints it only if the block fails.

    TensorFlow 2.21's C++ logs during its import do not obey `TF_CPP_MIN_LOG_LEVEL` (tensorflow/tensorflow#100442).
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except BaseException:
            held_back.seek(0)
            os.write(stderr, held_back.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


class _Printing(logging.Handler):
    """Prints messages as they are."""

    def emit(self, record):
        """Prints one, on a line of its own: a progress bar may be in the last one."""
        print(f"\n{record.getMessage()}", flush=True)


def _ask_to_stop(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if callable(signal.getsignal(signal.SIGTERM)):  # else there is nothing to save
        os.write(2, b"\nSaving a checkpoint, then stopping. Press Ctrl-C again to quit at once.\n")
    signal.raise_signal(signal.SIGTERM)


def _part(config_class: type, fields: dict[str, dataclasses.Field]) -> Any:
    """The same class with some of the options only: tyro still finds its source, whose comments are the help."""
    own = {
        "__dataclass_fields__": fields,
        "__init__": lambda self, **values: self.__dict__.update(values),
        "__doc__": "",
    }
    return type(config_class.__name__, (config_class,), {**vars(config_class), **own})


def _first_paragraph(box: str) -> str:
    """The message of tyro's framed error, without the frame and the help text under it."""
    lines = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    rule = next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))
    return " ".join(lines[:rule]) or box.strip()
