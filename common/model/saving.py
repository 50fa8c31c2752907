# SPDX-License-Identifier: Apache-2.0
"""Saves a model as a KerasHub preset."""

import errno
import math
import os
import shutil
from pathlib import Path

import keras_hub

from common.data.byte_pairs import Vocabulary
from common.data.wordpiece import WordPieces
from keras_replicas import is_chief


def save_preset(
    model: keras_hub.models.Task, vocabulary: Vocabulary, seq_length: int, folder: Path, card: str = ""
) -> None:
    """As `save_task`, with the model's usual preprocessor."""
    save_task(model, model.preprocessor_cls(keras_tokenizer(vocabulary), sequence_length=seq_length), folder, card)


def save_task(
    model: keras_hub.models.Task, preprocessor: keras_hub.models.Preprocessor, folder: Path, card: str = ""
) -> None:
    """Saves a preset that KerasHub loads without this project, including the preprocessor; only the chief saves.

    A `card`, if given, becomes its `README.md`.

    Raises:
        OSError: `ENOSPC`, before anything is written, when the disk has no room (h5py would crash the process).
    """
    if not is_chief():
        return
    needed = sum(4 * math.prod(weight.shape) for weight in model.weights) + 2**20
    if shutil.disk_usage(folder.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    model.preprocessor = preprocessor
    model.save_to_preset(str(folder))
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")


def keras_tokenizer(vocabulary: Vocabulary) -> keras_hub.models.Tokenizer:
    """KerasHub's tokenizer for a vocabulary."""
    if isinstance(vocabulary, WordPieces):
        return keras_hub.models.BertTokenizer(
            vocabulary.pieces, lowercase=vocabulary.lowercase, strip_accents=vocabulary.strip_accents
        )
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    return keras_hub.models.RobertaTokenizer(ids, vocabulary.merges)
