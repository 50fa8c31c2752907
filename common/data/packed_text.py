# SPDX-License-Identifier: Apache-2.0
"""Text for a causal language model: one row of token ids, cut into sequences without padding.

A row is all documents of a split, each followed by the tokenizer's end token and, in families where that is another
token, the start token of the next; it begins as if a document had just ended. Consecutive sequences overlap by one
token, the last label of one and the first input of the next, so every token but the row's first is a label once.
"""

import hashlib
import itertools
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import keras_hub
import numpy as np
import tensorflow as tf

from common.data.corpora import NEEDED_SPLITS
from common.data.encoding import token_ids
from common.data.order import NO_EXAMPLE, steps_per_epoch
from common.data.sources import Documents
from common.files import cached_file
from common.training.scaling import Scaled
from keras_replicas import locate

DOCUMENTS_AT_ONCE = 256  # tokenised in one call, on all cores
PROMPT = 4  # tokens from the beginning of a document
LOOK = 4096  # sequences that are searched for the beginnings of documents


@dataclass(frozen=True)
class PackedText:
    """Sequences of each split, ids [sequences, seq_length + 1], in host memory; and the preprocessor they are for."""

    sequences: dict[str, tf.Tensor]
    preprocessor: keras_hub.models.CausalLMPreprocessor

    @classmethod
    def of(cls, corpus: dict[str, Documents], preprocessor: keras_hub.models.CausalLMPreprocessor) -> "PackedText":
        """Tokenises a corpus, or takes its rows from the cache. A test split without a sequence is left out."""
        tokenizer, length = preprocessor.tokenizer, preprocessor.sequence_length
        sequences = {split: pack(documents, tokenizer, length) for split, documents in corpus.items()}
        empty = [split for split, part in sequences.items() if not len(part) and split not in NEEDED_SPLITS]
        for split in empty:
            print(f"{split}: too little text for one sequence; this split is left out", flush=True)
        return cls({split: part for split, part in sequences.items() if split not in empty}, preprocessor)

    @property
    def tokenizer(self) -> keras_hub.models.Tokenizer:
        """The tokenizer of the ids."""
        return self.preprocessor.tokenizer

    def sizes(self) -> dict[str, int]:
        """The number of sequences in each split."""
        return {split: len(part) for split, part in self.sequences.items()}

    def checksums(self) -> dict[str, int]:
        """A checksum of the sequences of each split."""
        return {split: zlib.crc32(part.numpy()) for split, part in self.sequences.items()}

    def count_tokens(self) -> dict[str, tuple[int, int]]:
        """The number of sequences in each split, and of labels in them."""
        return {split: (len(part), len(part) * (part.shape[1] - 1)) for split, part in self.sequences.items()}

    def steps(self, split: str, global_batch_size: int) -> int:
        """Steps in which every sequence of a split is used once."""
        return steps_per_epoch(len(self.sequences[split]), global_batch_size)

    def rows(
        self, split: str, scaled: Scaled, seed: int | None, first_step: int = 0, num_shards: int = 1, shard: int = 0
    ) -> tf.data.Dataset:
        """One shard's batches of rows, each of one replica's size: a pure function of the seed and the step.

        Args:
            split: the split to read.
            scaled: the batch sizes.
            seed: for endless epochs, each in a new order; None for one epoch in the text's own order.
            first_step: the step from which a run resumes.
            num_shards, shard: the number of shards, and this one's index.

        Returns:
            Token ids, int32 [batch size, seq_length + 1]; whether each is a token, not padding; and whether it is a
            label, to be predicted from those before it.
        """
        sequences, global_batch = self.sequences[split], scaled.global_batch_size
        end = tf.int64.max if seed is not None else self.steps(split, global_batch) * global_batch

        def read(positions):
            _, examples = locate(positions, len(sequences), global_batch, seed)
            ids = tf.cast(tf.gather(sequences, tf.maximum(examples, 0)), tf.int32)
            is_token = tf.tile((examples != NO_EXAMPLE)[:, None], [1, sequences.shape[1]])
            return ids, is_token, is_token

        positions = tf.data.Dataset.range(first_step * global_batch, end).shard(num_shards, shard)
        return positions.batch(scaled.batch_size, drop_remainder=True).map(read, num_parallel_calls=2)

    def prompts(self, count: int = 3) -> list[str]:
        """The beginnings of the first documents of the validation split, to be continued."""
        row = np.ravel(self.sequences["validation"][:LOOK, :-1])
        return beginnings(row, self.preprocessor, count)


def pack(documents: Documents, tokenizer: keras_hub.models.Tokenizer, seq_length: int) -> tf.Tensor:
    """The sequences of a stream of documents, which must give the same ones each time it is opened; see the module.

    What is left at the end, shorter than a sequence, is dropped.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocabulary_size() <= 2**16 else np.int32)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.array(separators(tokenizer)[-1:], dtype).tofile(file)
            for ids in _encoded(documents(), tokenizer):
                np.array([*ids, *separators(tokenizer)], dtype).tofile(file)

    row = np.memmap(cached_file("row", itertools.chain([fingerprint(tokenizer)], documents()), write), dtype, "r")
    starts = np.arange((len(row) - 1) // seq_length)[:, None] * seq_length
    with tf.device("CPU"):
        return tf.constant(row[starts + np.arange(seq_length + 1)])


def separators(tokenizer: keras_hub.models.Tokenizer) -> list[int]:
    """The ids between two documents: the end token's and, if there is a different start token, that one's."""
    start, end = tokenizer.start_token_id, tokenizer.end_token_id
    return [end] if start in (None, end) else [end, start]


def beginnings(row: np.ndarray, preprocessor: keras_hub.models.CausalLMPreprocessor, count: int) -> list[str]:
    """The first tokens of the first documents that begin in a row, as text."""
    first, last = separators(preprocessor.tokenizer)[-1], preprocessor.tokenizer.end_token_id
    documents = (row[start + 1 :] for start in np.flatnonzero(row == first))
    cut = ([*itertools.takewhile(lambda token: token != last, ids[:PROMPT])] for ids in documents)
    return as_prompts(itertools.islice(filter(None, cut), count), preprocessor)


def as_prompts(rows: Iterable[Iterable[int]], preprocessor: keras_hub.models.CausalLMPreprocessor) -> list[str]:
    """Token ids as texts, cut to leave half of a sequence for what a model adds; those without text are left out.

    No character is cut in two. A cut text may have more tokens than it was cut to, so they are counted again.
    """
    tokenizer, most = preprocessor.tokenizer, max(1, preprocessor.sequence_length // 2)

    def text_of(ids: list[int]) -> str:
        texts = (tokenizer.detokenize(ids[:length]) for length in range(min(len(ids), most), 0, -1))
        return next((text for text in texts if text[-1:] != "\ufffd" and len(tokenizer(text)) <= most), "")

    texts = [text_of([int(i) for i in row if i not in tokenizer.special_token_ids]) for row in rows]
    return [text for text in texts if text]


def fingerprint(tokenizer: keras_hub.models.Tokenizer) -> str:
    """A hash of what determines the ids of a text: the tokenizer's class and assets."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_assets(folder)
        for file in sorted(Path(folder).iterdir()):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _encoded(texts: Iterator[str], tokenizer: keras_hub.models.Tokenizer) -> Iterator[list[int]]:
    while group := list(itertools.islice(texts, DOCUMENTS_AT_ONCE)):
        yield from (ids for (ids,) in token_ids([(text,) for text in group], tokenizer) if len(ids))
