# SPDX-License-Identifier: Apache-2.0
"""Models from a size, or from a preset in KerasHub's or Hugging Face's format."""

import contextlib
from typing import Any

import keras_hub
import numpy as np

from common.errors import first_line
from common.model.preset_files import load_json
from common.model.sizes import dimensions
from keras_replicas import UserError

POSITION_SCALE = 0.14  # amplitude: a root mean square of 0.1, five times that of BERT's initial token embeddings


def backbone_from_size(
    kind: type[keras_hub.models.Backbone], size: str, vocabulary_size: int, dropout: float, seq_length: int
) -> keras_hub.models.Backbone:
    """A transformer with random weights.

    Its position embeddings, trained like all weights, begin as the sinusoids of Vaswani et al. 2017, arXiv:1706.03762,
    section 3.5. With these, one rotation leads to a token's neighbour, the same at every position; starting from BERT's
    noise, each position has to be learned by itself.

    Args:
        kind: `BertBackbone`, `RobertaBackbone` or `GPT2Backbone`.
        size: a size of `sizes.py`.
        vocabulary_size: number of tokens that it embeds.
        dropout: its dropout.
        seq_length: tokens per sequence; the model has at least 512 positions.
    """
    backbone = kind(
        vocabulary_size=vocabulary_size,
        **dimensions(size),
        dropout=dropout,
        max_sequence_length=max(512, seq_length),
    )
    (positions,) = [v for v in backbone.trainable_variables if v.path.endswith("position_embedding/embeddings")]
    positions.assign(POSITION_SCALE * sinusoids(*positions.shape))
    return backbone


def sinusoids(positions: int, width: int) -> np.ndarray:
    """Sines, then cosines, of every position, with wavelengths from 2 pi to 20,000 pi positions; [positions, width]."""
    angles = np.arange(positions)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width]


def from_preset(kind: Any, preset: str, **kwargs):
    """As `kind.from_preset`.

    Raises:
        UserError: when there is no such preset, or it cannot be fetched.
    """
    try:
        return kind.from_preset(preset, **kwargs)
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(
            f"cannot load the preset {preset} ({first_line(error)}). Give a KerasHub name, "
            "which needs a network on first use, or a folder made by save_to_preset"
        ) from error


def model_width(preset: str, size: str) -> int:
    """The width of the layers of a preset or, if there is none, of a size.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, or its model is not a plain transformer.
    """
    if preset:
        with contextlib.suppress(ValueError, OSError, RuntimeError, KeyError):
            return load_json(preset)["config"]["hidden_dim"]  # saves the memory that its weights would take
        backbone = from_preset(keras_hub.models.Backbone, preset, load_weights=False)
        if not hasattr(backbone, "hidden_dim"):
            raise UserError(f"the preset {preset} has a {type(backbone).__name__}: give one of a plain transformer")
        return backbone.hidden_dim
    return dimensions(size)["hidden_dim"]
