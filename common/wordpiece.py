# SPDX-License-Identifier: Apache-2.0
"""WordPiece vocabularies and tokenizers, by the `tokenizers` library.

`common.models.masked_lm_preprocessor` holds KerasHub's tokenizer for the same vocabulary, with which a preset is saved;
a test holds that both give the same ids.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from common.caching import cached_file
from common.command_line import UserError
from common.corpora import Documents

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALPHABET_SIZE = 200  # characters that a trained vocabulary knows at most, the most frequent ones


@dataclass(frozen=True)
class Vocabulary:
    """Pieces, whose places in the list are their ids, and what is done to a text before they are looked up."""

    pieces: list[str]
    lowercase: bool
    strip_accents: bool

    def __len__(self) -> int:
        return len(self.pieces)


def train_vocabulary(documents: Documents, size: int) -> Vocabulary:
    """Trains an uncased WordPiece vocabulary (Wu et al. 2016, arXiv:1609.08144) of at most `size` pieces.

    The same documents and size give the same vocabulary on every machine. It is kept in the cache.

    Args:
        documents: opens the stream of documents; called several times, it must give the same ones.
        size: at least 100.
    """
    # The tokenizer's own normalizer is locked while it trains.
    normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)

    def texts() -> Iterator[str]:
        return (normalizer.normalize_str(document) for document in documents())

    def train(path: Path) -> None:
        characters = Counter()
        for text in texts():
            characters.update(text)
        by_count = sorted(set(characters) - set(" "), key=lambda c: (-characters[c], c))
        known = min(ALPHABET_SIZE, size // 4)
        rare = str.maketrans(dict.fromkeys(by_count[known:], " "))
        # The trainer numbers pieces of one character in the order of a hash table, another one in each process, and
        # settles ties by number. Given as special tokens, they have their numbers beforehand.
        alphabet = [piece for character in sorted(by_count[:known]) for piece in (character, "##" + character)]
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=[*SPECIAL_TOKENS, *alphabet], show_progress=False
        )
        tokenizer = _tokenizer(models.WordPiece(unk_token=UNK), lowercase=True, strip_accents=True)
        tokenizer.train_from_iterator((text.translate(rare) for text in texts()), trainer)
        pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        path.write_text("".join(f"{piece}\n" for piece, _ in pieces), encoding="utf-8")

    return load_vocabulary(cached_file("vocabulary.txt", itertools.chain([str(size)], documents()), train))


def load_vocabulary(path: str | Path) -> Vocabulary:
    """Reads a vocabulary file: one piece a line, the line's number (from 0) is its id.

    As in BERT, a vocabulary in which only the special pieces have capital letters is for text that is lower-cased and
    stripped of accents.

    Raises:
        UserError: when the file is missing or lacks one of BERT's special tokens.
    """
    try:
        pieces = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the vocabulary {path}: {error}") from error
    if missing := [token for token in SPECIAL_TOKENS if token not in pieces]:
        raise UserError(f"the vocabulary {path} lacks {' '.join(missing)}; give a BERT WordPiece file")
    uncased = all(piece == piece.lower() for piece in pieces if not piece.startswith("["))
    return Vocabulary(pieces, lowercase=uncased, strip_accents=uncased)


def make_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """BERT's tokenizer for a vocabulary: `encode(text, add_special_tokens=False).ids`.

    `[UNK]` in a text is one token, as corpora that come with unknown words need it. The other special tokens' names are
    taken as ordinary text, for a corpus may well write about `[MASK]` or `[PAD]`.
    """
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    tokenizer = _tokenizer(models.WordPiece(ids, unk_token=UNK), vocabulary.lowercase, vocabulary.strip_accents)
    tokenizer.add_special_tokens([UNK])
    return tokenizer


def _tokenizer(model: models.WordPiece, lowercase: bool, strip_accents: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
