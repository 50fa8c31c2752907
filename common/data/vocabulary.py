# SPDX-License-Identifier: Apache-2.0
"""Vocabularies, as KerasHub's tokenizers: trained by the `tokenizers` library, or read from files; texts as ids."""

import collections
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import keras_hub
import numpy as np
import tensorflow as tf
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from keras_replicas import UserError

from ..errors import first_line
from ..files import cached
from .corpora import Documents

UNKNOWN = "[UNK]"  # how a corpus writes unknown words
NO_PIECE = "\ue000"  # a character for private use, of which no word piece is made: WordPiece gives it the id of [UNK]
WORDPIECE_TOKENS = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
BYTE_PAIR_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # in this order they have RoBERTa's ids
ALPHABET_SIZE = 200  # maximum number of characters in a trained WordPiece vocabulary, the most frequent ones
TEXTS_AT_ONCE = 64
# The pattern of Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783): KerasHub's for every byte-pair tokenizer.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_wordpieces(documents: Documents, source: str, size: int) -> keras_hub.models.BertTokenizer:
    """Trains an uncased WordPiece vocabulary (Wu et al. 2016, arXiv:1609.08144) of at most `size` word pieces.

    The same documents and size, at least 100, give the same vocabulary on every machine. It is cached.

    Args:
        documents: opens their stream, and gives the same ones each time.
        source: identifies them, such as a corpus's fingerprint.
        size: see above.
    """

    def train(path: Path) -> None:
        tokenizer = _wordpiece_tokenizer(models.WordPiece(unk_token=UNKNOWN), lowercase=True, strip_accents=True)
        normalizer = Tokenizer.from_str(tokenizer.to_str()).normalizer  # the tokenizer's own is locked while it trains
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
        texts = (normalizer.normalize_str(document).translate(rare) for document in documents())
        tokenizer.train_from_iterator(texts, trainer)
        pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        path.write_text("".join(f"{piece}\n" for piece, _ in pieces), encoding="utf-8")

    return load_wordpieces(cached("vocabulary.txt", [source, str(size)], train))


def load_wordpieces(path: str | Path) -> keras_hub.models.BertTokenizer:
    """Reads a vocabulary file: one word piece per line; its line number, from 0, is its id.

    As in BERT, a vocabulary in which only the special tokens have capital letters is for text that is lower-cased and
    stripped of accents.

    Raises:
        UserError: when the file cannot be read, or lacks one of BERT's special tokens.
    """
    try:
        text = tf.io.gfile.GFile(str(path)).read().replace("\r\n", "\n")
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the vocabulary {path}: {first_line(error)}") from error
    return _wordpieces(text.removesuffix("\n").split("\n"), path)  # at no other character that ends lines elsewhere


def tokenizer_from_files(folder: str) -> keras_hub.models.Tokenizer:
    """A tokenizer from BERT's `vocab.txt`, or Hugging Face's `tokenizer.json` of BERT, RoBERTa or GPT-2.

    Raises:
        UserError: when the folder has neither, or it is damaged or of another kind.
    """
    pieces, path = f"{folder}/vocab.txt", f"{folder}/tokenizer.json"
    if tf.io.gfile.exists(pieces):
        return load_wordpieces(pieces)
    if not tf.io.gfile.exists(path):
        raise UserError(f"{folder} has no manifest.json of rows, and neither vocab.txt nor tokenizer.json of examples")
    try:
        model = json.loads(tf.io.gfile.GFile(path).read())["model"]
        ids = model["vocab"]
        if model["type"] == "WordPiece":
            return _wordpieces(sorted(ids, key=ids.get), path)
        kind = keras_hub.models.RobertaTokenizer if "<mask>" in ids else keras_hub.models.GPT2Tokenizer
        return kind(ids, [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    except (tf.errors.OpError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no tokenizer of BERT, RoBERTa or GPT-2 ({first_line(error)})") from error


def _wordpieces(pieces: list[str], path: str | Path) -> keras_hub.models.BertTokenizer:
    if missing := [token for token in WORDPIECE_TOKENS if token not in pieces]:
        raise UserError(f"the vocabulary {path} lacks {' '.join(missing)}; give a BERT WordPiece file")
    uncased = all(piece == piece.lower() for piece in pieces if not piece.startswith("["))
    return keras_hub.models.BertTokenizer(pieces, lowercase=uncased, strip_accents=uncased)


def train_byte_pairs(documents: Documents, source: str, size: int) -> keras_hub.models.RobertaTokenizer:
    """Trains a byte-level vocabulary (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

    It has at most `size` tokens; `size` is at least 262, for 256 bytes, five special tokens and a pair. Arguments, and
    what is promised, are those of `train_wordpieces`.
    """

    def train(path: Path) -> None:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=[*BYTE_PAIR_TOKENS], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((document.replace(UNKNOWN, "") for document in documents()), trainer)
        tokenizer.save(str(path))

    trained = cached("byte-pairs.json", [source, str(size)], train)
    model = json.loads(trained.read_text(encoding="utf-8"))["model"]
    # Ordinary text that contains "</s>" must not become the token of that name.
    merges = [" ".join(pair) for pair in model["merges"] if "".join(pair) not in BYTE_PAIR_TOKENS]
    return keras_hub.models.RobertaTokenizer(model["vocab"], merges)


def encode(texts: Iterable[str], tokenizer: keras_hub.models.Tokenizer) -> Iterator[np.ndarray]:
    """The ids of each text, an int32 vector, on all cores; no special tokens are added.

    In a text for WordPiece, `[UNK]` is one token, as corpora with unknown words need it; the names of other special
    tokens are ordinary text. In a text for another tokenizer, the name of a special token may become that token.
    """
    as_strings = tf.TensorSpec([None], tf.string)
    is_fast = isinstance(tokenizer, keras_hub.tokenizers.BytePairTokenizer)  # outside of TensorFlow; others are inside
    call = tokenizer if is_fast else tf.function(tokenizer, input_signature=[as_strings])
    running: collections.deque[Future] = collections.deque()
    texts, cores = iter(texts), os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:
        while group := [*itertools.islice(texts, TEXTS_AT_ONCE)]:
            if isinstance(tokenizer, keras_hub.models.BertTokenizer):
                group = [text.replace(UNKNOWN, NO_PIECE) for text in group]
            running.append(threads.submit(call, group))
            if len(running) > cores:  # so that few texts are in memory
                yield from vectors(running.popleft().result())
        for future in running:
            yield from vectors(future.result())


def vectors(ids: tf.RaggedTensor | list[list[int]]) -> list[np.ndarray]:
    """The ids of each text as a vector."""
    if isinstance(ids, tf.RaggedTensor):
        return np.split(ids.flat_values.numpy(), ids.row_splits.numpy()[1:-1])
    return [np.array(of_text, np.int32) for of_text in ids]


def _wordpiece_tokenizer(model: models.WordPiece, lowercase: bool, strip_accents: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    # As in KerasHub, an invisible character, such as the one that joins emoji, separates words; BERT's own tokenizer
    # removes it.
    parts = normalizers.Replace(Regex(r"[\p{Cc}\p{Cf}]"), " ")
    bert = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.normalizer = normalizers.Sequence([parts, bert])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
