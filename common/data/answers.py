# SPDX-License-Identifier: Apache-2.0
"""Rows of dialogues for a causal language model: one dialogue in a row, with labels on the answers only.

The messages of a dialogue are marked in the form that the tokenizer has tokens for, one of `CHAT_FORMS`, or else by the
speaker's name before each and a line break after it. A row begins with the tokenizer's start token, if there is one. It
ends with its end token, which is a label, so that a model learns where to stop.
"""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import keras_hub
import numpy as np

from keras_replicas import UserError

from ..files import cached
from .dialogues import ANSWERS, Dialogue
from .rows import NO_LABEL, Rows, fingerprint, open_rows, write_rows
from .vocabulary import encode

# What precedes a message and what follows it, if the tokenizer has these tokens: Gemma's, Qwen's ChatML, Llama 3's.
CHAT_FORMS = (
    ("<start_of_turn>{role}\n", "<end_of_turn>\n"),
    ("<|im_start|>{role}\n", "<|im_end|>\n"),
    ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
)
PLAIN = ("{role}: ", "\n")
MARK = re.compile(r"(<[^<>\s]+>)")


def answer_rows(
    dialogues: dict[str, list[Dialogue]], tokenizer: keras_hub.models.Tokenizer, length: int
) -> dict[str, Rows]:
    """The rows of each split's dialogues, cut to `length` tokens; those that then have no label are left out, and told.

    Raises:
        UserError: when that leaves a split without a row.
    """

    def write(path: Path) -> None:
        splits = {}
        for split, part in dialogues.items():
            rows = [row[:length] for row in _encoded(part, tokenizer)]
            splits[split] = [row for row in rows if (row >= 0).any()]
            if lost := len(rows) - len(splits[split]):
                print(
                    f"{split}: {lost} of {len(rows)} prompts leave no room for an answer, and are left out", flush=True
                )
            if not splits[split]:
                raise UserError(
                    f"{split}: no prompt leaves room for an answer in {length - 1} tokens: take longer rows"
                )
        write_rows(path, splits, length, tokenizer, {})

    return open_rows(cached("answers", [json.dumps([dialogues, fingerprint(tokenizer), length])], write))


def _encoded(dialogues: list[Dialogue], tokenizer: keras_hub.models.Tokenizer) -> Iterator[np.ndarray]:
    """The ids of each dialogue, those of no label as `NO_LABEL` minus the id."""
    spoken = encode((text for dialogue in dialogues for _, text in dialogue), tokenizer)
    form, marked = chat_form(tokenizer), functools.cache(functools.partial(marked_ids, tokenizer=tokenizer))
    for dialogue in dialogues:
        parts = [NO_LABEL - np.array([tokenizer.start_token_id])] if tokenizer.start_token_id is not None else []
        for role, _ in dialogue:
            before, behind = ("", "") if role in ("prompt", "response") else form
            name = "model" if role == "assistant" and form == CHAT_FORMS[0] else role  # Gemma's name for it
            said = np.concatenate([next(spoken), marked(behind)])
            parts += [NO_LABEL - marked(before.format(role=name))]
            parts += [said if role in ANSWERS else NO_LABEL - said]
        yield np.concatenate([*parts, [tokenizer.end_token_id]]).astype(np.int32)


def chat_form(tokenizer: keras_hub.models.Tokenizer) -> tuple[str, str]:
    """What precedes a message, with `{role}` in it, and what follows it: the tokenizer's own form, or the plain one."""
    known = {*tokenizer.get_vocabulary()}
    own = [form for form in CHAT_FORMS if {*MARK.findall("".join(form))} <= known]
    return own[0] if own else PLAIN


def marked_ids(text: str, tokenizer: keras_hub.models.Tokenizer) -> np.ndarray:
    """The ids of what precedes or follows a message, in which `<...>` is one token."""
    parts = filter(None, MARK.split(text))
    ids = [[tokenizer.token_to_id(p)] if MARK.fullmatch(p) else next(encode([p], tokenizer)) for p in parts]
    return np.concatenate([np.empty(0, np.int32), *ids]).astype(np.int32)
