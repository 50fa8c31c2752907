# SPDX-License-Identifier: Apache-2.0
"""Model sizes, and the checks of the requested model that do not need TensorFlow."""

import json
import math
from pathlib import Path
from typing import Literal

from common.data.wordpiece import load_wordpieces
from keras_replicas import UserError

# Layers and width; a head has 64 columns, and the inner layer is 4 widths. Base and large: Devlin et al. 2018,
# arXiv:1810.04805; the others: Turc et al. 2019, "Well-Read Students Learn Better", arXiv:1908.08962.
SIZES = {
    "nano": (1, 64),  # ours, published nowhere: for tests
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
Size = Literal["nano", "tiny", "mini", "small", "medium", "base", "large"]
# GPT-2's own: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
GPT2_SIZES = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}
CausalSize = Literal[Size, "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
DIMENSIONS = ("num_layers", "num_heads", "hidden_dim", "intermediate_dim")


def dimensions(size: str) -> dict[str, int]:
    """A model's `num_layers`, `num_heads`, `hidden_dim` and `intermediate_dim`.

    Args:
        size: a name of `SIZES` or `GPT2_SIZES`, or a JSON file with these four, as KerasHub's backbones name them.

    Raises:
        UserError: when it is neither.
    """
    if sizes := (SIZES | GPT2_SIZES).get(size):
        num_layers, width = sizes
        return dict(zip(DIMENSIONS, (num_layers, width // 64, width, 4 * width), strict=True))
    try:
        given = json.loads(Path(size).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--model {size} is neither {', '.join(SIZES)}, nor a JSON file ({error})") from error
    if (
        not isinstance(given, dict)
        or set(given) != set(DIMENSIONS)
        or not all(isinstance(n, int) and n > 0 for n in given.values())
    ):
        raise UserError(f"{size} must have exactly these keys, with positive integers: {', '.join(DIMENSIONS)}")
    if given["hidden_dim"] % given["num_heads"]:
        raise UserError(f"{size}: hidden_dim {given['hidden_dim']} is not divisible by num_heads {given['num_heads']}")
    return given


def check_model(preset: str, size: str | None, seq_length: int, vocabulary: str = "") -> None:
    """Checks where a model comes from: a preset, or a size and a vocabulary.

    Raises:
        UserError: when both are given, there is no such size or vocabulary, or the preset, if it is a folder, is
            not of a language model or has too few positions for the sequences.
    """
    if preset and (size or vocabulary):
        both = "--model" if size else "--vocabulary"
        raise UserError(f"--preset brings its own model and vocabulary: leave out {both}, or --preset")
    if vocabulary:
        load_wordpieces(vocabulary)
    if preset and Path(preset).is_dir():
        _check_preset_folder(Path(preset), seq_length)
    if size:
        dimensions(size)


def check_vocabulary_size(architecture: str, size: int) -> None:
    """Raises a `UserError` when a vocabulary has no room for its mandatory tokens."""
    if architecture == "roberta" and size < 261:
        raise UserError(f"--vocabulary-size must be at least 261: 256 bytes, 5 special tokens; got {size}")


def check_lora(rank: int | None, preset: str) -> None:
    """Raises a `UserError` when adapters are asked for, by their rank, without a preset to adapt."""
    if rank and not preset:
        raise UserError("--lora-rank adapts the weights of a preset: give --preset, or leave it out")


def _check_preset_folder(folder: Path, seq_length: int) -> None:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "model_type" in settings:  # Hugging Face's form
            positions = settings.get("max_position_embeddings") or settings["n_positions"]  # GPT-2's name for it
            vocabulary_size = settings["vocab_size"]
        else:
            config = settings["config"]  # decoders without position embeddings have no limit there
            positions, vocabulary_size = config.get("max_sequence_length", math.inf), config["vocabulary_size"]
        too_long = seq_length > positions
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} is not a preset of a language model; give a folder made by save_to_preset"
        ) from error
    if too_long:
        raise UserError(f"--seq-length {seq_length} is more than the {positions} positions of the preset {folder}")
    kind = settings.get("model_type", "keras")
    files = {"bert": ("tokenizer.json", "vocab.txt"), "keras": ("tokenizer.json",)}.get(kind)
    if files and not any((folder / name).is_file() for name in files):
        raise UserError(f"the preset {folder} has no {' or '.join(files)}, the tokenizer its model was trained with")
    words = folder / "assets/tokenizer/vocabulary.txt"
    if words.is_file() and (found := len(words.read_text(encoding="utf-8").splitlines())) != vocabulary_size:
        raise UserError(
            f"{words} has {found} tokens, but the preset's model has a vocabulary size of {vocabulary_size}: "
            "they do not belong together"
        )
