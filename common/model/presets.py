# SPDX-License-Identifier: Apache-2.0
"""What KerasHub's models of every kind have in common: a size or a preset to begin from, adapters, saving."""

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np

from keras_replicas import UserError, is_chief

from ..files import FAILED, fetched, one_line
from ..untrusted import check_preset
from .sizes import dimensions

POSITION_SCALE = 0.14  # amplitude: a root mean square of 0.1, five times that of BERT's initial token embeddings
ADAPTERS = "adapters.lora.h5"


def backbone_from_size(kind: Any, size: str, vocabulary_size: int, dropout: float, seq_length: int) -> Any:
    """A `BertBackbone`, `RobertaBackbone` or `GPT2Backbone` of a size, with random weights and at least 512 positions.

    Its position embeddings, trained like all weights, begin as the sinusoids of Vaswani et al. 2017, arXiv:1706.03762,
    section 3.5. With these, one rotation leads to a token's neighbour, the same at every position; starting from BERT's
    noise, each position has to be learned by itself.
    """
    positions, sizes = max(512, seq_length), dimensions(size)
    backbone = kind(vocabulary_size=vocabulary_size, **sizes, dropout=dropout, max_sequence_length=positions)
    (table,) = [v for v in backbone.trainable_variables if v.path.endswith("position_embedding/embeddings")]
    table.assign(POSITION_SCALE * sinusoids(*table.shape))
    return backbone


def sinusoids(positions: int, width: int) -> np.ndarray:
    """Sines, then cosines, of every position, with wavelengths from 2 pi to 20,000 pi positions; [positions, width]."""
    angles = np.arange(positions)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width]


def enable_lora(backbone: keras_hub.models.Backbone, rank: int) -> None:
    """Freezes a backbone but for adapters of this rank, added to the attention's query and value kernels.

    They are those of Hu et al. 2021, arXiv:2106.09685. Raises a UserError when KerasHub has none for the backbone.
    """
    backbone.enable_lora(rank)
    for variable in backbone.trainable_variables:  # not the biases beside them: a file of adapters has none
        variable.trainable = variable.name.startswith("lora_")
    if not backbone.trainable_variables:
        raise UserError(f"KerasHub has no LoRA for a {type(backbone).__name__}: train all of its weights")


def check_positions(backbone: keras_hub.models.Backbone, seq_length: int, preset: str) -> None:
    """Raises a UserError when a preset's backbone has fewer positions than a sequence has tokens."""
    if seq_length > (positions := getattr(backbone, "max_sequence_length", math.inf)):
        raise UserError(f"{seq_length} tokens are more than the {positions} positions of the preset {preset}")


def save_task(model: keras_hub.models.Task, preprocessor: keras_hub.models.Preprocessor, folder: Path) -> None:
    """Saves a preset that KerasHub loads without this project, including the preprocessor; only the chief saves.

    Adapters are merged into their kernels; by themselves, for `backbone.load_lora_weights`, they are beside these in
    `adapters.lora.h5`. Raises an OSError, `ENOSPC`, before it writes to a disk without room: h5py would crash.
    """
    if not is_chief():
        return
    needed = sum(4 * math.prod(weight.shape) for weight in model.weights) + 2**20
    if shutil.disk_usage(folder.parent).free < needed:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))
    model.preprocessor = preprocessor
    model.save_to_preset(str(folder))
    if any(weight.name.startswith("lora_") for weight in model.weights):
        model.backbone.save_lora_weights(str(folder / ADAPTERS))


def place_of(preset: str) -> str:
    """Where a preset is, once fetched. A name of KerasHub's own is that of a model on Kaggle, if no folder has it."""
    known = keras_hub.models.Backbone.presets | keras_hub.models.Task.presets
    return fetched(known[preset]["kaggle_handle"] if preset in known and not os.path.isdir(preset) else preset)


def from_preset(kind: Any, preset: str, **kwargs) -> Any:
    """What `kind.from_preset(preset, **kwargs)` gives; a UserError of one line when it cannot be had."""
    way_out = ". Give a KerasHub name, which needs a network on first use, or a folder made by save_to_preset"
    with one_line(f"cannot load the preset {preset}", way_out):
        folder = place_of(preset)
    check_preset(folder)
    with one_line(f"cannot load the preset {preset}", way_out, (*FAILED, TypeError)):
        return kind.from_preset(folder, **kwargs)
