# SPDX-License-Identifier: Apache-2.0
"""Exports a BERT masked language model to Hugging Face transformers.

KerasHub's BERT differs in its head from every BERT of transformers. Its encoder has the tanh form of gelu and its head
the exact one; the head's norm has an epsilon of 1e-5 and all others 1e-12. A `config.json` has one `hidden_act` and one
`layer_norm_eps` for all: ours are the encoder's. In transformers, an exported model's logits are then off by up to 2e-3
and its probabilities by 2e-4 (for the default run's model, with logits from -9 to 12, on every token of ten sentences);
with the exact gelu, by 5e-3 and 2e-4. Nothing else differs: with both corrected in Keras's head, 5e-6 is left.
Published checkpoints have the exact gelu, so their encoder is off by as much here, as it is in KerasHub.
"""

import functools
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import keras_hub
import numpy as np
from safetensors.numpy import save
from tokenizers import processors

from common.data.wordpiece import WordPieces
from common.files import UNFINISHED
from common.model.huggingface import masked_lm_variables, one_line, require_head
from common.model.preset_files import load_json
from keras_replicas import UserError


def export_bert(preset: str, folder: Path) -> None:
    """Writes a folder that `transformers.pipeline("fill-mask", folder)` loads. It is written atomically.

    Args:
        preset: the KerasHub preset of a BERT masked language model: a name, or a folder made by `save_to_preset`.
        folder: destination; it must be empty or not exist.

    Raises:
        UserError: when the preset is not one, or the folder cannot be written.
    """
    require_new(folder)
    require_head(preset, "BertMaskedLM")
    with one_line(f"cannot load {preset} as a BertMaskedLM that KerasHub saved"):
        model = keras_hub.models.BertMaskedLM.from_preset(preset, dtype="float32", compile=False)
        tokenizer = keras_hub.models.BertTokenizer.from_preset(preset)
    vocabulary = WordPieces(tokenizer.get_vocabulary(), tokenizer.lowercase, tokenizer.strip_accents)
    write_folder(folder, functools.partial(_write, model, vocabulary))


def _write(model: keras_hub.models.BertMaskedLM, vocabulary: WordPieces, folder: Path) -> None:
    backbone, variables = model.backbone, masked_lm_variables(model)
    tensors = {}
    for name, variable in variables.items():
        tensor = np.array(variable)
        if variable.path.endswith("kernel"):
            outputs = variables[name.replace(".weight", ".bias")]
            tensor = np.ascontiguousarray(tensor.reshape(-1, math.prod(outputs.shape)).T)
        tensors[name] = tensor.ravel() if name.endswith(".bias") else tensor
    # The library's own save_file makes a file that only its owner can read.
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))

    config = {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": backbone.vocabulary_size,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "hidden_size": backbone.hidden_dim,
        "intermediate_size": backbone.intermediate_dim,
        "max_position_embeddings": backbone.max_sequence_length,
        "type_vocab_size": backbone.num_segments,
        "hidden_dropout_prob": backbone.dropout,
        "attention_probs_dropout_prob": backbone.dropout,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-12,
        "pad_token_id": vocabulary.pieces.index(vocabulary.special.pad),
        "dtype": "float32",
    }
    special = vocabulary.special
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is; BertTokenizer makes its own
        "pad_token": special.pad,
        "unk_token": special.unknown,
        "cls_token": special.start,
        "sep_token": special.end,
        "mask_token": special.mask,
        "do_lower_case": vocabulary.lowercase,
        "strip_accents": vocabulary.strip_accents,
        "model_max_length": backbone.max_sequence_length,
    }
    for name, entries in {"config.json": config, "tokenizer_config.json": tokenizer_config}.items():
        (folder / name).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in vocabulary.pieces), encoding="utf-8")
    tokenizer = vocabulary.tokenizer()
    tokenizer.add_special_tokens([*special])
    tokenizer.post_processor = processors.BertProcessing(
        *((token, vocabulary.pieces.index(token)) for token in (special.end, special.start))
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def task_class(preset: str) -> str:
    """The name of a preset's task, such as `GPT2CausalLM`; empty if it has none, or there is no such preset."""
    try:
        return load_json(preset, "task.json")["class_name"]
    except (ValueError, OSError, RuntimeError, KeyError):
        return ""


def require_new(folder: Path) -> None:
    """Raises a `UserError` unless a folder is empty, or does not exist."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder.resolve()} already exists; give a new folder")


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes a new folder that `write` fills, complete or not at all. Raises a `UserError` if it cannot be written."""
    folder = folder.resolve()
    unfinished = folder.with_name(f".{folder.name}{UNFINISHED}")
    try:
        with one_line(f"cannot write {folder}"):
            unfinished.mkdir(parents=True)
            write(unfinished)
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
