# SPDX-License-Identifier: Apache-2.0
"""BERT's vocabularies and tokenizers: WordPiece, with the `tokenizers` library.

A preset is saved with KerasHub's tokenizer for the same vocabulary; a test checks that both give the same ids. Letters
without a single lower-case letter are an exception: KerasHub turns the German sharp s into ss.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.data.sources import Documents
from common.files import cached_file
from keras_replicas import UserError

UNKNOWN = "[UNK]"  # how a corpus writes unknown words
ALPHABET_SIZE = 200  # maximum number of characters in a trained vocabulary, the most frequent ones


class SpecialTokens(NamedTuple):
    """The special tokens, which stand for no text."""

    pad: str
    unknown: str
    start: str
    end: str
    mask: str


@dataclass(frozen=True)
class WordPieces:
    """A BERT vocabulary: the word pieces, by id, and how text is normalised before tokenisation."""

    pieces: list[str]
    lowercase: bool
    strip_accents: bool

    special: ClassVar[SpecialTokens] = SpecialTokens("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")

    def tokenizer(self) -> Tokenizer:
        """A tokenizer: `encode(text, add_special_tokens=False).ids`.

        `[UNK]` in a text is one token, as corpora with unknown words need it. The names of the other special tokens are
        ordinary text, because a corpus may well be about `[MASK]` or `[PAD]`.
        """
        ids = {piece: index for index, piece in enumerate(self.pieces)}
        tokenizer = _tokenizer(models.WordPiece(ids, unk_token=UNKNOWN), self.lowercase, self.strip_accents)
        tokenizer.add_special_tokens([UNKNOWN])
        return tokenizer


def train_wordpieces(documents: Documents, size: int) -> WordPieces:
    """Trains an uncased WordPiece vocabulary (Wu et al. 2016, arXiv:1609.08144) of at most `size` word pieces.

    The same documents and size, at least 100, give the same vocabulary on every machine. It is cached. `documents`
    opens their stream, and must give the same ones each time.
    """
    tokenizer = _tokenizer(models.WordPiece(unk_token=UNKNOWN), lowercase=True, strip_accents=True)
    untrained = tokenizer.to_str()
    normalizer = Tokenizer.from_str(untrained).normalizer  # the tokenizer's own is locked while it trains

    def texts() -> Iterator[str]:
        return (normalizer.normalize_str(document) for document in documents())

    def train(path: Path) -> None:
        characters: Counter[str] = Counter()
        for text in texts():
            characters.update(text)
        by_count = sorted(set(characters) - set(" "), key=lambda c: (-characters[c], c))
        known = min(ALPHABET_SIZE, size // 4)
        rare = str.maketrans(dict.fromkeys(by_count[known:], " "))
        # The trainer numbers pieces of one character in the order of a hash table, which differs between processes, and
        # settles ties by number. Given as special tokens, they have fixed numbers beforehand.
        alphabet = [piece for character in sorted(by_count[:known]) for piece in (character, "##" + character)]
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=[*WordPieces.special, *alphabet], show_progress=False
        )
        tokenizer.train_from_iterator((text.translate(rare) for text in texts()), trainer)
        pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        path.write_text("".join(f"{piece}\n" for piece, _ in pieces), encoding="utf-8")

    return load_wordpieces(cached_file("vocabulary.txt", itertools.chain([str(size), untrained], documents()), train))


def load_wordpieces(path: str | Path) -> WordPieces:
    """Reads a vocabulary file: one word piece per line; its line number, from 0, is its id.

    As in BERT, a vocabulary in which only the special tokens have capital letters is for text that is lower-cased and
    stripped of accents.

    Raises:
        UserError: when the file is missing or lacks one of BERT's special tokens.
    """
    try:
        pieces = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the vocabulary {path}: {error}") from error
    if missing := [token for token in WordPieces.special if token not in pieces]:
        raise UserError(f"the vocabulary {path} lacks {' '.join(missing)}; give a BERT WordPiece file")
    uncased = all(piece == piece.lower() for piece in pieces if not piece.startswith("["))
    return WordPieces(pieces, lowercase=uncased, strip_accents=uncased)


def _tokenizer(model: models.WordPiece, lowercase: bool, strip_accents: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    # As in KerasHub, an invisible character, such as the one that joins emoji, separates words; BERT's own tokenizer
    # removes it.
    parts = normalizers.Replace(Regex(r"[\p{Cc}\p{Cf}]"), " ")
    bert = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.normalizer = normalizers.Sequence([parts, bert])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
