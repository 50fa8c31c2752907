# SPDX-License-Identifier: Apache-2.0
"""What can be told to be wrong with the model that is asked for before TensorFlow is imported."""

import json
from pathlib import Path

from common.data.wordpiece import load_wordpieces
from common.errors import UserError
from common.model.sizes import dimensions


def check_model(preset: str, size: str | None, seq_length: int, vocabulary: str = "") -> None:
    """Checks where a model comes from: a preset, or a size and a vocabulary.

    Raises:
        UserError: when both are given, there is no such size or vocabulary, or the preset, where it is a folder, is
            none of BERT or too short for the sequences.
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


def _check_preset_folder(folder: Path, seq_length: int) -> None:
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "model_type" in settings:  # Hugging Face's form
            positions = settings["max_position_embeddings"]
            pieces = settings["vocab_size"]
        else:
            positions = settings["config"]["max_sequence_length"]
            pieces = settings["config"]["vocabulary_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is no BERT preset; give a folder that save_to_preset made") from error
    if seq_length > positions:
        raise UserError(f"--seq-length {seq_length} is more than the {positions} positions of the preset {folder}")
    files = ("tokenizer.json", "vocab.txt") if "model_type" in settings else ("tokenizer.json",)
    if not any((folder / name).is_file() for name in files):
        raise UserError(f"the preset {folder} has no {' or '.join(files)}, the tokenizer its model was trained with")
    words = folder / "assets/tokenizer/vocabulary.txt"
    if words.is_file() and (found := len(words.read_text(encoding="utf-8").splitlines())) != pieces:
        raise UserError(f"{words} has {found} pieces, and the preset's model {pieces}: they do not belong together")
