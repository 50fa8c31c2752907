# SPDX-License-Identifier: Apache-2.0
"""WordPiece vocabularies and tokenizers, by the `tokenizers` library.

`common.models.keras_tokenizer` gives KerasHub's tokenizer for the same vocabulary, which a preset is saved with; a test
holds that both give the same ids.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.caching import cached_file
from common.command_line import UserError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_vocabulary(documents: Iterable[str], size: int) -> list[str]:
    """Trains an uncased WordPiece vocabulary (Wu et al. 2016, arXiv:1609.08144) of at most `size` pieces.

    The same documents and size give the same vocabulary, taken from the cache when it was trained before.
    """
    documents = list(documents)

    def train(path: Path) -> None:
        tokenizer = _tokenizer(models.WordPiece(unk_token=UNK), lowercase=True)
        trainer = trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=list(SPECIAL_TOKENS), limit_alphabet=200, show_progress=False
        )
        tokenizer.train_from_iterator(documents, trainer)
        pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        path.write_text("".join(f"{piece}\n" for piece, _ in pieces), encoding="utf-8")

    return load_vocabulary(cached_file("vocabulary.txt", [str(size), *documents], train))


def load_vocabulary(path: str | Path) -> list[str]:
    """Reads a vocabulary file: one piece a line, the line's number (from 0) is its id.

    Raises:
        UserError: when the file is missing or lacks one of BERT's special tokens.
    """
    try:
        vocabulary = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the vocabulary {path}: {error}") from error
    if missing := [token for token in SPECIAL_TOKENS if token not in vocabulary]:
        raise UserError(f"the vocabulary {path} lacks {' '.join(missing)}; give a BERT WordPiece file")
    return vocabulary


def is_uncased(vocabulary: list[str]) -> bool:
    """Whether text is lower-cased before it is looked up: no piece but the special ones has a capital letter."""
    return all(piece == piece.lower() for piece in vocabulary if not piece.startswith("["))


def make_tokenizer(vocabulary: list[str]) -> Tokenizer:
    """BERT's tokenizer for a vocabulary: `encode(text).ids`, without [CLS] and [SEP].

    `[UNK]` in a text is one token, as corpora that come with unknown words need it. The other special tokens' names are
    taken as ordinary text, for a corpus may well write about `[MASK]` or `[PAD]`.
    """
    pieces = {piece: index for index, piece in enumerate(vocabulary)}
    tokenizer = _tokenizer(models.WordPiece(pieces, unk_token=UNK), lowercase=is_uncased(vocabulary))
    tokenizer.add_special_tokens([UNK])
    return tokenizer


def _tokenizer(model: models.WordPiece, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
