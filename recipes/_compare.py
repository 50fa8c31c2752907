# SPDX-License-Identifier: Apache-2.0
"""How far two finished runs are apart: losses, weights, TensorBoard."""

import json
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def differences(run: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Relative differences of two runs, by what is compared."""
    ours, theirs = (weights_of(Path(each["config"]["workdir"])) for each in (run, other))
    # In theory the biases of attention's keys have no gradient: their values are rounding noise.
    theirs = {name: weight for name, weight in theirs.items() if not name.endswith("key_dense/vars/1") and weight.any()}
    away = {name: float(np.linalg.norm(ours[name] - theirs[name])) for name in theirs}
    size = {name: float(np.linalg.norm(theirs[name])) for name in theirs}
    losses = [(a["loss"], b["loss"]) for a, b in zip(steps_of(run), steps_of(other), strict=True)]
    return {
        "loss of every step": max(relative(a, b) for a, b in losses),
        "weights": math.hypot(*away.values()) / math.hypot(*size.values()),
        "every tensor": max(away[name] / size[name] for name in theirs),
        "validation": max(relative(run[name], other[name]) for name in ("val_loss", "val_accuracy")),
    }


def relative(a: float, b: float) -> float:
    """The difference of two numbers, relative to the second; infinite where one is not finite."""
    return abs(a - b) / abs(b) if math.isfinite(a) and b else (0.0 if a == b else math.inf)


def steps_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of `steps.jsonl`."""
    lines = (Path(run["config"]["workdir"]) / "steps.jsonl").read_text().splitlines()
    return [{name: math.nan if value is None else value for name, value in json.loads(line).items()} for line in lines]


def last_loss(run: dict[str, Any]) -> float:
    """Mean of the last five steps' losses."""
    return sum(step["loss"] for step in steps_of(run)[-5:]) / 5


def weights_of(workdir: Path) -> dict[str, Any]:
    """Every array of a run's preset, backbone and head, by its name."""
    weights: dict[str, Any] = {}
    for path in sorted((workdir / "preset").glob("*.weights.h5")):
        with h5py.File(path) as file:
            names: list[str] = []
            file.visit(names.append)
            weights |= {f"{path.stem} {name}": file[name][()] for name in names if isinstance(file[name], h5py.Dataset)}
    return weights


def board_difference(run: dict[str, Any]) -> float:
    """The largest difference of a loss in TensorBoard's file from `steps.jsonl`, both in float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    board = EventAccumulator(str(Path(run["config"]["workdir"]) / "tensorboard"), {"tensors": 0})
    board.Reload()
    shown = [float(make_ndarray(event.tensor_proto)) for event in board.Tensors("train/loss")]
    return max(abs(a - float(np.float32(b["loss"]))) for a, b in zip(shown, steps_of(run), strict=True))
