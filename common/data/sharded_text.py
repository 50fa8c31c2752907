# SPDX-License-Identifier: Apache-2.0
"""Text for a causal language model from TFRecord shards that `bert_from_scratch --architecture roberta` has written.

A record is a part of a row of tokens, between a start and an end token of its own, which are left out here: they would
end a document where none ends. So a record of n tokens has n - 3 labels.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import keras_hub
import numpy as np
import tensorflow as tf

from common.data.order import NO_EXAMPLE
from common.data.packed_text import LOOK, beginnings
from common.data.shard_reader import decode_sequences, read_shards, steps_in_shards
from common.data.shards import Shards, find_shards
from common.training.scaling import Scaled
from keras_replicas import UserError


@dataclass(frozen=True)
class ShardedText:
    """Shards, and the preprocessor, which has their tokenizer."""

    shards: Shards
    preprocessor: keras_hub.models.CausalLMPreprocessor

    @property
    def tokenizer(self) -> keras_hub.models.Tokenizer:
        """The tokenizer of the ids."""
        return self.preprocessor.tokenizer

    def sizes(self) -> dict[str, int]:
        """The number of sequences in each split."""
        return self.shards.sizes()

    def checksums(self) -> dict[str, int]:
        """A checksum of the shards of each split."""
        return self.shards.checksums()

    def count_tokens(self) -> dict[str, tuple[int, int]]:
        """The number of sequences in each split, and of labels in them."""
        labels = self.shards.manifest["seq_length"] - 3
        return {split: (size, size * labels) for split, size in self.sizes().items()}

    def steps(self, split: str, global_batch_size: int) -> int:
        """Steps in which every sequence of a split is used once."""
        return steps_in_shards(self.shards.files(split), global_batch_size)

    def rows(
        self, split: str, scaled: Scaled, seed: int | None, first_step: int = 0, num_shards: int = 1, shard: int = 0
    ) -> tf.data.Dataset:
        """As `PackedText.rows`, [batch size, seq_length - 2]."""
        epochs = 1 if seed is None else tf.int64.max

        def read(_, examples, records):
            ids = decode_sequences(records, self.shards.manifest["seq_length"], pad_id=0)[:, 1:-1]
            is_token = tf.tile((examples != NO_EXAMPLE)[:, None], [1, ids.shape[1]])
            return ids, is_token, is_token

        sequences = read_shards(
            self.shards, split, scaled.global_batch_size, epochs, seed, first_step, num_shards, shard
        )
        return sequences.batch(scaled.batch_size, drop_remainder=True).map(read, num_parallel_calls=2)

    def prompts(self, count: int = 3) -> list[str]:
        """The beginnings of documents of the validation split, to be continued."""
        rows = self.rows("validation", Scaled(1, 1), seed=None)
        row = np.concatenate([np.ravel(ids) for ids, _, _ in itertools.islice(rows, LOOK)])
        return beginnings(row, self.preprocessor, count)


def find_text_shards(folder: str, seq_length: int) -> Shards:
    """The shards in a folder, with every byte checked.

    Raises:
        UserError: when there are none, they are damaged, or they have another sequence length.
    """
    if Path(folder).is_file():
        raise UserError(f"--data {folder} is neither a folder of shards nor a .jsonl file")
    shards = find_shards(folder, {})
    if shards is None:
        raise UserError(
            f"--data {folder} has neither shards, which bert_from_scratch --architecture roberta --data {folder} "
            "writes, nor prompts in .jsonl files"
        )
    if (length := shards.manifest["seq_length"]) != seq_length:
        raise UserError(f"the shards in {folder} have sequences of {length} tokens: give --seq-length {length}")
    return shards
