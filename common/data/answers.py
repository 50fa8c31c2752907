# SPDX-License-Identifier: Apache-2.0
"""Dialogues for a causal language model: one per sequence, similar lengths in a batch, labels on the answers only.

The messages of a dialogue are marked in the form that the tokenizer has tokens for, one of `CHAT_FORMS`, or else by the
speaker's name before each and a line break after it. A sequence begins with the tokenizer's start token, if there is
one, and ends with its end token, which is a label, so that a model learns where to stop.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import keras_hub
import numpy as np
import tensorflow as tf

from common.data.by_length import batches_by_length, lengths_of, padded_length
from common.data.dialogues import ANSWERS, Dialogue
from common.data.encoding import token_ids
from common.data.order import steps_per_epoch
from common.data.packed_text import as_prompts
from common.training.scaling import Scaled
from keras_replicas import UserError

# What precedes a message and what follows it, if the tokenizer has these tokens: Gemma's, Qwen's ChatML, Llama 3's.
CHAT_FORMS = (
    ("<start_of_turn>{role}\n", "<end_of_turn>\n"),
    ("<|im_start|>{role}\n", "<|im_end|>\n"),
    ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
)
PLAIN = ("{role}: ", "\n")
MARK = re.compile(r"(<[^<>\s]+>)")
STEPS = 2**31 - 1  # stands for endless epochs


@dataclass(frozen=True)
class Encoded:
    """One split, encoded."""

    ids: np.ndarray  # int32 [dialogues, longest]
    lengths: np.ndarray  # int32 [dialogues]: the rest is padding
    is_label: np.ndarray  # bool [dialogues, longest]


@dataclass(frozen=True)
class Answers:
    """The dialogues of each split, and the preprocessor, which has their tokenizer."""

    splits: dict[str, Encoded]
    preprocessor: keras_hub.models.CausalLMPreprocessor
    few_lengths: bool  # pad batches to a multiple of 32 tokens, because XLA compiles for each length; else of 4

    @classmethod
    def of(
        cls,
        dialogues: dict[str, list[Dialogue]],
        preprocessor: keras_hub.models.CausalLMPreprocessor,
        few_lengths: bool = False,
    ) -> "Answers":
        """Encodes all splits, and cuts what is longer than the preprocessor's `sequence_length`.

        Raises:
            UserError: when that leaves a split without an answer.
        """
        tokenizer, room = preprocessor.tokenizer, preprocessor.sequence_length + 1
        splits = {split: encode(part, tokenizer, room) for split, part in dialogues.items()}
        for split, part in dialogues.items():
            if not len(splits[split].ids):
                raise UserError(f"{split}: no prompt leaves room for an answer in --seq-length {room - 1}. Give more")
            if lost := len(part) - len(splits[split].ids):
                print(
                    f"{split}: {lost} of {len(part)} prompts leave no room for an answer, and are left out", flush=True
                )
        return cls(splits, preprocessor, few_lengths)

    @property
    def tokenizer(self) -> keras_hub.models.Tokenizer:
        """The tokenizer of the ids."""
        return self.preprocessor.tokenizer

    def sizes(self) -> dict[str, int]:
        """The number of dialogues in each split."""
        return {split: len(part.ids) for split, part in self.splits.items()}

    def checksums(self) -> dict[str, int]:
        """A checksum of the ids and labels of each split."""
        return {split: zlib.crc32(part.is_label.data, zlib.crc32(part.ids.data)) for split, part in self.splits.items()}

    def count_tokens(self) -> dict[str, tuple[int, int]]:
        """The number of dialogues in each split, and of tokens in them."""
        return {split: (len(part.ids), int(part.lengths.sum())) for split, part in self.splits.items()}

    def steps(self, split: str, global_batch_size: int) -> int:
        """Steps in which every dialogue of a split is used once."""
        return steps_per_epoch(len(self.splits[split].ids), global_batch_size)

    def rows(
        self, split: str, scaled: Scaled, seed: int | None, first_step: int = 0, num_shards: int = 1, shard: int = 0
    ) -> tf.data.Dataset:
        """As `PackedText.rows`, but as long as the global batch's longest dialogue, rounded up.

        Without a seed, the shortest dialogues come first.
        """
        part = self.splits[split]
        with tf.device("CPU"):
            all_ids, lengths, labels = (tf.constant(values) for values in (part.ids, part.lengths, part.is_label))
        steps = range(first_step, self.steps(split, scaled.global_batch_size) if seed is None else STEPS)

        def read(examples):
            own = tf.maximum(examples, 0)
            width = 1 + padded_length(examples, lengths - 1, 32 if self.few_lengths else 4)
            ids, is_label = (tf.gather(values, own)[:, :width] for values in (all_ids, labels))
            is_token = tf.range(tf.shape(ids)[1]) < lengths_of(examples, lengths)[:, None]
            return ids, is_token, is_label & is_token

        return batches_by_length(steps, lengths, scaled, seed, read, num_shards, shard)

    def prompts(self, count: int = 3) -> list[str]:
        """The beginnings of the first dialogues of the validation split, up to their first answers."""
        part = self.splits["validation"]
        firsts = part.is_label[:count].argmax(axis=1)
        return as_prompts([ids[:first] for ids, first in zip(part.ids, firsts, strict=False)], self.preprocessor)


def encode(dialogues: Sequence[Dialogue], tokenizer: keras_hub.models.Tokenizer, room: int) -> Encoded:
    """Dialogues as ids, cut to `room` tokens; those that then have no label are left out."""
    spoken = token_ids([(text,) for dialogue in dialogues for _, text in dialogue], tokenizer)
    texts, rows = (ids for (ids,) in spoken), []
    form = chat_form(tokenizer)
    for dialogue in dialogues:
        parts = [(tokenizer.start_token_id, False)] if tokenizer.start_token_id is not None else []
        for role, _ in dialogue:
            before, behind = ("", "") if role in ("prompt", "response") else form
            own = role in ANSWERS
            parts += [(token, False) for token in marked_ids(before.format(role=_name(role, form)), tokenizer)]
            parts += [(token, own) for token in [*next(texts), *marked_ids(behind, tokenizer)]]
        rows.append([*parts, (tokenizer.end_token_id, True)][:room])
    rows = [row for row in rows if any(is_label for _, is_label in row)]
    lengths = np.array([len(row) for row in rows], np.int32)
    ids = np.zeros((len(rows), lengths.max(initial=0)), np.int32)
    is_label = np.zeros(ids.shape, bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)], is_label[number, : len(row)] = zip(*row, strict=True)
    return Encoded(ids, lengths, is_label)


def chat_form(tokenizer: keras_hub.models.Tokenizer) -> tuple[str, str]:
    """What precedes a message, with `{role}` in it, and what follows it: the tokenizer's own form, or the plain one."""
    known = {*tokenizer.get_vocabulary()}
    own = [form for form in CHAT_FORMS if {*MARK.findall("".join(form))} <= known]
    return own[0] if own else PLAIN


def marked_ids(text: str, tokenizer: keras_hub.models.Tokenizer) -> list[int]:
    """The ids of what precedes or follows a message, in which `<...>` is one token."""
    ids: list[int] = []
    for part in filter(None, MARK.split(text)):
        ids += [tokenizer.token_to_id(part)] if MARK.fullmatch(part) else token_ids([(part,)], tokenizer)[0][0]
    return ids


def _name(role: str, form: tuple[str, str]) -> str:
    return "model" if role == "assistant" and form == CHAT_FORMS[0] else role  # Gemma's name for it
