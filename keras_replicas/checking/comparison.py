# SPDX-License-Identifier: Apache-2.0
"""Compares the trace of a run on several replicas with that of plain Keras: traces in, verdict out."""

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from keras_replicas.checking.traces import Record, Trace

# Limits on the Euclidean norm of a difference, relative to that of plain Keras's value.
RELATIVE_LIMIT = 1e-6
ROUNDING = 1e-12  # what is only that, in float64, whatever the norm
ROUNDING_FACTOR = 10  # how much larger than plain Keras's own differences ours may be
Key = tuple[str, int, str]  # of a record


class Difference(NamedTuple):
    """A value that differs.

    Attributes:
        record: plain Keras's.
        other: the value on replicas; None where it has none, or one of another shape.
        relative: the Euclidean norm of the difference, relative to plain Keras's value.
    """

    record: Record
    other: np.ndarray | None
    relative: float


class Verdict(NamedTuple):
    """What a comparison found.

    Attributes:
        differences: what differs by more than rounding, in the order of the run.
        largest: the largest relative difference of all that is within the limit, and is not rounding alone.
        steps: the number of steps that were compared.
    """

    differences: list[Difference]
    largest: float
    steps: int


def distances(plain: Trace, other: Trace) -> dict[Key, float]:
    """For each record of plain Keras, the Euclidean norm of its difference from another run's.

    It is infinite where the other run has no such record, or one of another shape, and infinite or NaN where a number
    is finite in one of the runs alone.
    """
    others = {record.key: record.value for record in other.records}
    return {record.key: _distance(record.value, others.get(record.key)) for record in plain.records}


def _distance(value: np.ndarray, other: np.ndarray | None) -> float:
    if other is None or other.shape != value.shape:
        return float("inf")
    if not np.issubdtype(value.dtype, np.number):
        return 0.0 if np.array_equal(value, other) else float("inf")
    with np.errstate(invalid="ignore"):
        difference = np.asarray(other, np.float64) - np.asarray(value, np.float64)
    is_same = (np.asarray(other) == np.asarray(value)) | (np.isnan(value) & np.isnan(other))
    return float(np.linalg.norm(np.where(is_same, 0.0, difference)))


def norm_of(value: np.ndarray) -> float:
    """The Euclidean norm of a record's finite numbers; 0 where it has none."""
    if not np.issubdtype(value.dtype, np.number):
        return 0.0
    return float(np.linalg.norm(value[np.isfinite(value)]))


def is_finite(value: np.ndarray) -> bool:
    """Whether a record's value has no NaN and no infinity."""
    return not np.issubdtype(value.dtype, np.number) or bool(np.all(np.isfinite(value)))


def largest_distances(plain: Trace, others: Iterable[Trace]) -> dict[Key, float]:
    """For each record, its largest distance from any of the other runs."""
    found = {record.key: 0.0 for record in plain.records}
    for other in others:
        for key, distance in distances(plain, other).items():
            found[key] = float(np.maximum(found[key], distance))  # NaN, if one is
    return found


def compare(plain: Trace, replicas: Trace, rounding: Mapping[Key, float], left_out: Container[str] = ()) -> Verdict:
    """Finds what differs between two runs by more than rounding.

    What only the replicas have, such as a metric of its own, is not compared.

    Args:
        plain: of plain Keras on one device.
        replicas: of the model on replicas.
        rounding: for each record, by how much plain Keras may differ from itself.
        left_out: names of weights whose gradient is rounding alone: an adaptive optimizer makes large steps of it.
    """
    found = distances(plain, replicas)
    others = {record.key: record.value for record in replicas.records}
    differences: list[Difference] = []
    largest = 0.0
    for record in plain.records:
        if record.weight in left_out:
            continue
        distance = found[record.key]
        norm = norm_of(record.value)
        allowed = max(ROUNDING_FACTOR * rounding[record.key], RELATIVE_LIMIT * norm + ROUNDING)
        if not distance <= allowed:
            differences.append(Difference(record, others.get(record.key), distance / (norm or 1.0)))
        elif ROUNDING_FACTOR * rounding[record.key] <= RELATIVE_LIMIT * norm:
            largest = max(largest, distance / (norm + ROUNDING / RELATIVE_LIMIT))
    return Verdict(differences, largest, steps=max(record.step for record in plain.records))
