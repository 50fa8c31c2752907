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
from typing import Literal


def scale(
    batch_size: int, learning_rate: float, replicas: int, rule: Literal["sqrt", "linear", "none"]
) -> tuple[int, float]:
    """The batch size of all replicas together, and the learning rate for it, from those of one replica."""
    factor = {"linear": float(replicas), "sqrt": math.sqrt(replicas), "none": 1.0}[rule]
    print(f"global batch: {batch_size} examples x {replicas} replica(s) = {batch_size * replicas}")
    print(f"peak learning rate: {learning_rate * factor:g}, {rule} scaling of {learning_rate:g}", flush=True)
    return batch_size * replicas, learning_rate * factor
