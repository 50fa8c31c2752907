# SPDX-License-Identifier: Apache-2.0
"""Options shared by the recipes, and the checks of them that do not need TensorFlow."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Literal

from common.model.sizes import dimensions
from common.training.scaling import LearningRateScaling
from keras_replicas import UserError

Precision = Literal["auto", "float32", "mixed_bfloat16", "mixed_float16"]

MOST = 2**31 - 1
# The least and the greatest value of each option that has bounds: NumPy takes no larger seed, and greater values of the
# others would use up memory or time before an error.
BOUNDS = {
    "batch_size": (1, 2**20),
    "epochs": (1, MOST),
    "checkpoint_every": (1, MOST),
    "steps_per_loop": (1, MOST),
    "accumulate": (1, MOST),
    "steps_per_execution": (1, MOST),
    "replicas": (0, 2**10),
    "max_steps": (0, MOST),
    "shards": (0, 2**16),
    "lora_rank": (1, 2**10),
    "seed": (0, 2**32 - 1),
    "seq_length": (3, 2**16),  # [CLS], a token, [SEP]
    "vocabulary_size": (100, MOST),
}
SHARES = ("mask_rate", "dropout", "warmup")
RATES = ("learning_rate", "weight_decay", "clip_norm", "decay_power")

# The options that people use first: `--help` lists those that a recipe has before its others, in this order.
FIRST = (
    "workdir",
    "corpus",
    "task",
    "data",
    "text_columns",
    "label_column",
    "preset",
    "model",
    "batch_size",
    "learning_rate",
    "epochs",
    "replicas",
    "overwrite",
    "dry_run",
)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of every recipe; its `Config` adds its own.

    Raises:
        UserError: when a value is out of range, or an input of the run is inside its work directory.
    """

    replicas: int = 0  # 0: all GPUs, or the CPU split in 2; N: N GPUs, or a single GPU or the CPU split in N
    lr_scaling: LearningRateScaling = "auto"  # learning rate by replicas; auto: linear for sgd, else sqrt
    max_steps: int = 0  # stop after this many steps; 0: no limit
    precision: Precision = "auto"  # dtype policy; auto: by the hardware and the model
    deterministic: bool = False  # on GPUs: bit-reproducible runs, and float32 without TF32; slower
    seed: int = 0  # of weights, data order, masks and dropout
    checkpoint_every: int = 100  # steps between checkpoints, from which an interrupted run resumes
    overwrite: bool = False  # start afresh in a workdir that holds a run; if interrupted, the same command resumes

    def __post_init__(self):
        _check(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class FitOptions(RunOptions):
    """Options of recipes that train with Keras's `fit`."""

    accumulate: int = 1  # gradient accumulation: parts of a replica's batch, to save memory; the batch stays
    jit: bool = False  # compile each replica's forward and backward pass with XLA
    steps_per_execution: int = 1  # steps per call; a signal to stop takes effect at its end
    profile_steps: str = ""  # A-B: profile these steps, for TensorBoard's profile tab


@dataclasses.dataclass(frozen=True)
class LanguageModelOptions(FitOptions):
    """Options of recipes that train a language model."""

    dry_run: bool = False  # print the plan, and the memory of three steps; write nothing


def set_learning_rate(config: Any, preset: str = "") -> None:
    """Sets a language model's `learning_rate` if it was not given.

    From a preset, the rate is small: a step that suits random weights would destroy a preset's. With Muon, it falls
    with the model's width, as the best one did when measured; see docs/small-budget.md. Adapters, which begin at zero,
    take a larger one.
    """
    if config.learning_rate is None:
        of_width = 0.64 / dimensions(config.model or "tiny")["hidden_dim"] if config.optimizer == "muon" else 5e-4
        of_preset = 1e-3 if getattr(config, "lora_rank", None) else 1e-4
        object.__setattr__(config, "learning_rate", of_preset if preset else of_width)  # the options are frozen


def step_range(text: str) -> range:
    """The steps that `A-B` names, from A to B; none for an empty text. Raises a `UserError` for any other text."""
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--profile-steps must be a range of steps, such as 10-20; got {text}")
    return range(int(found[1]), int(found[2]) + 1)


def check_accumulate(parts: int, batch_size: int) -> None:
    """Raises a `UserError` if a replica's batch cannot be computed in that many equal parts."""
    if batch_size % parts:
        raise UserError(
            f"--accumulate {parts} does not divide the batch of {batch_size} on each replica. "
            f"Choose one of {', '.join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)}"
        )


def _check(options: dict[str, Any]) -> None:
    for name, (least, most) in BOUNDS.items():
        value = least if options.get(name) is None else options[name]
        _require(value >= least, options, name, f"at least {least}")
        _require(value <= most, options, name, f"at most {most}")
    for name in SHARES:
        _require(0 <= options.get(name, 0) < 1, options, name, "in [0, 1)")
    _require(options.get("mask_rate", 1) > 0, options, "mask_rate", "above 0")
    for name in RATES:
        value = options.get(name)
        _require(value is None or (math.isfinite(value) and value >= 0), options, name, "a finite number, 0 or more")
    step_range(options.get("profile_steps", ""))
    check_accumulate(options.get("accumulate", 1), options["batch_size"])
    for name in ("workdir", "corpus"):
        if options.get(name) == "":  # as a path, the current directory
            raise UserError(f"--{name} is empty: name one, or leave it out")
    _require(
        not re.search(r"[\[\]*?\\]", options["workdir"]),
        options,
        "workdir",
        "a path without [ ] * ? \\, which TensorFlow reads as a pattern",
    )
    for name in ("preset", "corpus", "vocabulary", "data"):
        _check_not_in_workdir(options, name)


def _require(holds: bool, options: dict[str, Any], name: str, what: str) -> None:
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} must be {what}; got {options[name]}")


def _check_not_in_workdir(options: dict[str, Any], name: str) -> None:
    """Refuses an input that is inside the run's work directory, which `--overwrite` moves aside."""
    value, workdir = options.get(name) or "", Path(options["workdir"]).resolve()
    shards = name == "data" and "shards" in options  # written by the run itself, by default there
    if not value or "://" in value or not (shards or Path(value).exists()):  # a name, or missing and reported elsewhere
        return
    path = Path(value).resolve()
    if workdir.is_dir() and path.is_relative_to(workdir) and not (shards and path == workdir / "data"):
        raise UserError(
            f"--{name} {value} is inside the work directory {options['workdir']}, which --overwrite moves aside. "
            "Give another --workdir"
        )
