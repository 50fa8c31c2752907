# SPDX-License-Identifier: Apache-2.0
"""BERT models from a size or a preset. Call these inside the strategy's scope."""

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Literal

import keras_hub

from common.command_line import UserError
from common.keras_fixes import data_parallel
from common.wordpiece import Vocabulary

# Layers and width; a head has 64 columns, and the inner layer is 4 widths. Base and large: Devlin et al. 2018,
# arXiv:1810.04805; the others: Turc et al. 2019, "Well-Read Students Learn Better", arXiv:1908.08962.
BERT_SIZES = {
    "nano": (1, 64),  # ours, published nowhere: for tests
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
BertSize = Literal["nano", "tiny", "mini", "small", "medium", "base", "large"]

BertMaskedLM = data_parallel(keras_hub.models.BertMaskedLM)


def masked_lm_from_size(
    size: BertSize, vocabulary_size: int, dropout: float, seq_length: int
) -> keras_hub.models.BertMaskedLM:
    """A `BertMaskedLM` of a published size, with random weights and 512 positions, or more where `seq_length` is."""
    num_layers, width = BERT_SIZES[size]
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=num_layers,
        num_heads=width // 64,
        hidden_dim=width,
        intermediate_dim=4 * width,
        dropout=dropout,
        max_sequence_length=max(512, seq_length),
    )
    return _without_pooler(BertMaskedLM(backbone, compile=False))


def masked_lm_from_preset(preset: str, dropout: float = 0.0, dtype: str | None = None) -> keras_hub.models.BertMaskedLM:
    """A `BertMaskedLM` with the weights of a KerasHub preset: a name, or a folder made by `save_to_preset`.

    Args:
        preset: its name or folder.
        dropout: of the model.
        dtype: a Keras dtype policy; None for the current one.

    Raises:
        UserError: when there is no such preset, or it cannot be fetched.
    """
    plain = _from_preset(keras_hub.models.BertMaskedLM, preset, dropout=dropout, dtype=dtype, compile=False)
    model = BertMaskedLM(plain.backbone, compile=False)
    model.set_weights(plain.get_weights())
    return _without_pooler(model)


def masked_lm_width(preset: str, size: BertSize) -> int:
    """The width of a preset's layers, or without one of a published size's.

    Raises:
        UserError: when there is no such preset, or it cannot be fetched.
    """
    if preset:
        return _from_preset(keras_hub.models.BertBackbone, preset, load_weights=False).hidden_dim
    return BERT_SIZES[size][1]


def preset_vocabulary(preset: str) -> Vocabulary:
    """The WordPiece vocabulary of a preset.

    Raises:
        UserError: when there is no such preset, or it cannot be fetched.
    """
    tokenizer = _from_preset(keras_hub.models.BertTokenizer, preset)
    return Vocabulary(tokenizer.get_vocabulary(), tokenizer.lowercase, tokenizer.strip_accents)


def save_preset(model: keras_hub.models.BertMaskedLM, vocabulary: Vocabulary, seq_length: int, folder: Path) -> None:
    """Saves a preset that KerasHub loads without this project, what turns text into its inputs included.

    Raises:
        OSError: `ENOSPC`, before anything is written, when the disk has no room (h5py would crash the process).
    """
    needed = sum(4 * math.prod(weight.shape) for weight in model.weights) + 2**20
    if shutil.disk_usage(folder.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    model.preprocessor = masked_lm_preprocessor(vocabulary, seq_length)
    model.save_to_preset(str(folder))


def masked_lm_preprocessor(vocabulary: Vocabulary, seq_length: int) -> keras_hub.models.BertMaskedLMPreprocessor:
    """What KerasHub users feed text through."""
    tokenizer = keras_hub.models.BertTokenizer(
        vocabulary.pieces, lowercase=vocabulary.lowercase, strip_accents=vocabulary.strip_accents
    )
    return keras_hub.models.BertMaskedLMPreprocessor(tokenizer, sequence_length=seq_length)


def _without_pooler(model: keras_hub.models.BertMaskedLM) -> keras_hub.models.BertMaskedLM:
    # The pooled output takes no part in masked language modelling; its weights would have no gradient.
    model.backbone.pooled_dense.trainable = False
    return model


def _from_preset(kind, preset: str, **kwargs):
    try:
        return kind.from_preset(preset, **kwargs)
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(
            f"cannot load the preset {preset} ({str(error).splitlines()[0]}). Give a KerasHub name, "
            "which needs a network on first use, or a folder made by save_to_preset"
        ) from error
