# SPDX-License-Identifier: Apache-2.0
"""Batch size and learning rate by the number of replicas.

N replicas take N times the examples of one in each step, so that a step's time stays and an epoch has 1/N of the steps.
The learning rate follows by one of these rules:

- `linear`, times N: Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677. For SGD, with a warm-up.
- `sqrt`, times the square root of N: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural
  networks", arXiv:1404.5997; derived for Adam by Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive
  Gradient Algorithms", arXiv:2205.10287; used with LAMB by You et al. 2019, arXiv:1904.00962.
- `none`: as given.

`auto` is linear for SGD and the square root for adaptive optimizers. One step of N times the examples stands for N
small ones. SGD's step is the rate times the gradient: N times the rate goes as far. Adam divides by the gradient's
size, which is mostly noise; N times the examples make that √N times smaller, so that a step at the same rate goes √N
times as far along the mean gradient already, and √N times the rate does the rest. Linear scaling goes √N times too far.
"""

import math
from typing import Literal

ScalingRule = Literal["linear", "sqrt", "none"]
LearningRateScaling = Literal["auto", ScalingRule]


def scaling_rule(asked: LearningRateScaling, optimizer: str) -> ScalingRule:
    """The rule that was asked for; for `auto`, the optimizer's: linear for `sgd`, the square root for any other."""
    if asked == "auto":
        return "linear" if optimizer == "sgd" else "sqrt"
    return asked


def learning_rate_factor(rule: ScalingRule, num_replicas: int) -> float:
    """What a learning rate chosen for one replica is multiplied by for `num_replicas`."""
    return {"linear": float(num_replicas), "sqrt": math.sqrt(num_replicas), "none": 1.0}[rule]
