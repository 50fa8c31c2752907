# SPDX-License-Identifier: Apache-2.0
"""How results of shards combine into those of the whole: found by comparing the numbers."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["mean", "sum", "either", "neither"]
FLOOR = 1e-2  # of the largest number of all: what rounding may be relative to, where a tensor is nothing else


class Combination(NamedTuple):
    """How results combine.

    Attributes:
        kind: "mean" where the whole's result is the mean of the shards', weighted by their examples; "sum" where it is
            their sum; "either" where both hold, as for zeros; "neither" where none does.
        difference: the smaller relative difference of the two.
    """

    kind: Kind
    difference: float


def combination_of(
    whole: Sequence[Any], shards: Sequence[Sequence[Any]], examples: Sequence[int], tolerance: float
) -> Combination:
    """Finds how arrays that a function computes of shards combine into what it computes of all examples.

    Numbers that are not finite are left out; where nothing is left, the kind is "either".

    Args:
        whole: arrays computed of all examples.
        shards: for each shard, the same arrays computed of its examples alone.
        examples: the number of examples of each shard.
        tolerance: the largest relative difference that counts as rounding.
    """
    if any(np.shape(each) != np.shape(one) for shard in shards for one, each in zip(whole, shard, strict=True)):
        return Combination("neither", float("inf"))
    total = sum(examples)
    with np.errstate(all="ignore"):  # what is not finite on one side is left out
        return _compared(whole, shards, [size / total for size in examples], tolerance)


def _compared(whole, shards, shares, tolerance) -> Combination:
    means, sums = [], []
    for number, _ in enumerate(whole):
        values = [np.asarray(shard[number], np.float64) for shard in shards]
        weighted = [value * share for value, share in zip(values, shares, strict=True)]
        means.append(sum(weighted))
        sums.append(sum(values))
    of_mean = relative_difference(whole, means)
    of_sum = relative_difference(whole, sums)
    is_mean = of_mean <= tolerance
    is_sum = of_sum <= tolerance
    difference = min(of_mean, of_sum)
    if is_mean and is_sum:
        return Combination("either", difference)
    if is_mean:
        return Combination("mean", difference)
    if is_sum:
        return Combination("sum", difference)
    return Combination("neither", difference)


def relative_difference(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """The largest difference of two lists of arrays, relative to the array's largest number.

    An array that is far smaller than the others is nothing but rounding, as the gradient of a bias before
    BatchNormalization: its differences are relative to `FLOOR` times the largest number of all.
    """
    pairs = [_finite(one, other) for one, other in zip(expected, found, strict=True)]
    sizes = [float(np.max(np.abs(one), initial=0.0)) for one, _ in pairs]
    floor = FLOOR * max(sizes, default=0.0)
    largest = 0.0
    for size, (one, other) in zip(sizes, pairs, strict=True):
        difference = float(np.max(np.abs(one - other), initial=0.0))
        if difference:
            largest = max(largest, difference / (max(size, floor) or difference))
    return largest


def _finite(one: Any, other: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of one shape without what is not finite in one of them."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    are_finite = np.isfinite(one) & np.isfinite(other)
    return one[are_finite], other[are_finite]
