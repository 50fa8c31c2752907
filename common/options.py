# SPDX-License-Identifier: Apache-2.0
"""Options that the recipes share. What is said of an option stands at its field: its bounds, and the marks below."""

import dataclasses
import enum
import math
import os
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from keras_replicas import UserError

MOST = 2**31 - 1


class Mark(enum.Enum):
    """What may stand in the `Annotated` of an option."""

    FIRST = "`--help` shows it before the others"
    FREE = "it does not change what is computed: a resumed run may have another value"
    INPUT = "a file or folder that is read: it must not lie in the run's folder, which `--overwrite` moves aside"


FIRST, FREE, INPUT = Mark


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

    Raises:
        UserError: when a value is out of its bounds, or an input lies in the run's folder.
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
    dry_run: Annotated[bool, FIRST, FREE] = False  # print the plan, and the memory of three steps; write nothing

    def __post_init__(self):
        for name, marks in marks_of(type(self)).items():
            value = getattr(self, name)
            bounds = next((mark for mark in marks if isinstance(mark, Bounds)), None)
            if bounds and value is not None and not bounds.least <= value <= bounds.most:
                at = f"at least {bounds.least}" if value < bounds.least else f"at most {bounds.most}"
                at = "a finite number" if value in (math.inf, -math.inf) or value != value else at
                raise UserError(f"{option(name)} must be {at}; got {value}")
            if value == "" and getattr(
                type(self), name
            ):  # where the default is no path, "" would be the current folder
                raise UserError(f"{option(name)} is empty: name one, or leave it out")
            if INPUT in marks and _lies_in(str(value), self.workdir):  # type: ignore[attr-defined]
                raise UserError(f"{option(name)} {value} lies in the run's folder, which --overwrite moves aside")

    def fixed(self, recipe: str) -> dict[str, Any]:
        """What must be the same when the run is resumed: the recipe, and the options that are not `FREE`."""
        fixed = {name: getattr(self, name) for name, marks in marks_of(type(self)).items() if FREE not in marks}
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
    seq_length: Annotated[int, Bounds(3, 2**16)] = 64  # tokens per sequence
    batch_size: Annotated[Count, FIRST] = 16  # sequences per replica in a step
    learning_rate: Annotated[Rate, FIRST] = None  # peak for one replica; default: 5e-3, or 1e-4 from a preset
    warmup: Share = 0.1  # fraction of all steps that are warm-up
    dropout: Share = 0.0  # the papers' is 0.1; with few epochs, a model learns more without
    epochs: Annotated[Count, FIRST] = 3


def marks_of(options: type) -> dict[str, tuple[Any, ...]]:
    """What stands in the `Annotated` of each option, by its name."""
    hints = typing.get_type_hints(options, include_extras=True)
    return {field.name: getattr(hints[field.name], "__metadata__", ()) for field in dataclasses.fields(options)}


def option(name: str) -> str:
    """An option as it stands on the command line."""
    return "--" + name.replace("_", "-")


def _lies_in(value: str, workdir: str) -> bool:
    if not value or "://" in value or not os.path.exists(value) or not os.path.isdir(workdir):
        return False
    return Path(value).resolve().is_relative_to(Path(workdir).resolve())
