# SPDX-License-Identifier: Apache-2.0
"""Rows of tables as labelled texts."""

import contextlib
import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.data.tables import Row, name_columns
from common.errors import UserError

HELD_OUT = 10  # one example in this many is the validation split of data without one


@dataclass(frozen=True)
class Examples:
    """One split."""

    texts: list[tuple[str, ...]]  # one or two of each example
    labels: list[int] | None  # indices of classes; None if the split has no labels, as GLUE's test
    indices: list[str]  # names of the examples in predictions: by GLUE's column `index`, or else 0, 1, 2, ...


@dataclass(frozen=True)
class LabelledTexts:
    """A data set."""

    classes: list[str]  # their names, as in the files
    splits: dict[str, Examples]  # "train", "validation", and "test" where there is one
    submission: str  # file name that GLUE wants for predictions of the test split; for other data, `test.tsv`


def find_classes(rows: list[Row], label: str) -> list[str]:
    """The distinct labels in a column, sorted by value where all are numbers, otherwise as texts.

    Raises:
        UserError: when the column is not there, or a label is neither a text nor a whole number.
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
        rows: of the table.
        texts: names of one or two columns.
        label, classes: name of a column, or None where the labels are not to be read; and what may stand in it.
        index: name of the column that names the examples; None to number them.

    Raises:
        UserError: when a column is not there, a text is not a string, or a label is not one of the classes.
    """
    labels: list[int] = []
    found = Examples([], None if label is None else labels, [])
    places = {name: place for place, name in enumerate(classes)}
    for number, (where, row) in enumerate(rows):
        found.texts.append(tuple(_text(where, row, name) for name in texts))
        found.indices.append(str(number if index is None else row.get(index, number)))
        if label is not None:
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
    if not isinstance(value, str) or not _is_unicode(value) or set(value) & set("\t\r\n"):
        raise UserError(f"{where}: {name} must be a string of one line or an integer; got {json.dumps(value)}")
    return value


def _value(where: str, row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise UserError(f"{where} has no column {name}; it has {name_columns(row)}")
    return row[name]


def _is_unicode(text: str) -> bool:
    """False if it has a lone surrogate, which JSON allows: such a text cannot be saved."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
