# SPDX-License-Identifier: Apache-2.0
"""Model sizes, and the checks of a requested model and of where it is pushed to, which do not need TensorFlow."""

import json
import math
import os
import re
from pathlib import Path
from typing import Literal

from keras_replicas import UserError

from ..files import MALFORMED, one_line
from ..untrusted import check_preset

# Layers and width; a head has 64 columns, and the inner layer is 4 widths. Base and large: Devlin et al. 2018,
# arXiv:1810.04805; the others: Turc et al. 2019, "Well-Read Students Learn Better", arXiv:1908.08962.
SIZES = {
    "nano": (1, 64),  # ours, for tests
    "micro": (1, 128),  # ours, for a minute of two cores
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
Size = Literal["nano", "micro", "tiny", "mini", "small", "medium", "base", "large"]
# GPT-2's own: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
GPT2_SIZES = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}
CausalSize = Literal[Size, "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
DIMENSIONS = ("num_layers", "num_heads", "hidden_dim", "intermediate_dim")


def dimensions(size: str) -> dict[str, int]:
    """A model's `DIMENSIONS`: of a name of `SIZES` or `GPT2_SIZES`, or in a JSON file, else a UserError."""
    if size in SIZES | GPT2_SIZES:
        layers, width = (SIZES | GPT2_SIZES)[size]
        return dict(zip(DIMENSIONS, (layers, width // 64, width, 4 * width), strict=True))
    with one_line(f"the size {size} is neither {', '.join(SIZES)}, nor a JSON file", errors=MALFORMED):
        given = json.loads(Path(size).read_text(encoding="utf-8"))
        is_complete = {*given} == {*DIMENSIONS} and all(isinstance(n, int) and n > 0 for n in given.values())
    if not is_complete or given["hidden_dim"] % given["num_heads"]:
        keys = ", ".join(DIMENSIONS)
        raise UserError(f"{size} must have exactly {keys}: integers above 0, hidden_dim a multiple of num_heads")
    return given


def check_model(preset: str, size: str | None, seq_length: int, lora_rank: int | None = None) -> None:
    """Raises a UserError when a preset comes with a size, or adapters without one, or there is no such size, or the
    preset, if it is a folder, is not of a language model or has too few positions for `seq_length` tokens.
    """
    if size:
        dimensions(size)
    if lora_rank and not preset:
        raise UserError("adapters need a preset: name one, or leave out the rank")
    if preset and size:
        raise UserError(f"a preset brings its own model: leave out the size {size}, or the preset {preset}")
    if not os.path.isdir(preset):
        return
    check_preset(preset)
    with one_line(f"{preset} is no preset of a language model", "; give a folder made by save_to_preset", MALFORMED):
        config = json.loads(Path(preset, "config.json").read_text(encoding="utf-8"))
        if "model_type" in config:  # Hugging Face's form, where GPT-2 has its own name for it
            positions = config.get("max_position_embeddings") or config.get("n_positions")
            if not positions:
                raise ValueError("its config.json has neither max_position_embeddings nor n_positions")
        else:  # decoders without position embeddings have no limit there
            positions = config["config"].get("max_sequence_length", math.inf)
        too_long = seq_length > positions
    if too_long:
        raise UserError(f"{seq_length} tokens are more than the {positions} positions of the preset {preset}")


def check_push_to(uri: str, public: bool = False) -> None:
    """Raises a UserError unless models can be uploaded there: `hf://user/name`, with a token. Empty: no uploads."""
    if not uri and public:
        raise UserError("a public model needs a repository to be pushed to: name one, hf://user/name")
    if not uri:
        return
    from huggingface_hub import get_token, is_offline_mode  # which takes a while, and most runs do without it

    if not re.fullmatch(r"hf://[\w.-]+/[\w.-]+", uri):
        raise UserError(f"models are pushed to hf://user/name, on the Hugging Face Hub; got {uri}")
    if is_offline_mode():
        raise UserError(f"pushing to {uri} needs the network, and HF_HUB_OFFLINE is set: unset it")
    if not get_token():
        raise UserError(f"pushing to {uri} needs a token of the Hub: run `hf auth login`, or set HF_TOKEN")
