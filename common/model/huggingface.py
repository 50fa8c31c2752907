# SPDX-License-Identifier: Apache-2.0
"""BERT masked language models in the form of Hugging Face transformers: folders are written, they and `hf://` read.

KerasHub's BERT differs in its head from every BERT of transformers. Its encoder has the tanh form of gelu and its head
the exact one; the head's norm has an epsilon of 1e-5 and all others 1e-12. A `config.json` has one `hidden_act` and one
`layer_norm_eps` for all: ours are the encoder's. By transformers, an exported model's logits are then off by up to 2e-3
and its probabilities by 2e-4, for the default run's model, logits from -9 to 12 and every token of ten sentences; with
the exact gelu it would be 5e-3 and 2e-4. Nothing else differs: with both put right in Keras's head, 5e-6 is left.
Published checkpoints have the exact gelu, so that their encoder is off by as much here, as it is in KerasHub.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import keras
import keras_hub
import numpy as np
from keras_hub.src.utils.preset_utils import check_file_exists, get_file, load_json
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tokenizers import processors

from common.data.wordpiece import WordPieces
from common.errors import UserError, first_line
from common.files import UNFINISHED

DECODER_BIAS = "cls.predictions.bias"  # the decoder's kernel is the token embedding


def export_bert(preset: str, folder: Path) -> None:
    """Writes a folder that `transformers.pipeline("fill-mask", folder)` loads. It is there complete, or not at all.

    Args:
        preset: the KerasHub preset of a BERT masked language model: a name, or a folder made by `save_to_preset`.
        folder: where to; it must be empty or not there.

    Raises:
        UserError: when the preset is another one, or the folder cannot be written.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists already; give a folder that does not")
    model, vocabulary = _load_keras_hub(preset)
    unfinished = folder.with_name(f".{folder.name}{UNFINISHED}")
    try:
        with _one_line(f"cannot write {folder}"):
            unfinished.mkdir(parents=True)
            _write(model, vocabulary, unfinished)
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def require_head(preset: str, *kinds: str) -> None:
    """Refuses a KerasHub preset without the weights of a task's head, which KerasHub would leave random.

    A preset in Hugging Face's form needs no such check: `read_weights` asks for its head's.

    Args:
        preset: a name, or a folder made by `save_to_preset`.
        kinds: the classes of which the task must be one, such as `BertMaskedLM`.

    Raises:
        UserError: when there is no such preset, it is of a backbone alone or of another task, or lacks those weights.
    """
    with _one_line(f"cannot load {preset} as a {' or '.join(kinds)} that KerasHub saved"):
        if (kind := load_json(preset, "task.json")["class_name"]) not in kinds:
            raise ValueError(f"it is a {kind}")
        get_file(preset, "task.weights.h5")


def in_huggingface_form(preset: str) -> bool:
    """Whether there is such a preset, and transformers wrote it, or `export_bert`."""
    try:
        return "model_type" in load_json(preset)
    except (ValueError, OSError, RuntimeError):
        return False  # who loads it says what is wrong


def read_weights(model: keras_hub.models.BertMaskedLM, preset: str) -> None:
    """Gives a model the weights of a BERT preset in Hugging Face's form, those of its head too.

    KerasHub's own converter leaves the head random, and asks for a pooler, which `BertForMaskedLM` does not have.

    Raises:
        UserError: when the preset lacks weights, of a head for example.
    """
    with _one_line(f"cannot load {preset}"), safe_open(get_file(preset, "model.safetensors"), "numpy") as file:
        # Checkpoints that come from TensorFlow call what scales and shifts in a norm gamma and beta.
        names = {name.replace(".gamma", ".weight").replace(".beta", ".bias"): name for name in file.keys()}  # noqa: SIM118
        if "cls.predictions.decoder.bias" in names:  # another name of the same
            names.setdefault(DECODER_BIAS, "cls.predictions.decoder.bias")
        for name, variable in _variables(model).items():
            if name in names:
                tensor = file.get_tensor(names[name])
                variable.assign(np.reshape(tensor.T if variable.path.endswith("kernel") else tensor, variable.shape))
            elif ".pooler." not in name:  # which takes no part in masked language modelling
                raise UserError(f"the preset {preset} lacks {name}; give a BERT masked language model")


