# SPDX-License-Identifier: Apache-2.0
"""What can be told to be wrong before TensorFlow is imported, and told in words that name the mend."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from common.errors import UserError

# The least value of each knob that has one; the knobs below it are shares of a whole, and rates.
AT_LEAST = {
    "batch_size": 1,
    "epochs": 1,
    "checkpoint_every": 1,
    "steps_per_loop": 1,
    "accumulate": 1,
    "steps_per_execution": 1,
    "replicas": 0,
    "max_steps": 0,
    "shards": 0,
    "seed": 0,
    "seq_length": 3,  # [CLS], a token, [SEP]
    "vocabulary_size": 100,
}
# The most of each; beyond, NumPy takes no seed, and memory or time would end before it is told.
AT_MOST = {"seed": 2**32 - 1, "replicas": 2**10, "batch_size": 2**20, "seq_length": 2**16, "shards": 2**16}
MOST = 2**31 - 1  # of any other
SHARES = ("mask_rate", "dropout", "warmup")
RATES = ("learning_rate", "weight_decay", "clip_norm", "decay_power")


def check_options(config: Any) -> None:
    """Checks what the options of a recipe's `Config` have in common: ranges, and where their files lie.

    Raises:
        UserError: for the first thing that is wrong.
    """
    knobs = dataclasses.asdict(config)
    for name, least in AT_LEAST.items():
        most = AT_MOST.get(name, MOST)
        _require(knobs.get(name, least) >= least, knobs, name, f"at least {least}")
        _require(knobs.get(name, least) <= most, knobs, name, f"at most {most}")
    for name in SHARES:
        _require(0 <= knobs.get(name, 0) < 1, knobs, name, "a share in [0, 1)")
    _require(knobs.get("mask_rate", 1) > 0, knobs, "mask_rate", "above 0")
    for name in RATES:
        value = knobs.get(name, 0)
        _require(math.isfinite(value) and value >= 0, knobs, name, "a finite number, 0 or more")
    step_range(knobs.get("profile_steps", ""))
    check_accumulate(knobs.get("accumulate", 1), config.batch_size)
    for name in ("workdir", "corpus"):
        if knobs.get(name) == "":  # which as a path is the current folder
            raise UserError(f"--{name} is empty: name one, or leave it out")
    _require(
        not re.search(r"[\[\]*?\\]", knobs["workdir"]),
        knobs,
        "workdir",
        "a name without [ ] * ? \\, which TensorFlow globs",
    )
    for name in ("preset", "corpus", "vocabulary", "data"):
        _check_not_in_workdir(knobs, name)


def step_range(text: str) -> range:
    """The steps that `A-B` names, from A to B; none for an empty text.

    Raises:
        UserError: when it is neither.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--profile-steps must be two steps with a dash, such as 10-20; got {text}")
    return range(int(found[1]), int(found[2]) + 1)


def check_accumulate(parts: int, batch_size: int) -> None:
    """Checks that a replica's batch can be computed in that many equal parts.

    Raises:
        UserError: when it cannot.
    """
    if batch_size % parts:
        raise UserError(
            f"--accumulate {parts} does not divide a replica's batch of {batch_size}. "
            f"Give one of {', '.join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)}"
        )


def _require(holds: bool, knobs: dict[str, Any], name: str, what: str) -> None:
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} must be {what}; got {knobs[name]}")


def _check_not_in_workdir(knobs: dict[str, Any], name: str) -> None:
    """What a run reads must outlive the run, which `--overwrite` deletes."""
    value, workdir = knobs.get(name) or "", Path(knobs["workdir"]).resolve()
    shards = name == "data" and "task" not in knobs  # which the run writes itself, by default there
    if not value or "://" in value or not (shards or Path(value).exists()):  # a name, or missing and told of elsewhere
        return
    path = Path(value).resolve()
    if path.is_relative_to(workdir) and not (shards and path == workdir / "data"):
        raise UserError(
            f"--{name} {value} lies in the work folder {knobs['workdir']}, of which a run may delete what it wrote. "
            "Give another --workdir"
        )
