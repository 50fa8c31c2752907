# SPDX-License-Identifier: Apache-2.0
"""Lines of code by folder, without docstrings, comments and blank lines.

python -m benchmarks.lines             # by folder
python -m benchmarks.lines FOLDER      # by file
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("keras_replicas", "common", "recipes", "benchmarks", "tests")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """The number of lines that hold code."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(code - docstrings)


def of_folder(folder: Path) -> dict[Path, int]:
    """The lines of code of each Python file."""
    return {path: code_lines(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for path, lines in of_folder(ROOT / name).items():
            print(f"{lines:6} {len(path.read_text(encoding='utf-8').splitlines()):6} {path.relative_to(ROOT)}")
    for name in FOLDERS:
        files = of_folder(ROOT / name)
        whole = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        print(f"{sum(files.values()):6} {whole:6} {name}: {len(files)} files")
