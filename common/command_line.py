# SPDX-License-Identifier: Apache-2.0
"""The options of the recipes, their command line, and what it shows on the terminal.

A recipe's options are the fields of its `Config`: what is said of one stands there, its bounds, and the marks below.
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
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import tyro

from keras_replicas import UserError

from .files import checksums, one_line, plain

if sys.stderr is None:  # it was closed; TensorFlow writes there, too
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stderr = open(2, "w")  # noqa: SIM115
LOST_WORKER = ("UnavailableError", "DeadlineExceededError", "AbortedError", "CancelledError")
MOST = 2**31 - 1
# Marks, which may stand in the `Annotated` of an option.
FIRST = "`--help` shows it before the others"
FREE = "it does not change what is computed: a resumed run may have another value"
INPUT = "a file or folder that is read: neither it nor the run's folder may lie in the other"


class Bounds(NamedTuple):
    """The least and the greatest value of a number, or None for the default."""

    least: float
    most: float


Count = Annotated[int, Bounds(1, MOST)]
Share = Annotated[float, Bounds(0, 1 - 2**-53)]
Rate = Annotated[float | None, Bounds(1e-30, 1e9)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every recipe; its `Config` adds its own, among them `workdir` and `batch_size`.

    Raises a `UserError` when a value is out of its bounds, or an input lies in the run's folder, or that in it.
    """

    # 0: all GPUs, or the CPU split in 2; N: N GPUs, or a single GPU or the CPU split in N
    replicas: Annotated[int, Bounds(0, 2**10), FIRST, FREE] = 0
    lr_scaling: Literal["sqrt", "linear", "none"] = "sqrt"  # learning rate by the number of replicas
    max_steps: Annotated[int, Bounds(0, MOST)] = 0  # stop after this many steps; 0: no limit
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"  # Keras's dtype policy
    deterministic: bool = False  # on GPUs: bit-reproducible runs, and float32 without TF32; slower
    seed: Annotated[int, Bounds(0, 2**32 - 1)] = 0  # of weights, data order, masks and dropout
    checkpoint_every: Annotated[Count, FREE] = 100  # steps between checkpoints, from which an interrupted run resumes
    # start afresh in a workdir that holds a run, which is moved aside; if interrupted, the same command resumes
    overwrite: Annotated[bool, FIRST, FREE] = False
    # print the plan, and with `fit` the memory of three steps; write nothing
    dry_run: Annotated[bool, FIRST, FREE] = False

    def __post_init__(self):
        with one_line(f"cannot use --workdir {self.workdir}", errors=(OSError, RuntimeError)):  # type: ignore[attr-defined]
            workdir = Path(self.workdir).resolve()  # type: ignore[attr-defined]
            if os.path.lexists(workdir):  # a link in a loop, which Python 3.13 resolves to itself
                os.stat(workdir)
        if "://" in self.workdir:  # type: ignore[attr-defined]
            raise UserError(f"--workdir {self.workdir} must be a folder of this machine")  # type: ignore[attr-defined]
        for name, marks in marks_of(type(self)).items():
            value = getattr(self, name)
            for least, most in (mark for mark in marks if isinstance(mark, Bounds) and value is not None):
                if not least <= value <= most:  # NaN is not, either
                    raise UserError(f"{option(name)} must be from {least} to {most}; got {value}")
            if value == "" != getattr(type(self), name):  # it would be the current folder
                raise UserError(f"{option(name)} is empty: give it a value, or leave it out")
            if INPUT in marks and os.path.exists(value) and Path(value).resolve().is_relative_to(workdir):
                raise UserError(f"{option(name)} {value} lies in the run's folder: give another --workdir")
            if INPUT in marks and os.path.isdir(value) and workdir.is_relative_to(Path(value).resolve()):
                raise UserError(f"the run's folder lies in {option(name)} {value}: give another --workdir")

    def fixed(self, recipe: str) -> dict[str, Any]:
        """What must be the same to resume the run: the recipe, options that are not `FREE`, and what is read."""
        marks = marks_of(type(self))
        fixed = {name: getattr(self, name) for name in marks if FREE not in marks[name]}
        for name in (name for name in marks if INPUT in marks[name] and getattr(self, name)):
            fixed |= checksums(name, getattr(self, name))
        return {"recipe": recipe} | fixed

    def folder(self) -> str | None:
        """Where the run is; None if it writes nothing."""
        return None if self.dry_run else self.workdir  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions(RunOptions):
    """Options of recipes that train with Keras's `fit`."""

    # gradient accumulation: parts of a replica's batch, to save memory; the batch stays
    accumulate: Annotated[Count, FREE] = 1
    jit: Annotated[bool, FREE] = False  # compile each replica's forward and backward pass with XLA

    def __post_init__(self):
        super().__post_init__()
        batch_size = self.batch_size  # type: ignore[attr-defined]
        if batch_size % self.accumulate:
            raise UserError(f"--accumulate {self.accumulate} must divide --batch-size {batch_size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelOptions(FitOptions):
    """Options of recipes that train a language model."""

    # docstrings | wikitext-2 | wikitext-103 | hf://user/name | a text file or folder
    corpus: Annotated[str, FIRST, INPUT] = "docstrings"
    seq_length: Annotated[int, Bounds(3, 2**16)] = 32  # tokens per sequence
    batch_size: Annotated[Count, FIRST] = 16  # sequences per replica in a step
    learning_rate: Annotated[Rate, FIRST] = None  # peak for one replica; default: 5e-3, or 1e-4 from a preset
    warmup: Share = 0.1  # fraction of all steps that are warm-up
    dropout: Share = 0.0  # the papers' is 0.1; with few epochs, a model learns more without
    epochs: Annotated[Count, FIRST] = 2  # passes over the text


def marks_of(options: type) -> dict[str, tuple[Any, ...]]:
    """What stands in the `Annotated` of each option, by its name."""
    hints = typing.get_type_hints(options, include_extras=True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in dataclasses.fields(options)}


def option(name: str) -> str:
    """An option as it stands on the command line: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def parse(config_class: Any, recipe_doc: str, arguments: Sequence[str] | None = None) -> Any:
    """Reads a recipe's options from the command line; exits with one line and status 2 where they are invalid.

    `--help` shows `recipe_doc`, and the fields of `config_class`, a dataclass: those marked `FIRST`, then the others.
    Without `arguments` they are this process's own, and Ctrl-C asks the run to save and exit, as SIGTERM does; a second
    Ctrl-C ends the process at once.
    """
    if arguments is None and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # ignored in a script's background
        signal.signal(signal.SIGINT, _ask_to_stop)
    stderr, marks = io.StringIO(), marks_of(config_class)
    added, fields = config_class.__annotations__, config_class.__dataclass_fields__
    in_order = {name: fields[name] for name in sorted(fields, key=lambda n: (FIRST not in marks[n], n not in added))}
    # The same class, with its fields in the order in which tyro is to show them; values are checked below.
    changed = {"__dataclass_fields__": in_order, "__post_init__": lambda self: None}
    shown: Any = type(config_class.__name__, (config_class,), {**vars(config_class), **changed})
    try:
        with until_reader_leaves(), contextlib.redirect_stderr(stderr):
            found, unknown = tyro.cli(
                shown,
                prog=Path(sys.argv[0]).stem,  # the recipe's name, for `run` and for the file itself
                description=recipe_doc,
                args=arguments,
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        if unknown:
            raise UserError(f"unknown option {unknown[0]}. The options are: {' '.join(map(option, in_order))}")
        if (backend := os.environ.get("KERAS_BACKEND", "tensorflow")) != "tensorflow":
            raise UserError(f"the recipes need TensorFlow as Keras's backend, not {backend!r}: unset KERAS_BACKEND")
        return config_class(**vars(found))
    except UserError as error:
        fail(error)
    except SystemExit as exit_:
        if exit_.code != 2:  # None after a completion script
            raise
        # The message of tyro's framed error, without the frame and the help text under it.
        lines = [line.strip("│ ") for line in stderr.getvalue().splitlines() if line.startswith("│")]
        rule = next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))
        fail(" ".join(lines[:rule]) or stderr.getvalue().strip())


def _ask_to_stop(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if callable(signal.getsignal(signal.SIGTERM)):  # else there is nothing to save
        os.write(2, b"\nSaving a checkpoint, then stopping. Press Ctrl-C again to quit at once.\n")
    signal.raise_signal(signal.SIGTERM)


def run(main: Callable[[Any], None], config: Any) -> None:
    """Calls `main(config)`, prints what the library logs, and turns expected errors into a message and an exit status.

    That is 2 after a `UserError`, and 1 if the disk is full, or another worker has died or cannot be reached.
    """
    logger, handler = logging.getLogger("keras_replicas"), logging.Handler()
    # On a line of its own: a progress bar may be in the last one.
    handler.emit = lambda record: print(f"\n{record.getMessage()}", flush=True)  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    logger.propagate, logger.handlers = False, [handler]  # one, however often it is called
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
        causes = [line for line in str(error).splitlines() if re.search("aborted by|task:|Barrier", line)]
        sys.stdout.flush()
        print(f"error: lost another worker. {' '.join(causes)}", file=sys.stderr, flush=True)
        os._exit(1)  # a regular exit waits for the lost worker for some 20 seconds, and keeps the port and the lock


@contextlib.contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Exits with status 141 and no message, as on SIGPIPE, when the reader of the output is gone, as in `... | head`.

    SIGPIPE itself would also end the process at a socket whose other end has closed. If standard output is closed,
    output is dropped; what its encoding lacks is printed as `?`. On a full disk, the status is 1, after one line.
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
    except Exception as error:
        poll = select.poll()
        with contextlib.suppress(OSError):  # it is no file
            poll.register(sys.stdout, 0)
        left = isinstance(error, BrokenPipeError) and any(event & select.POLLERR for _, event in poll.poll(0))
        no_room = [*map(os.strerror, (errno.ENOSPC, errno.EDQUOT))]  # which TensorFlow's errors tell, too
        full = [line for line in str(error).splitlines() if any(text in line for text in no_room)]
        if not full and not left:
            raise
        with contextlib.suppress(OSError):  # the interpreter would report at its end what it cannot write
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if full:
            advice = "Free some space and give the same command again: a run resumes from its last checkpoint"
            print(f"error: {full[0]}. {advice}", file=sys.stderr)
        raise SystemExit(1 if full else 128 + signal.SIGPIPE) from None


def fail(message: object) -> NoReturn:
    """Ends the process with one line on standard error and exit status 2."""
    print(f"error: {plain(message)}", file=sys.stderr)
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
