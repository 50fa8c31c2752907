# SPDX-License-Identifier: Apache-2.0
"""Rows of .tsv, .csv and .jsonl files, each with where it stands, for messages."""

import csv
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_replicas import UserError

SUFFIXES = (".tsv", ".csv", ".jsonl")
Row = tuple[str, dict[str, Any]]  # where it is, such as `dev.tsv, line 7`; and its values, by column


def read_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a UTF-8 file, with or without a byte-order mark; empty lines are skipped.

    Python's own readers leave each value as it stands: those of `datasets` make times of texts such as "2026-01-01",
    and numbers of others, and move or fill the fields of a line that has too many or too few.

    Args:
        path: its suffix gives the format: `.jsonl`, an object on each line; `.csv` (RFC 4180); or `.tsv`, as GLUE's
            files, in which a quotation mark is a part of the text. A table's first line names its columns.
        columns: of a table whose first line is a row already, as in GLUE's CoLA.

    Raises a `UserError` when there is no such file, or it is malformed: it gives the line, counted from 1.
    """
    where = str(path)

    def lines() -> Iterator[str]:
        nonlocal where
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n").replace("\r", " ")

    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} must end in one of {', '.join(SUFFIXES)}")
    csv.field_size_limit(2**31 - 1)  # of the process; by default, a text of 128 KiB is an error
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    table = None if path.suffix == ".jsonl" else csv.DictReader(lines(), columns or None, strict=True, **form)
    try:
        for row in table or map(json.loads, filter(str.strip, lines())):
            if not isinstance(row, dict):
                raise UserError("not a JSON object, with a value for each column")
            names = [*(table.fieldnames or ())] if table else []
            if table and (None in row or None in row.values() or len(row) < len(names)):
                raise UserError(f"not one field for each column, or two columns of one name: {shortened(names)}")
            json.dumps(row, ensure_ascii=False).encode()  # fails where half a surrogate pair could not be saved
            yield where, row
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise UserError(f"{where}: {error}") from error


def shortened(words: Iterable[str]) -> str:
    """Words with commas between them, for a message: one line, cut short."""
    return textwrap.shorten(", ".join(words), 100, placeholder=" ...")
