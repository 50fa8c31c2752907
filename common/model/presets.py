# SPDX-License-Identifier: Apache-2.0
"""Presets: what KerasHub loads, in one-line errors, and their files; backbones from a size, and adapters."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import kagglehub
import keras_hub
import numpy as np
from safetensors import SafetensorError

from keras_replicas import UserError

from .sizes import dimensions

POSITION_SCALE = 0.14  # amplitude: a root mean square of 0.1, five times that of BERT's initial token embeddings


@contextlib.contextmanager
def one_line(message: str, way_out: str = "") -> Iterator[None]:
    """Turns errors of KerasHub, h5py, safetensors and the file system into a ValueError with this message."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, KeyError, SafetensorError) as error:
        first = str(error).splitlines()[0].removesuffix(" A preset must be a one of:")
        raise UserError(f"{message} ({first}){way_out}") from error


def from_preset(kind: Any, preset: str, **kwargs) -> Any:
    """What `kind.from_preset(preset, **kwargs)` gives; a ValueError of one line when it cannot be had."""
    way_out = ". Give a KerasHub name, which needs a network on first use, or a folder made by save_to_preset"
    with one_line(f"cannot load the preset {preset}", way_out):
        return kind.from_preset(preset, **kwargs)


def backbone_from_size(kind: Any, size: str, vocabulary_size: int, dropout: float, seq_length: int) -> Any:
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


def get_file(preset: str, name: str) -> Path:
    """The path of a preset's file, such as `config.json`, fetched first if it is not on this machine.

    Raises:
        FileNotFoundError: when the preset, a folder or `hf://user/name`, has no such file.
        ValueError, OSError, RuntimeError: when there is no such preset, or it cannot be fetched.
    """
    known = keras_hub.models.Backbone.presets | keras_hub.models.Task.presets
    handle = known[preset]["kaggle_handle"] if preset in known else preset
    if handle.startswith("kaggle://"):
        return Path(kagglehub.model_download(handle.removeprefix("kaggle://"), name))
    if handle.startswith("hf://"):
        try:
            return Path(huggingface_hub.hf_hub_download(handle.removeprefix("hf://"), name))
        except huggingface_hub.errors.EntryNotFoundError as error:
            raise FileNotFoundError(f"{preset} has no {name}") from error
    if not Path(handle).is_dir():
        raise UserError(f"there is no preset {preset}")
    if not (path := Path(handle, name)).is_file():
        raise FileNotFoundError(f"{preset} has no {name}")
    return path


def load_json(preset: str, name: str = "config.json") -> dict[str, Any]:
    """What a preset's JSON file holds; errors are those of `get_file`."""
    return json.loads(get_file(preset, name).read_text(encoding="utf-8"))


def model_width(preset: str, size: str) -> int:
    """The width of the layers of a preset or, if there is none, of a size. Raises a ValueError if it cannot be told."""
    if not preset:
        return dimensions(size)["hidden_dim"]
    with one_line(f"cannot tell the width of the preset {preset}"):
        settings = load_json(preset)
        settings = settings.get("config", settings)
        return settings.get("hidden_dim") or settings.get("hidden_size") or settings["n_embd"]


def huggingface_type(preset: str) -> str:
    """The type of a model in Hugging Face's form, such as `bert`; empty in KerasHub's, or without such a preset."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):  # loading it will report what is wrong
        return load_json(preset).get("model_type", "")
    return ""


def require_head(preset: str, *kinds: str) -> None:
    """Raises a ValueError unless KerasHub saved a preset of these classes with its head, else left random."""
    with one_line(f"cannot load {preset} as a {' or '.join(kinds)} that KerasHub saved"):
        if (kind := load_json(preset, "task.json")["class_name"]) not in kinds:
            raise UserError(f"it is a {kind}")
        get_file(preset, "task.weights.h5")
