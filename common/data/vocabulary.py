# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of word pieces, as KerasHub's tokenizers: trained, or read from files; and texts as ids, of any kind."""

import collections
import functools
import itertools
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np
import tensorflow as tf
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from keras_replicas import UserError

from ..files import cached, one_line, plain

UNKNOWN = "[UNK]"  # how a corpus writes unknown words
NO_PIECE = "\ue000"  # a character for private use: no word piece has it, and WordPiece gives it the id of [UNK]
WORDPIECE_TOKENS = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
MANY_UNKNOWN = 0.01  # share of tokens above which `tell` prints it
ALPHABET_SIZE = 200  # the most frequent characters of a text, which a trained WordPiece vocabulary has, or more:
FEW_CHARACTERS = 0.001  # share of a text's characters that the vocabulary may lack
FEW_ACCENTS = 0.01  # share of letters with an accent up to which all accents are removed
TEXTS_AT_ONCE = 64
MOST_BYTES = 2**24  # of a vocabulary's file


def train_wordpieces(documents: Callable[[], Iterator[str]], source: str, size: int) -> keras_hub.models.BertTokenizer:
    """Trains an uncased WordPiece vocabulary (Wu et al. 2016, arXiv:1609.08144) of at most `size` word pieces.

    It has the characters of nearly all the text, if they take no more than half of it. Where hardly a letter has
    an accent, as in English, accents are removed, as in BERT. In other texts, a tone or a vowel may be one: they stay.

    The documents, which `source` identifies, and size, at least 100, give the same one on every machine. It is cached.
    """

    def train(path: Path) -> None:
        # As in KerasHub, an invisible character, such as the one that joins emoji, separates words; BERT's own
        # tokenizer removes it.
        parts = normalizers.Replace(Regex(r"[\p{Cc}\p{Cf}]"), " ")
        counts: collections.Counter[str] = collections.Counter()
        for document in documents():
            counts.update(unicodedata.normalize("NFC", document))
        accented = sum(count for character, count in counts.items() if _has_accent(character))
        plain = accented <= FEW_ACCENTS * sum(count for character, count in counts.items() if character.isalpha())
        # As in KerasHub, full-width forms and the like are the usual ones; a text with hardly any is left as it is.
        unusual = sum(count for character, count in counts.items() if not unicodedata.is_normalized("NFKC", character))
        usual = [normalizers.NFKC()] if unusual > FEW_CHARACTERS * counts.total() else []
        bert = normalizers.BertNormalizer(lowercase=True, strip_accents=plain)
        normalizer = normalizers.Sequence([parts, *usual, bert])
        characters: collections.Counter[str] = collections.Counter()
        for character, count in counts.items():
            for part in normalizer.normalize_str(character):
                characters[part] += count
        by_count = sorted(set(characters) - set(" "), key=lambda c: (-characters[c], c))
        nearly_all = (1 - FEW_CHARACTERS) * sum(characters[c] for c in by_count)
        seen = itertools.accumulate(characters[c] for c in by_count)
        known = min(max(ALPHABET_SIZE, sum(total < nearly_all for total in seen) + 1), size // 4)
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

    As in BERT, a vocabulary in which only the special tokens have capital letters is for text that is lower-cased and,
    if it has no accents either, stripped of these. Raises a `UserError` when it cannot be read, lacks one of BERT's
    special tokens, or has a piece twice, or one that ends with a space.
    """
    with one_line(f"cannot read the vocabulary {path}", errors=(tf.errors.OpError, ValueError)):
        if (size := tf.io.gfile.stat(str(path)).length) > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, and may have {MOST_BYTES:,}")
        text = tf.io.gfile.GFile(str(path)).read().removeprefix("\ufeff").replace("\r\n", "\n")
    return wordpieces(text.removesuffix("\n").split("\n"), path)  # at no other character that ends lines elsewhere


def in_order(ids: dict[str, int]) -> list[str]:
    """The pieces of a `tokenizer.json` by their ids; a `ValueError` unless these are 0, 1, 2 and so on."""
    if sorted(ids.values()) != [*range(len(ids))]:
        raise ValueError(f"its {len(ids)} tokens do not have the ids 0 to {len(ids) - 1}")
    return sorted(ids, key=ids.__getitem__)


def wordpieces(
    pieces: list[str], source: str | Path, lowercase: bool | None = None, strip_accents: bool | None = None
) -> keras_hub.models.BertTokenizer:
    """The tokenizer of word pieces in the order of their ids; a `UserError` that names the source as above.

    Whether text is lower-cased and stripped of accents is as given, or as the pieces tell.
    """
    if missing := [token for token in WORDPIECE_TOKENS if token not in pieces]:
        raise UserError(f"the vocabulary {source} lacks {' '.join(missing)}; give a BERT WordPiece file")
    lines: dict[str, int] = {}
    for number, piece in enumerate(pieces, start=1):
        if piece != piece.rstrip() or not piece:
            raise UserError(f"{source}, line {number} is empty or ends with a space: remove it")
        if lines.setdefault(piece, number) != number:
            raise UserError(f"{source}, line {number} repeats {piece!r} of line {lines[piece]}: give each piece once")
    if lowercase is None:
        lowercase = all(piece == piece.lower() for piece in pieces if not piece.startswith("["))
    if strip_accents is None:
        strip_accents = lowercase and not any(map(_has_accent, pieces))
    return keras_hub.models.BertTokenizer(pieces, lowercase=lowercase, strip_accents=strip_accents)


def _has_accent(text: str) -> bool:
    return any(unicodedata.category(character) == "Mn" for character in unicodedata.normalize("NFD", text))


def encode(texts: Iterable[str], tokenizer: keras_hub.models.Tokenizer) -> Iterator[np.ndarray]:
    """The ids of each text, an int32 vector, on all cores; no special tokens are added.

    In a text for WordPiece, `[UNK]` is one token, as corpora with unknown words need it; the names of other special
    tokens are ordinary text. In a text for another tokenizer, the name of a special token may become that token.
    """
    is_fast = isinstance(tokenizer, keras_hub.tokenizers.BytePairTokenizer)  # outside of TensorFlow; others are inside
    call = tokenizer if is_fast else _traced(tokenizer)
    is_pieces = isinstance(tokenizer, keras_hub.tokenizers.WordPieceTokenizer)  # in its graph, NUL would end a text
    texts = (text.replace(UNKNOWN, f" {NO_PIECE} ").replace("\0", " ") if is_pieces else text for text in texts)
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


def unknown_id(tokenizer: keras_hub.models.Tokenizer) -> int:
    """The id of `[UNK]`, or of `<unk>`, which stands for unknown words; -1 for a tokenizer without one."""
    known = {*tokenizer.get_vocabulary()}
    return next((tokenizer.token_to_id(name) for name in (UNKNOWN, "<unk>") if name in known), -1)


def not_seen(lengths: Sequence[int], limit: int, unknown: int) -> dict[str, Any]:
    """What a model does not see of texts, for `results.json`.

    That is `unknown_fraction`, the share of the `unknown` tokens, which stand for unknown words; and
    `cut_texts`, in words, where some of the texts' lengths, in tokens, are above the `limit`.
    """
    facts: dict[str, Any] = {"unknown_fraction": unknown / max(1, sum(lengths))}
    if cut := sum(length > limit for length in lengths):
        middle, most = np.percentile(lengths, [50, 95], method="higher")
        cut_to = f"{cut} of {len(lengths)} texts are cut to {limit} tokens"
        facts["cut_texts"] = f"{cut_to} (median {middle}, 95 % have at most {most})"
    return facts


def tell(split: str, facts: dict[str, Any]) -> None:
    """Prints what a model does not see of a split, if it is much."""
    if "cut_texts" in facts:
        print(f"{split}: {plain(facts['cut_texts'])}: longer sequences show more", flush=True)
    if facts.get("unknown_fraction", 0) > MANY_UNKNOWN:
        share = f"{facts['unknown_fraction']:.1%} of the tokens are unknown"
        print(f"{split}: {share}: the vocabulary lacks words or characters of this text", flush=True)


def vectors(ids: tf.RaggedTensor | list[list[int]]) -> list[np.ndarray]:
    """The ids of each text as a vector."""
    if isinstance(ids, tf.RaggedTensor):
        return np.split(ids.flat_values.numpy(), ids.row_splits.numpy()[1:-1])
    return [np.array(of_text, np.int32) for of_text in ids]
