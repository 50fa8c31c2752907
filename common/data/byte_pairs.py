# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of byte pairs: trained, as a RoBERTa's tokenizer."""

import json
from pathlib import Path

import keras_hub
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from ..files import cached
from .corpora import Documents
from .vocabulary import UNKNOWN

BYTE_PAIR_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # in this order they have RoBERTa's ids
# The pattern of Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783): KerasHub's for every byte-pair tokenizer.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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
