# SPDX-License-Identifier: Apache-2.0
"""RoBERTa's vocabularies and tokenizers: byte-level byte pairs, with the `tokenizers` library.

A text is split by KerasHub's pattern, not by GPT-2's, which Hugging Face's own RoBERTa class uses: the two differ at
brackets, digits and white space. KerasHub's tokenizer, called on a text, therefore gives the same ids, and so does
Hugging Face's, from the saved `tokenizer.json`. Inside a `tf.data` pipeline, KerasHub 0.32 splits by a third pattern.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.data.sources import Documents
from common.data.wordpiece import UNKNOWN, SpecialTokens, WordPieces
from common.files import cached_file

# The pattern of Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783): KerasHub's for every byte-pair tokenizer.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Letters of GPT-2's alphabet that stand for white space, and for the bytes of a UTF-8 character after its first.
NOT_COUNTED = {*"ĠĊĉč", *map(chr, range(161, 192)), *map(chr, range(290, 324))}


@dataclass(frozen=True)
class BytePairs:
    """A RoBERTa vocabulary."""

    pieces: list[str]  # by id, in GPT-2's alphabet of 256 letters, one per byte, in which a space is `Ġ`
    merges: list[str]  # pairs of pieces, with a space between them, in the order in which they are joined

    special: ClassVar[SpecialTokens] = SpecialTokens("<pad>", "<unk>", "<s>", "</s>", "<mask>")

    def tokenizer(self) -> Tokenizer:
        """A tokenizer: `encode(text, add_special_tokens=False).ids`.

        `[UNK]`, which stands for unknown words in corpora, is one token `<unk>`; all else is ordinary text, even
        `<mask>`.
        """
        ids = {piece: index for index, piece in enumerate(self.pieces)}
        tokenizer = byte_pair_tokenizer(ids, self.merges)
        tokenizer.normalizer = normalizers.Replace(UNKNOWN, self.special.unknown)
        tokenizer.add_special_tokens([AddedToken(self.special.unknown, normalized=True)])
        return tokenizer


Vocabulary = WordPieces | BytePairs


def special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """The ids of the special tokens, by the names of `SpecialTokens`."""
    return {name: vocabulary.pieces.index(piece) for name, piece in vocabulary.special._asdict().items()}


def count_characters(vocabulary: Vocabulary) -> list[int]:
    """How many characters each id stands for, without white space; for a special token, those of its name."""
    if isinstance(vocabulary, WordPieces):
        return [len(piece.removeprefix("##")) for piece in vocabulary.pieces]
    return [sum(letter not in NOT_COUNTED for letter in piece) for piece in vocabulary.pieces]


def train_byte_pairs(documents: Documents, size: int) -> BytePairs:
    """Trains a byte-level vocabulary (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

    It has at most `size` tokens; `size` is at least 261, for 256 bytes and five special tokens. The same documents and
    size give the same vocabulary on every machine. It is cached. `documents` opens their stream, and must give the same
    ones each time.
    """
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # in this order they have RoBERTa's ids

    def train(path: Path) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer = _tokenizer(models.BPE())
        tokenizer.train_from_iterator((document.replace(UNKNOWN, "") for document in documents()), trainer)
        tokenizer.save(str(path))

    trained = cached_file("byte-pairs.json", itertools.chain([str(size), SPLIT], documents()), train)
    model = json.loads(trained.read_text(encoding="utf-8"))["model"]
    # Ordinary text that contains "</s>" must not become the token of that name.
    merges = [" ".join(pair) for pair in model["merges"] if "".join(pair) not in special]
    return BytePairs(sorted(model["vocab"], key=model["vocab"].get), merges)


def byte_pair_tokenizer(ids: dict[str, int], merges: Iterable[str]) -> Tokenizer:
    """A tokenizer of byte pairs alone, from ids by piece and merges like those of `BytePairs`."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    return _tokenizer(models.BPE(ids, pairs))


def _tokenizer(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
