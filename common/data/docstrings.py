# SPDX-License-Identifier: Apache-2.0
"""English text that every installation has: docstrings, and CPython's help topics."""

import importlib.metadata
import importlib.util
import json
import platform
import pydoc_data.topics
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..files import cached

PACKAGES = ("keras", "keras_hub", "numpy")
HELD_OUT = 10  # one module in this many is for validation
STRINGS = re.compile(r'(?P<indentation>^[ \t]*[rR]?)?"""(?P<text>.*?)"""', re.DOTALL | re.MULTILINE)


def docstring_file() -> Path:
    """A JSON object with the documents of the splits `train` and `validation`, each a module's prose.

    It is extracted once for each set of package versions.
    """
    versions = [platform.python_version(), *map(importlib.metadata.version, PACKAGES)]

    def write(path: Path) -> None:
        path.write_text(json.dumps(_prose_by_split()), encoding="utf-8")

    return cached("docstrings.json", [*versions, Path(__file__).read_text(encoding="utf-8")], write)


def _texts_by_module() -> Iterator[tuple[str, Iterable[str]]]:
    """(module, its texts), read without importing the packages."""
    yield "pydoc_data.topics", pydoc_data.topics.topics.values()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec and spec.origin, f"{package} is not installed"
        root = Path(spec.origin).parent
        for file in sorted(root.rglob("*.py")):
            yield str(file.relative_to(root.parent)), _docstrings_of(file)


def _docstrings_of(file: Path) -> Iterator[str]:
    """The strings in three quotes that stand by themselves; parsing the code would take ten times as long."""
    for string in STRINGS.finditer(file.read_text(encoding="utf-8", errors="replace")):
        if string["indentation"] is not None:
            yield string["text"]


def _is_prose(paragraph: str) -> bool:
    """At least ten words, no example code, and four characters in five are letters or spaces."""
    letters = sum(c.isalpha() or c.isspace() for c in paragraph)
    is_code = ">>>" in paragraph or "```" in paragraph
    return len(paragraph.split()) >= 10 and not is_code and letters > 0.8 * len(paragraph)


def _prose_by_split() -> dict[str, list[str]]:
    """The paragraphs of prose, each once, split by a hash of the module's name.

    Validation paragraphs that share eight consecutive words with the training text are dropped.
    """
    train: list[list[str]] = []
    validation: list[list[str]] = []
    seen: set[str] = set()
    for module, texts in _texts_by_module():
        prose = (" ".join(p.split()) for text in texts for p in re.split(r"\n\s*\n", text) if _is_prose(p))
        if paragraphs := [paragraph for paragraph in dict.fromkeys(prose) if paragraph not in seen]:
            seen.update(paragraphs)
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
