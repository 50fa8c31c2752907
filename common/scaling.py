# SPDX-License-Identifier: Apache-2.0
"""Batch size and learning rate by the number of replicas.

N replicas take N times the examples of one in each step, so that a step's time stays and an epoch has 1/N of the steps.
The learning rate follows by one of these rules:

- `linear`, times N: Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677. Made for SGD, with a warm-up.
- `sqrt`, times the square root of N, which keeps the variance of a step: Krizhevsky 2014, "One weird trick for
  parallelizing convolutional neural networks", arXiv:1404.5997; derived for Adam by Malladi et al. 2022, "On the SDEs
  and Scaling Rules for Adaptive Gradient Algorithms", arXiv:2205.10287.
- `none`: as given.
"""

import math
from typing import Literal

LearningRateScaling = Literal["linear", "sqrt", "none"]


def learning_rate_factor(rule: LearningRateScaling, num_replicas: int) -> float:
    """What a learning rate chosen for one replica is multiplied by for `num_replicas`."""
    return {"linear": float(num_replicas), "sqrt": math.sqrt(num_replicas), "none": 1.0}[rule]


def global_batch_size(batch_size: int, num_replicas: int) -> int:
    """Examples in one step over all replicas, for `batch_size` examples on each."""
    return batch_size * num_replicas
