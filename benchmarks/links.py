# SPDX-License-Identifier: Apache-2.0
"""How long replicas take to add up their gradients in a ring: a model, fitted to measured times.

Of B bytes among n replicas, each sends 2 (n - 1) pieces of B / n, one after another (Patarasuk and Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations"). A reduction takes a while to start, and a
round has a latency; each byte that is sent costs time in software, and time on the link, more than its share by the
headers. With a step's computing, which nothing overlaps:

    time(step) = compute + start + rounds * latency + sent * (software + headers / bandwidth)
    rounds = 2 (n - 1)
    sent = 2 (n - 1) / n * B
"""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Reduction:
    """What took a time.

    Args:
        reduced: bytes that are added up over the replicas.
        replicas: their number.
        bandwidth: of each replica's link, bytes a second; infinite where nothing holds them back.
    """

    reduced: float
    replicas: int
    bandwidth: float = math.inf

    def terms(self) -> tuple[float, float, float, float]:
        """What the four parameters of a `Link` are multiplied by."""
        rounds = 2 * (self.replicas - 1)
        sent = rounds / self.replicas * self.reduced
        return 1.0, rounds, sent, sent / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Link:
    """The fitted parameters.

    Args:
        start: seconds a reduction.
        latency: seconds a round. Two replicas alone do not tell it from `start`.
        software: seconds a byte that is sent.
        headers: bytes on the link for each byte that is sent.
    """

    start: float
    latency: float
    software: float
    headers: float

    def seconds(self, reduction: Reduction) -> float:
        """How long it takes."""
        return float(np.dot(dataclasses.astuple(self), reduction.terms()))

    def efficiency(self, compute: float, reduction: Reduction) -> float:
        """Share of a step in which replicas compute, which takes them `compute` seconds however many they are."""
        return compute / (compute + self.seconds(reduction))


def fit_link(measured: Iterable[tuple[Reduction, float, float]]) -> Link:
    """The link by which the times are nearest to those measured, by the squares of relative errors.

    A parameter that would be below 0, which noise can make of a small one, is 0.

    Args:
        measured: reductions; the seconds of the step that each is part of; and those of them that are computing.
    """
    reductions, seconds, computing = zip(*measured, strict=True)
    terms = np.array([reduction.terms() for reduction in reductions]) / np.array(seconds)[:, None]
    talking = 1 - np.array(computing) / np.array(seconds)  # as a share of the step
    scale = np.abs(terms).max(axis=0) + 1e-300  # seconds and bytes are far apart
    kept = list(range(terms.shape[1]))
    while True:
        found = np.zeros(terms.shape[1])
        found[kept] = np.linalg.lstsq((terms / scale)[:, kept], talking)[0]
        if min(found) >= 0:
            return Link(*map(float, found / scale))
        kept.remove(int(found.argmin()))
