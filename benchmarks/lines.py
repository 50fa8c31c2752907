# SPDX-License-Identifier: Apache-2.0
"""Counts lines of code. Docstrings, comments and blank lines do not count."""

import ast
import io
import tokenize
from pathlib import Path

NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_lines(source: str) -> int:
    """The lines of a module that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def lines_in(folder: Path) -> int:
    """The lines of code of a folder's modules."""
    return sum(count_lines(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
