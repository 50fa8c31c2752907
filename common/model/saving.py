# SPDX-License-Identifier: Apache-2.0
"""Saves a model as a KerasHub preset."""

import errno
import math
import os
import shutil
from pathlib import Path

import keras_hub

from keras_replicas import is_chief

ADAPTERS = "adapters.lora.h5"


def save_task(
    model: keras_hub.models.Task, preprocessor: keras_hub.models.Preprocessor, folder: Path, card: str = ""
) -> None:
    """Saves a preset that KerasHub loads without this project, including the preprocessor; only the chief saves.

    Adapters are merged into their kernels. By themselves, they are beside these in `adapters.lora.h5`, to be loaded by
    `backbone.load_lora_weights` into the backbone that they adapt.

    Args:
        model: the model.
        preprocessor: the model's preprocessor.
        folder: the preset's folder, whose parent must exist.
        card: what its `README.md` says; empty for none.

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
    if any(weight.name.startswith("lora_") for weight in model.weights):
        model.backbone.save_lora_weights(str(folder / ADAPTERS))
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
