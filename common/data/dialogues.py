# SPDX-License-Identifier: Apache-2.0
"""Prompts with answers, from `.jsonl` files, as rows for a causal language model: labels are on the answers alone.

A line has either a `prompt` and a `response`, two strings, which follow one another as they are; or `messages`, a list
of objects, each with a `role` (system, user or assistant) and a `content`, a string. The answers are the responses, and
what the assistant says, unless the message has a `weight` of 0. Messages are marked in the form that the tokenizer has
tokens for, one of `CHAT_FORMS`, or else by the speaker's name before each and a line break after it. A row begins with
the tokenizer's start token, if there is one, and ends with its end token, which is a label after an answer, so that a
model learns where to stop.
"""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np

from keras_replicas import UserError

from ..files import cached, is_held_out, shortened
from .corpora import SPLITS
from .rows import NO_LABEL, Rows, fingerprint, open_rows, write_rows
from .tables import read_rows
from .vocabulary import encode

# Who speaks (a role; or `prompt`, then `response`), what is said, and whether it is an answer to be learned.
Dialogue = list[tuple[str, str, bool]]
ANSWERS = ("response", "assistant")
KEYS = ({"prompt", "response"}, {"messages"}, {"role", "content", "weight"})  # of a row, and of a message
NOT_LEFT_OUT = {"system", "tools", "functions", "chosen", "rejected", "tool_calls", "function_call", "tool_call_id"}
# What precedes a message and what follows it, if the tokenizer has these tokens: Gemma's, Qwen's ChatML, Llama 3's.
CHAT_FORMS = (
    ("<start_of_turn>{role}\n", "<end_of_turn>\n"),
    ("<|im_start|>{role}\n", "<|im_end|>\n"),
    ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
)
PLAIN = ("{role}: ", "\n")
MARK = re.compile(r"(<[^<>\s]+>)")


def is_dialogues(data: str) -> bool:
    """Whether this is a file or a folder of dialogues, not a folder of something else, nor empty."""
    return data.endswith(".jsonl") or data != "" and any(Path(data, f"{split}.jsonl").is_file() for split in SPLITS)


def read_dialogues(data: str) -> dict[str, list[Dialogue]]:
    """The dialogues of each split.

    They are those of a `.jsonl` file, where one dialogue in 10, chosen by a hash of its text, is held out for
    validation; or of a folder with `train.jsonl`, `validation.jsonl` and, if there, `test.jsonl`. Raises a `UserError`
    when a file is missing or malformed (with the line, counted from 1), or a split is empty.
    """
    splits: dict[str, list[Dialogue]] = {"train": [], "validation": []}
    if data.endswith(".jsonl"):
        for dialogue in _dialogues(Path(data)):
            text = "\n".join(text for _, text, _ in dialogue)
            splits["validation" if is_held_out(text) else "train"].append(dialogue)
    else:
        files = {split: Path(data, f"{split}.jsonl") for split in SPLITS}
        splits = {split: [*_dialogues(file)] for split, file in files.items() if split != "test" or file.is_file()}
    if empty := [split for split, dialogues in splits.items() if not dialogues]:
        raise UserError(f"{data} has too few dialogues: none is left for {' and '.join(empty)}")
    return splits


def said_in(dialogues: list[Dialogue]) -> Iterator[str]:
    """All that is said in dialogues."""
    return (text for dialogue in dialogues for _, text, _ in dialogue)


def answer_rows(
    dialogues: dict[str, list[Dialogue]], tokenizer: keras_hub.models.Tokenizer, length: int
) -> dict[str, Rows]:
    """The rows of each split's dialogues, cut to `length` tokens.

    Dialogues that then have no label are dropped, and their number is printed. Raises a `UserError` for an empty split.
    """

    def write(path: Path) -> None:
        splits = {}
        for split, part in dialogues.items():
            rows = [*_encoded(part, tokenizer)]
            splits[split] = [row for row in rows if (row[:length] >= 0).any()]
            if not splits[split]:
                short = f"no prompt leaves room for an answer in {length - 1} tokens: take longer sequences"
                raise UserError(f"{split}: {short}")
            if lost := len(rows) - len(splits[split]):
                dropped = f"{lost} of {len(rows)} prompts leave no room for an answer, and are dropped"
                print(f"{split}: {dropped}", flush=True)
        write_rows(path, splits, length, tokenizer, {})

    return open_rows(cached("answers", [json.dumps([dialogues, fingerprint(tokenizer), length])], write))


