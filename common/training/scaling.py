# SPDX-License-Identifier: Apache-2.0
"""Batch size and learning rate by the number of replicas.

N replicas take N times the examples of one in each step: a step takes as long, and an epoch has 1/N of the steps.
The learning rate follows one of these rules:

- `linear`, times N: Goyal et al. 2017, arXiv:1706.02677. For SGD, with a warm-up: one step of N times the examples
  replaces N small ones and, with N times the rate, goes as far.
- `sqrt`, times the square root of N: Krizhevsky 2014, arXiv:1404.5997; derived for Adam by Malladi et al. 2022,
  arXiv:2205.10287. Adam divides by the gradient's size, which is mostly noise; N times the examples make that √N times
  smaller, so that a step at the same rate already goes √N times as far along the mean gradient, and √N times the rate
  does the rest.
- `none`: as given.
"""

import math
from typing import Literal, NamedTuple

ScalingRule = Literal["linear", "sqrt", "none"]
LearningRateScaling = Literal["auto", ScalingRule]


class Scaled(NamedTuple):
    """Batch size per replica, global batch size, and peak learning rate."""

    batch_size: int
    global_batch_size: int
    learning_rate: float = 0.0


def scaling_rule(asked: LearningRateScaling, optimizer: str) -> ScalingRule:
    """The rule that was asked for; for `auto`, the optimizer's: linear for `sgd`, the square root for any other."""
    if asked == "auto":
        return "linear" if optimizer == "sgd" else "sqrt"
    return asked


def learning_rate_factor(rule: ScalingRule, num_replicas: int) -> float:
    """The factor by which to multiply a learning rate chosen for one replica, to train on `num_replicas`."""
    return {"linear": float(num_replicas), "sqrt": math.sqrt(num_replicas), "none": 1.0}[rule]
