# SPDX-License-Identifier: Apache-2.0
"""Rows of tables as labelled texts."""

import contextlib
import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.data.tables import Row, name_columns
from keras_replicas import UserError

HELD_OUT = 10  # one example in this many is the validation split of data without one
LARGEST_NUMBER = 1e12  # in float32, neither the squares of errors nor those of gradients may overflow


@dataclass(frozen=True)
class Examples:
    """One split."""

    texts: list[tuple[str, ...]]  # one or two for each example
    labels: list[int] | list[float] | None  # indices of classes, or numbers; None if unlabelled, as GLUE's test split
    indices: list[str]  # names of the examples in predictions: from GLUE's column `index`, or else 0, 1, 2, ...


@dataclass(frozen=True)
class LabelledTexts:
    """A data set."""

    classes: list[str]  # their names, as in the files; none for regression, whose labels are numbers
    splits: dict[str, Examples]  # "train", "validation", and "test" where there is one
    submission: str  # file name that GLUE wants for predictions of the test split; for other data, `test.tsv`
    metrics: tuple[str, ...] = ("accuracy", "f1")  # from `common.scores.entries`; the first is the main one
    limits: tuple[float, float] = (-math.inf, math.inf)  # to which predictions of the test split are clipped

    @property
    def label_dtype(self) -> type[np.int32] | type[np.float32]:
        """The dtype of the labels in a batch."""
        return np.int32 if self.classes else np.float32


def find_classes(rows: list[Row], label: str) -> list[str]:
    """The distinct labels in a column, sorted by value if all are numbers, otherwise as texts.

    Raises:
        UserError: when the column is missing, or a label is neither a text nor a whole number.
    """
    names = {_label(where, row, label) for where, row in rows}
    with contextlib.suppress(ValueError):
        values = {name: float(name) for name in names}
        if all(map(math.isfinite, values.values())):
            return sorted(names, key=lambda name: (values[name], name))
    return sorted(names)


def to_examples(
    rows: Iterable[Row], texts: tuple[str, ...], label: str | None, classes: list[str], index: str | None
) -> Examples:
    """The examples in the rows of a table.

    Args:
        rows: the table.
        texts: names of one or two columns.
        label: name of the labels' column; None to read no labels.
        classes: the labels that may be in it; empty if they are numbers.
        index: name of the column that names the examples; None to number them.

    Raises:
        UserError: when a column is missing, a text is not a string, or a label is not one of the classes or not a
            finite number.
    """
    labels: list[Any] = []
    found = Examples([], None if label is None else labels, [])
    places = {name: place for place, name in enumerate(classes)}
    for number, (where, row) in enumerate(rows):
        found.texts.append(tuple(_text(where, row, name) for name in texts))
        found.indices.append(str(number if index is None else row.get(index, number)))
        if label is not None and not classes:
            labels.append(_number(where, row, label))
        elif label is not None:
            name = _label(where, row, label)
            if name not in places:
                raise UserError(f"{where}: the label {name!r} is not one of {name_columns(classes)}")
            labels.append(places[name])
    return found


def hold_out(examples: Examples) -> dict[str, Examples]:
    """Divides examples into "train" and "validation", one in 10, chosen by a hash of its texts."""
    labels = examples.labels or []
    held = [zlib.crc32("\n".join(texts).encode()) % HELD_OUT == 0 for texts in examples.texts]

    def part(validation: bool) -> Examples:
        kept = [place for place, is_held in enumerate(held) if is_held == validation]
        return Examples(
            [examples.texts[place] for place in kept],
            [labels[place] for place in kept],
            [examples.indices[place] for place in kept],
        )

    return {"train": part(False), "validation": part(True)}


def _text(where: str, row: dict[str, Any], name: str) -> str:
    value = _value(where, row, name)
    if not isinstance(value, str) or not _is_unicode(value):
        raise UserError(f"{where}: {name} must be a string; got {name_columns([json.dumps(value)])}")
    return value


def _label(where: str, row: dict[str, Any], name: str) -> str:
    value = _value(where, row, name)
    if isinstance(value, int):
        return json.dumps(value)
    if value == "":
        raise UserError(f"{where}: {name} is empty. Leave out the row, or give it a label")
    if not isinstance(value, str) or not _is_unicode(value) or set(value) & set("\t\r\n"):
        advice = ". To predict numbers, give --regression" if isinstance(value, float) else ""
        raise UserError(f"{where}: {name} must be a string of one line or an integer; got {json.dumps(value)}{advice}")
    return value


def _number(where: str, row: dict[str, Any], name: str) -> float:
    """The number rounded to float32, in which the model computes: the Hub's copy of GLUE has 3.79999995 for 3.8."""
    value = _value(where, row, name)
    with contextlib.suppress(TypeError, ValueError, OverflowError), np.errstate(over="ignore"):
        number = float(np.float32(float(value)))
        if abs(number) <= LARGEST_NUMBER and not isinstance(value, bool):
            return number
    raise UserError(f"{where}: {name} must be a number from -1e12 to 1e12; got {name_columns([json.dumps(value)])}")


def _value(where: str, row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise UserError(f"{where} has no column {name}; it has {name_columns(row)}")
    return row[name]


def _is_unicode(text: str) -> bool:
    """False if a text has a lone surrogate, which JSON allows: such a text cannot be saved."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