def read_vocabulary(preset: str) -> WordPieces:
    """The WordPiece vocabulary of a BERT preset in Hugging Face's form.

    Raises:
        UserError: when the preset has none.
    """
    with _one_line(f"cannot load {preset}"):
        told = check_file_exists(preset, "tokenizer_config.json")  # the oldest checkpoints have vocab.txt alone
        settings = load_json(preset, "tokenizer_config.json") if told else {}
        lowercase, strip_accents = settings.get("do_lower_case", True), settings.get("strip_accents")
        if check_file_exists(preset, "vocab.txt"):
            pieces = Path(get_file(preset, "vocab.txt")).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        else:  # as transformers 5 saves it
            ids = load_json(preset, "tokenizer.json")["model"]["vocab"]
            pieces = sorted(ids, key=ids.get)
    return WordPieces(pieces, lowercase, lowercase if strip_accents is None else strip_accents)


@contextlib.contextmanager
def _one_line(message: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise UserError(f"{message} ({first_line(error)})") from error


def _load_keras_hub(preset: str) -> tuple[keras_hub.models.BertMaskedLM, WordPieces]:
    require_head(preset, "BertMaskedLM")
    with _one_line(f"cannot load {preset} as a BertMaskedLM that KerasHub saved"):
        model = keras_hub.models.BertMaskedLM.from_preset(preset, dtype="float32", compile=False)
        tokenizer = keras_hub.models.BertTokenizer.from_preset(preset)
    return model, WordPieces(tokenizer.get_vocabulary(), tokenizer.lowercase, tokenizer.strip_accents)


def _variables(model: keras_hub.models.BertMaskedLM) -> dict[str, keras.Variable]:
    """A model's variables by their names in Hugging Face's form, where a kernel is [outputs, inputs]."""
    backbone, head = model.backbone, model.masked_lm_head
    layers = {
        "bert.embeddings.word_embeddings": backbone.token_embedding,
        "bert.embeddings.position_embeddings": backbone.position_embedding,
        "bert.embeddings.token_type_embeddings": backbone.segment_embedding,
        "bert.embeddings.LayerNorm": backbone.embeddings_layer_norm,
        "bert.pooler.dense": backbone.pooled_dense,
        "cls.predictions.transform.dense": head._intermediate_dense,
        "cls.predictions.transform.LayerNorm": head._intermediate_layer_norm,
    }
    for i, block in enumerate(backbone.transformer_layers):
        attention = block._self_attention_layer
        for name, layer in {
            "attention.self.query": attention.query_dense,
            "attention.self.key": attention.key_dense,
            "attention.self.value": attention.value_dense,
            "attention.output.dense": attention.output_dense,
            "attention.output.LayerNorm": block._self_attention_layer_norm,
            "intermediate.dense": block._feedforward_intermediate_dense,
            "output.dense": block._feedforward_output_dense,
            "output.LayerNorm": block._feedforward_layer_norm,
        }.items():
            layers[f"bert.encoder.layer.{i}.{name}"] = layer
    variables = {DECODER_BIAS: head._bias}
    for name, layer in layers.items():  # an embedding has no bias
        variables |= zip((f"{name}.weight", f"{name}.bias"), layer.weights, strict=False)
    return variables


def _write(model: keras_hub.models.BertMaskedLM, vocabulary: WordPieces, folder: Path) -> None:
    backbone, variables = model.backbone, _variables(model)
    tensors = {}
    for name, variable in variables.items():
        tensor = np.array(variable)
        if variable.path.endswith("kernel"):
            outputs = variables[name.replace(".weight", ".bias")]
            tensor = np.ascontiguousarray(tensor.reshape(-1, math.prod(outputs.shape)).T)
        tensors[name] = tensor.ravel() if name.endswith(".bias") else tensor
    # Its own save_file makes a file that only its owner may read.
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
    tokenizer.add_special_tokens(list(dataclasses.astuple(special)))
    tokenizer.post_processor = processors.BertProcessing(
        *((token, vocabulary.pieces.index(token)) for token in (special.end, special.start))
    )
    tokenizer.save(str(folder / "tokenizer.json"))