def chat_form(tokenizer: keras_hub.models.Tokenizer) -> tuple[str, str]:
    """What precedes a message, with `{role}` in it, and what follows it: the tokenizer's own form, or the plain one."""
    known = {*tokenizer.get_vocabulary()}
    return next((form for form in CHAT_FORMS if {*MARK.findall("".join(form))} <= known), PLAIN)


def marked_ids(text: str, tokenizer: keras_hub.models.Tokenizer) -> np.ndarray:
    """The ids of what precedes or follows a message, in which `<...>` is one token."""
    parts = filter(None, MARK.split(text))
    ids = [[tokenizer.token_to_id(p)] if MARK.fullmatch(p) else next(encode([p], tokenizer)) for p in parts]
    return np.concatenate([np.empty(0, np.int32), *ids]).astype(np.int32)


def _encoded(dialogues: list[Dialogue], tokenizer: keras_hub.models.Tokenizer) -> Iterator[np.ndarray]:
    """The ids of each dialogue, those of no label as `NO_LABEL` minus the id."""
    spoken = encode(said_in(dialogues), tokenizer)
    form, marked = chat_form(tokenizer), functools.cache(functools.partial(marked_ids, tokenizer=tokenizer))
    for dialogue in dialogues:
        parts = [NO_LABEL - np.array([tokenizer.start_token_id])] if tokenizer.start_token_id is not None else []
        for role, _, is_answer in dialogue:
            before, behind = ("", "") if role in ("prompt", "response") else form
            name = "model" if role == "assistant" and form == CHAT_FORMS[0] else role  # Gemma's name for it
            said = np.concatenate([next(spoken), marked(behind)])
            parts += [NO_LABEL - marked(before.format(role=name)), said if is_answer else NO_LABEL - said]
        end = np.array([tokenizer.end_token_id])
        yield np.concatenate([*parts, end if is_answer else NO_LABEL - end]).astype(np.int32)


def _dialogues(path: Path) -> Iterator[Dialogue]:
    left_out: set[str] = set()
    for where, row in read_rows(path):
        try:
            said: Any = [(each["role"], each["content"], each.get("weight", 1)) for each in row["messages"]]
            known, keys = {"system", "user", "assistant"}, {*row}.union(*row["messages"]) - KEYS[1] - KEYS[2]
        except (KeyError, TypeError):
            said, known = [(name, row.get(name), 1) for name in ("prompt", "response")], {"prompt", "response"}
            keys = {*row} - KEYS[0]
        roles, texts = {str(role) for role, _, _ in said}, [text for _, text, _ in said]
        dialogue = [(role, text, role in ANSWERS and weight != 0) for role, text, weight in said]
        is_valid = all(isinstance(text, str) for text in texts) and all(weight in (0, 1) for _, _, weight in said)
        if not is_valid or not roles <= known or not any(is_answer for _, _, is_answer in dialogue):
            wanted = "a prompt and a response, or messages, each with a role (system, user, assistant) and a content"
            got = shortened([json.dumps(row)])
            raise UserError(f"{where} must have {wanted}: texts, one of them an answer; it has {got}")
        if wrong := sorted(keys & NOT_LEFT_OUT):
            raise UserError(f"{where} has {shortened(wrong)}, which is not read: remove it, or put it in messages")
        if new := sorted(keys - left_out):
            print(f"{where}: {shortened(new)} is not read", flush=True)
            left_out |= keys
        yield dialogue
