# SPDX-License-Identifier: Apache-2.0
"""Rows of .tsv, .csv and .jsonl files, each with where it stands, for messages."""

import codecs
import csv
import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_replicas import UserError

from ..files import shortened

SUFFIXES = (".tsv", ".csv", ".jsonl")
Row = tuple[str, dict[str, Any]]  # where it is, such as `dev.tsv, line 7`; and its values, by column
LEFT_OUT = 0.001  # share of malformed rows up to which a file is read without them
LONGEST = 2**27  # bytes of a line
tell = functools.cache(functools.partial(print, flush=True))  # once, as a corpus is read several times
QUOTED = re.compile('"([^"]|"")*"')  # a field in quotation marks, those in it doubled


def read_rows(path: Path, columns: Sequence[str] = (), *, glue: bool = False, all_rows: bool = False) -> Iterator[Row]:
    """The rows of a UTF-8 file, or one in UTF-16 as Excel saves "Unicode text"; empty lines are skipped.

    Python's own readers leave each value as it stands: those of `datasets` make times of texts such as "2026-01-01",
    and numbers of others, and move or fill the fields of a line that has too many or too few.

    Args:
        path: its suffix gives the format: `.jsonl`, an object on each line; `.csv` (RFC 4180), divided by the comma,
            semicolon or tab, whichever its first line has most; or `.tsv`, in which a quotation mark is a part of the
            text, unless each field that begins with one is quoted. A table's first line names its columns.
        columns: of a table whose first line is a row already, as in GLUE's CoLA.
        glue: whether it is a file of GLUE's, in which no field is quoted.
        all_rows: whether each counts, as where predictions have a row's number.

    Raises a `UserError` when there is no such file, or it is malformed: it gives the line, counted from 1. Malformed
    rows, up to `LEFT_OUT` of all, are else dropped, and their number is printed.
    """
    where, suffix = str(path), path.suffix.lower()

    def lines() -> Iterator[str]:
        nonlocal where
        with path.open("rb") as file:
            text: Any = file
            first = file.readline(LONGEST)
            file.seek(0)
            if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                text = io.BytesIO(file.read(LONGEST).decode("utf-16").encode())
                first = text.getvalue().partition(b"\n")[0]
            if b"\r" in first.rstrip(b"\r\n"):  # lines end as on an old Mac
                text = io.BytesIO(text.read(LONGEST).replace(b"\r", b"\n"))
            if text is not file and file.read(1):
                raise ValueError("too long a file in this form: save it in UTF-8, with the line ends of Unix")
            for number, line in enumerate(iter(lambda: text.readline(LONGEST), b""), 1):
                where = f"{path}, line {number}"
                if len(line) == LONGEST:
                    raise ValueError(f"{LONGEST:,} bytes without the end of a line")
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n").replace("\r", " ")

    if suffix not in SUFFIXES:
        raise UserError(f"{path} must end in one of {', '.join(SUFFIXES)}")
    csv.field_size_limit(2**31 - 1)  # of the process; by default, a text of 128 KiB is an error
    malformed, rows = [], 0
    try:
        is_json = suffix == ".jsonl"
        for row in map(json.loads, filter(str.strip, lines())) if is_json else _table(lines, path, columns, glue):
            if is_json and not isinstance(row, dict):
                raise ValueError("not a JSON object, with a value for each column")
            rows += 1
            json.dumps(row, ensure_ascii=False).encode()  # fails where half a surrogate pair could not be saved
            if isinstance(row, dict):
                yield where, row
            else:
                malformed.append(f"{where}: {row}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {error}") from error
    if len(malformed) > (0 if all_rows else LEFT_OUT * rows):
        raise UserError(malformed[0])
    if malformed:
        tell(f"{len(malformed)} of {rows} rows are malformed, and dropped. {malformed[0]}")


def _table(
    lines: Callable[[], Iterator[str]], path: Path, columns: Sequence[str], glue: bool
) -> Iterator[dict[str, Any] | str]:
    """The rows of a table; for one that is malformed, what is wrong."""
    first, is_csv = next(filter(str.strip, lines()), ""), path.suffix.lower() == ".csv"
    delimiter = max(",;\t", key=first.count) if is_csv else "\t"
    fields_of_tsv = itertools.chain.from_iterable(line.rstrip("\n").split("\t") for line in lines())
    all_quoted = (QUOTED.fullmatch(field) for field in fields_of_tsv if field.startswith('"'))
    is_quoted = is_csv or not glue and all(all_quoted)
    form: dict[str, Any] = {"delimiter": delimiter, "quoting": csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE}
    table = _records(csv.reader(lines(), strict=True, **form), path)
    names = [name.strip() for name in columns or next(table, [])]
    named, shown = [name for name in names if name], shortened(map(repr, names))
    if len({*named}) < len(named):
        raise ValueError(f"two columns have the same name: {shown}")
    for fields in table:
        if len(fields) < len(names) or any(fields[len(names) :]):
            way_out = ": quote texts with one" * (is_csv and len(fields) > len(names))
            yield f"{len(fields)} fields, divided by {delimiter!r}, for {len(names)} columns, {shown}{way_out}"
        else:
            yield {name: field for name, field in zip(names, fields, strict=False) if name}


def _records(table: Any, path: Path) -> Iterator[list[str]]:
    """What a `csv.reader` reads, without empty lines. Those of several lines are told: they may be several rows."""
    begin, long = 1, []
    try:
        for fields in table:
            if (length := table.line_num + 1 - begin) > 1:
                long.append((length, begin))
            begin += length
            yield from [fields] * bool(fields)
    except csv.Error as error:
        raise ValueError(f"{error}, in the row that begins in line {begin}") from error
    if long:
        length, begin = max(long)
        told = f"{length} in the one from line {begin}: is a quotation mark there not closed?"
        tell(f"{path}: {len(long)} row(s) have several lines, {told}")
