# SPDX-License-Identifier: Apache-2.0
"""BERT and RoBERTa as masked language models; presets' files, and BERT's in the form of Hugging Face transformers.

KerasHub 0.32 reads other families in that form by itself. Of a BERT, it leaves a masked language model's head random,
asks for a pooler, which `BertForMaskedLM` does not have, and for `vocab.txt`, and keeps accents.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
from safetensors import safe_open

from keras_replicas import UserError

from ..data.vocabulary import in_order, wordpieces
from ..files import one_line
from ..untrusted import check_preset
from .presets import backbone_from_size, check_positions, from_preset, place_of

DECODER_BIAS = "cls.predictions.bias"  # the decoder's kernel is the token embedding
# Parts of the names of a BERT's weights: KerasHub's, and those of Hugging Face's form, to be replaced in this order.
NAMES = {
    "token_embedding": "bert.embeddings.word_embeddings",
    "position_embedding": "bert.embeddings.position_embeddings",
    "segment_embedding": "bert.embeddings.token_type_embeddings",
    "embeddings_layer_norm": "bert.embeddings.LayerNorm",
    "pooled_dense": "bert.pooler.dense",
    "mlm_head/output_bias": DECODER_BIAS,
    "mlm_head/intermediate_dense": "cls.predictions.transform.dense",
    "mlm_head/intermediate_layer_norm": "cls.predictions.transform.LayerNorm",
    "transformer_layer_": "bert.encoder.layer.",
    "self_attention_layer_norm": "attention.output.LayerNorm",
    "self_attention_layer/attention_output": "attention.output.dense",
    "self_attention_layer": "attention.self",
    "feedforward_intermediate_dense": "intermediate.dense",
    "feedforward_output_dense": "output.dense",
    "feedforward_layer_norm": "output.LayerNorm",
} | {"/embeddings": ".weight", "/kernel": ".weight", "/gamma": ".weight", "/beta": ".bias", "/": "."}


def masked_lm_from_size(
    size: str, tokenizer: keras_hub.models.Tokenizer, dropout: float, seq_length: int
) -> keras_hub.models.MaskedLM:
    """A BERT, or for a `RobertaTokenizer` a RoBERTa, with random weights, uncompiled.

    Raises a UserError for a tokenizer of another kind, which has no token for what is masked.
    """
    roberta = isinstance(tokenizer, keras_hub.models.RobertaTokenizer)
    if not roberta and not isinstance(tokenizer, keras_hub.models.BertTokenizer):
        kind = type(tokenizer).__name__
        raise UserError(f"a masked language model needs the tokenizer of a BERT or RoBERTa, not a {kind}")
    task = keras_hub.models.RobertaMaskedLM if roberta else keras_hub.models.BertMaskedLM
    backbone = backbone_from_size(task.backbone_cls, size, tokenizer.vocabulary_size(), dropout, seq_length)
    return _without_pooler(task(backbone, compile=False))


def masked_lm_from_preset(
    preset: str, seq_length: int = 1, dropout: float = 0.0, dtype: str | None = None
) -> keras_hub.models.MaskedLM:
    """A BERT or RoBERTa with the weights of a preset, uncompiled, in a Keras dtype policy; None for the current one.

    KerasHub's presets need not have a masked language model's head: it is then random. Raises a UserError when there is
    no such preset, it cannot be fetched, is of another kind, or has fewer than `seq_length` positions.
    """
    models, options = keras_hub.models, {"dropout": dropout, "dtype": dtype, "load_weights": False}
    if huggingface_type(preset):
        model = models.BertMaskedLM(from_preset(models.BertBackbone, preset, **options), compile=False)
        read_weights(model, preset)
    else:
        backbone = from_preset(models.Backbone, preset, **options)
        model = from_preset(models.MaskedLM, preset, backbone=backbone, preprocessor=None, compile=False)
        try:
            get_file(preset, "task.weights.h5")
        except (OSError, ValueError, RuntimeError):
            print(f"The preset {preset} has no task.weights.h5: the head begins with random weights.", file=sys.stderr)
    check_positions(model.backbone, seq_length, preset)
    return _without_pooler(model)


def _without_pooler(model: keras_hub.models.MaskedLM) -> keras_hub.models.MaskedLM:
    if isinstance(model, keras_hub.models.BertMaskedLM):
        model.backbone.pooled_dense.trainable = False  # it takes no part here: its weights would have no gradient
    return model


def get_file(preset: str, name: str) -> Path:
    """The path of a preset's file, such as `config.json`, fetched first if it is not on this machine.

    Raises a FileNotFoundError when the preset, a folder or `hf://user/name`, has no such file, and a ValueError,
    OSError or RuntimeError when there is no such preset, or it cannot be fetched.
    """
    if not Path(folder := place_of(preset)).is_dir():
        raise UserError(f"there is no preset {preset}")
    check_preset(folder)
    if not (path := Path(folder, name)).is_file():
        raise FileNotFoundError(f"{preset} has no {name}")
    return path


def load_json(preset: str, name: str = "config.json") -> dict[str, Any]:
    """What a preset's JSON file holds; errors are those of `get_file`."""
    return json.loads(get_file(preset, name).read_text(encoding="utf-8"))


