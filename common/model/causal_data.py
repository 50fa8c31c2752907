# SPDX-License-Identifier: Apache-2.0
"""What a causal language model is trained on: text, prompts with answers, or rows that are there already."""

import functools

import keras_hub

from ..data.byte_pairs import train_byte_pairs
from ..data.corpora import Documents, open_corpus
from ..data.dialogues import answer_rows, is_dialogues, read_dialogues, said_in
from ..data.row_folders import open_folder
from ..data.rows import Rows, corpus_rows
from .causal_lm import make_preprocessor


def causal_rows(
    corpus: str, data: str, preset: str, vocabulary_size: int, seq_length: int
) -> tuple[keras_hub.models.CausalLMPreprocessor, dict[str, Rows]]:
    """A model's preprocessor, which has the tokenizer, and each split's rows: one token longer than a sequence.

    All text of a corpus becomes one row, with the tokenizer's end token and, if it is another one, its start token
    between documents, and each row begins with the last token of the one before: every token but the first is a label.

    Args:
        corpus: see `open_corpus`; used if there are no `data`.
        data: prompts with answers, see `read_dialogues`; or a folder of rows of text, whose length they have.
        preset: whose tokenizer it is; empty for one trained on the text.
        vocabulary_size: of that one.
        seq_length: tokens of a sequence.

    Raises:
        UserError: when there is no such data or preset, or they do not belong together.
    """
    make = functools.partial(make_preprocessor, preset, seq_length=seq_length)
    if data and not is_dialogues(data):
        rows, tokenizer = open_folder(data)
        return make(tokenizer), rows
    texts: Documents
    if data:
        dialogues = read_dialogues(data)
        texts, source = functools.partial(said_in, dialogues["train"]), repr(dialogues)
    else:
        opened = open_corpus(corpus)
        texts, source = opened.splits["train"], opened.fingerprint
    preprocessor = make(None if preset else train_byte_pairs(texts, source, vocabulary_size))
    tokenizer = preprocessor.tokenizer
    if data:
        return preprocessor, answer_rows(dialogues, tokenizer, seq_length + 1)
    start, end = tokenizer.start_token_id, tokenizer.end_token_id
    before, after = (start,) if start is not None else (), (end,) if end != start else ()
    return preprocessor, corpus_rows(opened, tokenizer, seq_length + 1, before=before, after=after, overlap=1)
