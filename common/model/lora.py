# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) for a backbone's attention, and a file of them."""

from pathlib import Path

import keras_hub

from common.files import write_json
from keras_replicas import UserError, is_chief


def enable_lora(backbone: keras_hub.models.Backbone, rank: int) -> None:
    """Adds adapters of this rank to the attention's query and value kernels; freezes all else but these layers' biases.

    Raises:
        UserError: when KerasHub has none for such a backbone.
    """
    backbone.enable_lora(rank)
    if not backbone.trainable_variables:
        raise UserError(f"--lora-rank: KerasHub has no LoRA for a {type(backbone).__name__}; leave it out")


def save_adapter(model: keras_hub.models.Task, preset: str, folder: Path) -> None:
    """Saves a model's adapters in `adapter.lora.h5`, and their preset and rank in `adapter.json`; only the chief saves.

    KerasHub loads them by `backbone.load_lora_weights("adapter.lora.h5")`, into the backbone of that preset.
    """
    if is_chief():
        folder.mkdir(exist_ok=True)
        model.backbone.save_lora_weights(str(folder / "adapter.lora.h5"))
        write_json(folder / "adapter.json", {"base": preset, "rank": model.backbone._lora_rank})