def huggingface_type(preset: str) -> str:
    """The type of a model in Hugging Face's form, such as `bert`; empty in KerasHub's, or without such a preset."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):  # loading it will report what is wrong
        return load_json(preset).get("model_type", "")
    return ""


def preset_tokenizer(preset: str) -> keras_hub.models.Tokenizer:
    """KerasHub's tokenizer of a masked language model's preset.

    Raises a UserError when there is no such preset, it has none, or is in Hugging Face's form, but no BERT.
    """
    if (kind := huggingface_type(preset)) not in ("", "bert"):
        raise UserError(f"{preset} is a {kind} in Hugging Face's form: give a BERT, or a preset that KerasHub saved")
    if not kind:
        return from_preset(keras_hub.models.Tokenizer, preset)
    settings: dict[str, Any] = {}
    with one_line(f"cannot load {preset}"):
        with contextlib.suppress(FileNotFoundError):  # the oldest checkpoints have vocab.txt alone
            settings = load_json(preset, "tokenizer_config.json")
        try:
            pieces = get_file(preset, "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except FileNotFoundError:  # as transformers 5 saves it
            pieces = in_order(load_json(preset, "tokenizer.json")["model"]["vocab"])
    lowercase, strip = settings.get("do_lower_case"), settings.get("strip_accents")
    return wordpieces(pieces, preset, lowercase, lowercase if strip is None else strip)


def huggingface_weights(model: keras.Model) -> dict[str, keras.Variable]:
    """The variables of a `BertBackbone` or `BertMaskedLM` by their names in Hugging Face's form."""
    named = {}
    for variable in model.weights:
        name = variable.path
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        named[name] = variable
    return named


def read_weights(model: keras.Model, preset: str) -> bool:
    """Loads a `BertBackbone` or `BertMaskedLM` from Hugging Face's form; returns whether that has a pooler.

    If not, the model's is left as it is. Raises a UserError when other weights are missing, such as the head's.
    """
    variables = huggingface_weights(model)
    with one_line(f"cannot load {preset}"), safe_open(get_file(preset, "model.safetensors"), "numpy") as file:
        # Checkpoints that come from TensorFlow have a norm's gamma and beta; those of an encoder alone have no `bert.`
        names = {name.replace(".gamma", ".weight").replace(".beta", ".bias"): name for name in file.keys()}  # noqa: SIM118
        names |= {f"bert.{name}": in_file for name, in_file in names.items()}
        names.setdefault(DECODER_BIAS, names.get("cls.predictions.decoder.bias", ""))  # another name for the same
        if missing := [name for name in variables if not names.get(name) and ".pooler." not in name]:
            raise UserError(f"it lacks {missing[0]}: give a BERT{' with its head' * (DECODER_BIAS in variables)}")
        for name, variable in variables.items():
            if name in names:  # where a kernel is [outputs, inputs]
                tensor = file.get_tensor(names[name])
                variable.assign(np.reshape(tensor.T if variable.path.endswith("kernel") else tensor, variable.shape))
    return "bert.pooler.dense.weight" in names
