# SPDX-License-Identifier: Apache-2.0
"""A BERT in the form of Hugging Face transformers: its tokenizer, and its weights with those of a masked LM's head.

KerasHub 0.32 reads other families by itself. Of a BERT, it leaves a masked language model's head random, asks for a
pooler, which `BertForMaskedLM` does not have, and for the file `vocab.txt`, and keeps the accents that BERT strips.
"""

import contextlib
from typing import Any

import keras
import keras_hub
import numpy as np
from safetensors import safe_open

from keras_replicas import UserError

from .presets import from_preset, get_file, huggingface_type, load_json, one_line

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


def preset_tokenizer(preset: str) -> keras_hub.models.Tokenizer:
    """KerasHub's tokenizer of a preset. Raises a UserError when there is no such preset, or it has none."""
    if huggingface_type(preset) != "bert":
        return from_preset(keras_hub.models.Tokenizer, preset)
    settings: dict[str, Any] = {}
    with one_line(f"cannot load {preset}"):
        with contextlib.suppress(FileNotFoundError):  # the oldest checkpoints have vocab.txt alone
            settings = load_json(preset, "tokenizer_config.json")
        try:
            pieces = get_file(preset, "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except FileNotFoundError:  # as transformers 5 saves it
            ids = load_json(preset, "tokenizer.json")["model"]["vocab"]
            pieces = sorted(ids, key=ids.get)
    lowercase, strip = settings.get("do_lower_case", True), settings.get("strip_accents")
    return keras_hub.models.BertTokenizer(
        pieces, lowercase=lowercase, strip_accents=lowercase if strip is None else strip
    )


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
    """Loads the weights of a `BertBackbone` or `BertMaskedLM` from a preset in Hugging Face's form.

    Returns whether it has a pooler; if not, the model's is left as it is. Raises a UserError when it lacks other
    weights, such as the head's.
    """
    variables = huggingface_weights(model)
    with one_line(f"cannot load {preset}"), safe_open(get_file(preset, "model.safetensors"), "numpy") as file:
        # Checkpoints that come from TensorFlow have a norm's gamma and beta; those of an encoder alone have no `bert.`
        names = {name.replace(".gamma", ".weight").replace(".beta", ".bias"): name for name in file.keys()}  # noqa: SIM118
        names |= {f"bert.{name}": own for name, own in names.items()}
        names.setdefault(DECODER_BIAS, names.get("cls.predictions.decoder.bias", ""))  # another name for the same
        missing = [name for name in variables if not names.get(name) and ".pooler." not in name]
        if missing:
            raise UserError(f"it lacks {missing[0]}: give a BERT{' with its head' * (DECODER_BIAS in variables)}")
        for name, variable in variables.items():
            if name in names:  # where a kernel is [outputs, inputs]
                tensor = file.get_tensor(names[name])
                variable.assign(np.reshape(tensor.T if variable.path.endswith("kernel") else tensor, variable.shape))
    return "bert.pooler.dense.weight" in names
