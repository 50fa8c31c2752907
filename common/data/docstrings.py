# SPDX-License-Identifier: Apache-2.0
"""English text that every installation has: docstrings, and CPython's help topics."""

import ast
import functools
import importlib.metadata
import importlib.util
import json
import platform
import pydoc_data.topics
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from common.files import cached_file

PACKAGES = ("keras", "keras_hub", "numpy")
HELD_OUT = 10  # one module in this many is for validation


def docstring_files() -> dict[str, Path]:
    """Extracts the text, once for each set of package versions.

    Returns:
        For the splits `train` and `validation`, a file of JSON strings, one a line; each is a module's prose.
    """
    versions = [platform.python_version(), *map(importlib.metadata.version, PACKAGES)]
    key = [*versions, Path(__file__).read_text(encoding="utf-8")]

    def write(split: str, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(document) + "\n" for document in splits()[split])

    @functools.cache
    def splits() -> dict[str, list[str]]:
        return _split_modules(_prose_by_module())

    return {
        split: cached_file(f"docstrings-{split}.jsonl", [*key, split], functools.partial(write, split))
        for split in ("train", "validation")
    }


def _prose_by_module() -> Iterator[tuple[str, list[str]]]:
    """(module, its paragraphs of prose), read without importing the packages; without duplicate paragraphs."""
    seen = set()

    def prose(texts: Iterator[str]) -> list[str]:
        found = []
        for paragraph in (" ".join(p.split()) for text in texts for p in re.split(r"\n\s*\n", text) if _is_prose(p)):
            if paragraph not in seen:
                seen.add(paragraph)
                found.append(paragraph)
        return found

    yield "pydoc_data.topics", prose(iter(pydoc_data.topics.topics.values()))
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec and spec.origin, f"{package} is not installed"
        root = Path(spec.origin).parent
        for file in sorted(root.rglob("*.py")):
            yield str(file.relative_to(root.parent)), prose(_docstrings_of(file))


def _docstrings_of(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _is_prose(paragraph: str) -> bool:
    """At least ten words, no example code, and four characters in five are letters or spaces."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    return (
        len(paragraph.split()) >= 10
        and ">>>" not in paragraph
        and "```" not in paragraph
        and letters > 0.8 * len(paragraph)
    )


def _split_modules(modules: Iterator[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Splits by a hash of the module's name; drops validation paragraphs with eight consecutive words of training."""
    train: list[list[str]] = []
    validation: list[list[str]] = []
    for module, paragraphs in modules:
        if paragraphs:
            (validation if zlib.crc32(module.encode()) % HELD_OUT == 0 else train).append(paragraphs)
    known = {words for paragraphs in train for p in paragraphs for words in _eight_words(p)}
    validation = [[p for p in paragraphs if known.isdisjoint(_eight_words(p))] for paragraphs in validation]
    return {
        "train": ["\n".join(paragraphs) for paragraphs in train],
        "validation": ["\n".join(paragraphs) for paragraphs in validation if paragraphs],
    }


def _eight_words(paragraph: str) -> Iterator[int]:
    words = re.findall(r"\w+", paragraph.lower())
    return (hash(tuple(words[i : i + 8])) for i in range(max(len(words) - 7, 1)))
