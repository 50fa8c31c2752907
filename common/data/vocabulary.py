# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of word pieces, as KerasHub's tokenizers: trained, or read from files; and texts as ids, of any kind."""

import collections
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import keras_hub
import numpy as np
import tensorflow as tf
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from keras_replicas import UserError

from ..files import cached, one_line

UNKNOWN = "[UNK]"  # how a corpus writes unknown words
NO_PIECE = "\ue000"  # a character for private use, of which no word piece is made: WordPiece gives it the id of [UNK]
WORDPIECE_TOKENS = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
ALPHABET_SIZE = 200  # maximum number of characters in a trained WordPiece vocabulary, the most frequent ones
TEXTS_AT_ONCE = 64


def train_wordpieces(documents: Callable[[], Iterator[str]], source: str, size: int) -> keras_hub.models.BertTokenizer:
    """Trains an uncased WordPiece vocabulary (Wu et al. 2016, arXiv:1609.08144) of at most `size` word pieces.

    The same documents, which `source` identifies, and size, at least 100, give the same one on every machine. It is
    cached.
    """

    def train(path: Path) -> None:
        # As in KerasHub, an invisible character, such as the one that joins emoji, separates words; BERT's own
        # tokenizer removes it.
        parts = normalizers.Replace(Regex(r"[\p{Cc}\p{Cf}]"), " ")
        normalizer = normalizers.Sequence([parts, normalizers.BertNormalizer(lowercase=True, strip_accents=True)])
        characters: collections.Counter[str] = collections.Counter()
        for document in documents():
            characters.update(normalizer.normalize_str(document))
        by_count = sorted(set(characters) - set(" "), key=lambda c: (-characters[c], c))
        known = min(ALPHABET_SIZE, size // 4)
        rare = str.maketrans(dict.fromkeys(by_count[known:], " "))
        # The trainer numbers pieces of one character in the order of a hash table, which differs between processes, and
        # settles ties by number. Given as special tokens, they have fixed numbers beforehand.
        alphabet = [piece for character in sorted(by_count[:known]) for piece in (character, "##" + character)]
        special = [*WORDPIECE_TOKENS, *alphabet]
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
        tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        texts = (normalizer.normalize_str(document).translate(rare) for document in documents())
        tokenizer.train_from_iterator(texts, trainer)
        ids = tokenizer.get_vocab()
        path.write_text("".join(f"{piece}\n" for piece in sorted(ids, key=ids.__getitem__)), encoding="utf-8")

    return load_wordpieces(cached("vocabulary.txt", [source, str(size)], train))


def load_wordpieces(path: str | Path) -> keras_hub.models.BertTokenizer:
    """Reads a vocabulary file: one word piece per line; its line number, from 0, is its id.

    As in BERT, a vocabulary in which only the special tokens have capital letters is for text that is lower-cased and
    stripped of accents. Raises a `UserError` when it cannot be read, or lacks one of BERT's special tokens.
    """
    with one_line(f"cannot read the vocabulary {path}", errors=(tf.errors.OpError, UnicodeDecodeError)):
        text = tf.io.gfile.GFile(str(path)).read().replace("\r\n", "\n")
    return wordpieces(text.removesuffix("\n").split("\n"), path)  # at no other character that ends lines elsewhere


def wordpieces(pieces: list[str], source: str | Path) -> keras_hub.models.BertTokenizer:
    """The tokenizer of word pieces in the order of their ids; a `UserError` that names the source as above."""
    if missing := [token for token in WORDPIECE_TOKENS if token not in pieces]:
        raise UserError(f"the vocabulary {source} lacks {' '.join(missing)}; give a BERT WordPiece file")
    uncased = all(piece == piece.lower() for piece in pieces if not piece.startswith("["))
    return keras_hub.models.BertTokenizer(pieces, lowercase=uncased, strip_accents=uncased)


def encode(texts: Iterable[str], tokenizer: keras_hub.models.Tokenizer) -> Iterator[np.ndarray]:
    """The ids of each text, an int32 vector, on all cores; no special tokens are added.

    In a text for WordPiece, `[UNK]` is one token, as corpora with unknown words need it; the names of other special
    tokens are ordinary text. In a text for another tokenizer, the name of a special token may become that token.
    """
    is_fast = isinstance(tokenizer, keras_hub.tokenizers.BytePairTokenizer)  # outside of TensorFlow; others are inside
    call = tokenizer if is_fast else _traced(tokenizer)
    is_bert = isinstance(tokenizer, keras_hub.models.BertTokenizer)
    texts = (text.replace(UNKNOWN, NO_PIECE) for text in texts) if is_bert else iter(texts)
    running: collections.deque[Future] = collections.deque()
    with ThreadPoolExecutor(cores := os.cpu_count() or 1) as threads:
        while (group := [*itertools.islice(texts, TEXTS_AT_ONCE)]) or running:
            if group:
                running.append(threads.submit(call, group))
            if not group or len(running) > cores:  # so that few texts are in memory
                yield from vectors(running.popleft().result())


@functools.lru_cache(maxsize=1)
def _traced(tokenizer: keras_hub.models.Tokenizer) -> Callable:
    return tf.function(tokenizer, input_signature=[tf.TensorSpec([None], tf.string)])


def vectors(ids: tf.RaggedTensor | list[list[int]]) -> list[np.ndarray]:
    """The ids of each text as a vector."""
    if isinstance(ids, tf.RaggedTensor):
        return np.split(ids.flat_values.numpy(), ids.row_splits.numpy()[1:-1])
    return [np.array(of_text, np.int32) for of_text in ids]
