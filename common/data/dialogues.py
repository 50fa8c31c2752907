# SPDX-License-Identifier: Apache-2.0
"""Prompts with answers, from `.jsonl` files: what is asked, and what a model should say in reply.

A line has either a `prompt` and a `response`, two strings, which follow one another as they are; or `messages`, a list
of objects, each with a `role` (system, user or assistant) and a `content`, a string. The answers are the responses, and
what the assistant says.
"""

import functools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_replicas import UserError

from .corpora import Documents
from .tables import read_rows, shortened

Dialogue = list[tuple[str, str]]  # who speaks (one of `ROLES`; or `prompt`, then `response`), and what is said
ROLES = ("system", "user", "assistant")
ANSWERS = ("response", "assistant")
HELD_OUT = 10  # one dialogue in this many is the validation split of a single file


def is_dialogues(data: str) -> bool:
    """Whether this is a file or a folder of dialogues, not a folder of something else."""
    path = Path(data)
    return path.suffix == ".jsonl" or any((path / f"{split}.jsonl").is_file() for split in ("train", "validation"))


def read_dialogues(data: str) -> dict[str, list[Dialogue]]:
    """The dialogues of each split.

    Args:
        data: a `.jsonl` file, of which one dialogue in 10, chosen by a hash of its text, is held out for validation; or
            a folder with `train.jsonl`, `validation.jsonl` and, if there, `test.jsonl`.

    Raises:
        UserError: when a file is missing or malformed (with the line, counted from 1), or a split is empty.
    """
    path = Path(data)
    splits: dict[str, list[Dialogue]] = {"train": [], "validation": []}
    if path.suffix == ".jsonl":
        for dialogue in _dialogues(path):
            held_out = zlib.crc32("\n".join(text for _, text in dialogue).encode()) % HELD_OUT == 0
            splits["validation" if held_out else "train"].append(dialogue)
    else:
        names = [*splits, *(["test"] if (path / "test.jsonl").is_file() else [])]
        splits = {split: list(_dialogues(path / f"{split}.jsonl")) for split in names}
    if empty := [split for split, dialogues in splits.items() if not dialogues]:
        raise UserError(f"{data} has too few dialogues: none is left for {' and '.join(empty)}")
    return splits


def said_in(dialogues: dict[str, list[Dialogue]]) -> dict[str, Documents]:
    """All that is said in dialogues, as the splits of a `Corpus`."""
    return {split: functools.partial(_messages_of, part) for split, part in dialogues.items()}


def _messages_of(dialogues: list[Dialogue]) -> Iterator[str]:
    return (text for dialogue in dialogues for _, text in dialogue)


def _dialogues(path: Path) -> Iterator[Dialogue]:
    for where, row in read_rows(path):
        if "messages" in row:
            yield [*_messages(where, row["messages"])]
        elif "prompt" in row and "response" in row:
            yield [(name, _text(f"{where}: {name}", row[name])) for name in ("prompt", "response")]
        else:
            found = shortened(row) or "nothing"
            raise UserError(f"{where} must have prompt and response, or messages; it has {found}")


def _messages(where: str, messages: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{where}: messages must be a list of objects, each with a role and a content")
    for message in messages:
        if (role := message.get("role")) not in ROLES:
            got = shortened([repr(role)])
            raise UserError(f"{where}: a message's role must be one of {', '.join(ROLES)}; got {got}")
        yield role, _text(f"{where}: a message's content", message.get("content"))
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{where}: no message has the role assistant, so that there is nothing to learn")


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{what} must be a string; got {shortened([repr(value)])}")
    return value
