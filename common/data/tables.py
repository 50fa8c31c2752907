# SPDX-License-Identifier: Apache-2.0
"""Rows of .tsv, .csv and .jsonl files, with messages about errors in them."""

import codecs
import csv
import io
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_replicas import UserError

SUFFIXES = (".tsv", ".csv", ".jsonl")
Row = tuple[str, dict[str, Any]]  # where it is, such as `dev.tsv, line 7`; and its values, by column


def read_rows(path: Path, header: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a UTF-8 file, with or without a byte-order mark; empty lines are skipped.

    Args:
        path: its suffix gives the format:
            - `.tsv`: names of the columns in the first line, fields separated by tabs, no quoting, as in GLUE's files:
              a quotation mark is a part of the text;
            - `.csv`: names of the columns in the first line, fields separated by commas; one in double quotes may hold
              commas, line breaks and, doubled, quotes (RFC 4180);
            - `.jsonl`: a JSON object on each line.
        header: names of the columns of a `.tsv` file whose first line is already a row, as in GLUE's CoLA.

    Raises:
        UserError: when there is no such file, or it is malformed; the message gives the line, counted from 1.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} must end in one of {', '.join(SUFFIXES)}")
    text = _read(path)
    if path.suffix == ".jsonl":
        return _objects(path, text)
    if path.suffix == ".csv":
        return _named(path, _quoted(path, text))
    return _named(path, ((number, line.split("\t")) for number, line in _lines(text)), header)


def name_columns(names: Iterable[str]) -> str:
    """Names of columns for a message, cut short in case the first line is a text."""
    return textwrap.shorten(", ".join(names), 100, placeholder=" ...")


def _read(path: Path) -> str:
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not content.strip():
        raise UserError(f"{path} is empty")
    if 0 in content:
        raise UserError(f"{path} is a binary file, not text")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line} is not UTF-8 text ({error.reason}); convert it first") from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines. Only a line feed ends one: texts may hold the other characters at which Python splits lines."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _quoted(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)  # of the process; by default, a text of 128 KiB is an error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    began = 1
    try:
        for fields in reader:
            if fields:
                yield began, fields
            began = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {began}: broken quoting ({error})") from error


def _named(path: Path, rows: Iterator[tuple[int, list[str]]], header: Sequence[str] = ()) -> Iterator[Row]:
    names = header or next(rows)[1]
    if len(set(names)) < len(names):
        raise UserError(f"{path} has two columns of the same name: {name_columns(names)}")
    for number, fields in rows:
        if len(fields) != len(names):
            given_by = "its format" if header else "the first line"
            raise UserError(
                f"{path}, line {number} has {len(fields)} fields, {given_by} {len(names)}: {name_columns(names)}"
            )
        yield f"{path}, line {number}", dict(zip(names, fields, strict=True))


def _objects(path: Path, text: str) -> Iterator[Row]:
    for number, line in _lines(text):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is not a JSON object, with a value for each column")
        yield f"{path}, line {number}", row
