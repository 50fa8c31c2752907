# SPDX-License-Identifier: Apache-2.0
"""BERT masked language models in the format of Hugging Face transformers, read from a folder or `hf://`.

KerasHub's BERT differs in its head from every BERT of transformers; see `export.py`. Published checkpoints have the
exact form of gelu, where KerasHub's encoder has the tanh form.
"""

import contextlib
from collections.abc import Iterator

import keras
import keras_hub
import numpy as np
from safetensors import SafetensorError, safe_open

from common.data.wordpiece import WordPieces
from common.errors import first_line
from common.model.preset_files import get_file, has_file, load_json
from keras_replicas import UserError

DECODER_BIAS = "cls.predictions.bias"  # the decoder's kernel is the token embedding


def require_head(preset: str, *kinds: str) -> None:
    """Refuses a KerasHub preset without the weights of a task's head, which KerasHub would leave random.

    A preset in Hugging Face's format needs no such check: `read_weights` requires the head's.

    Raises:
        UserError: when there is no such preset, it is of a backbone alone or of a task other than these classes, such
            as `BertMaskedLM`, or lacks those weights.
    """
    with one_line(f"cannot load {preset} as a {' or '.join(kinds)} that KerasHub saved"):
        if (kind := load_json(preset, "task.json")["class_name"]) not in kinds:
            raise ValueError(f"it is a {kind}")
        get_file(preset, "task.weights.h5")


def in_huggingface_form(preset: str) -> bool:
    """Whether there is such a preset, written by transformers or `export_bert`."""
    try:
        return "model_type" in load_json(preset)
    except (ValueError, OSError, RuntimeError):
        return False  # loading it will report what is wrong


def read_weights(variables: dict[str, keras.Variable], preset: str) -> bool:
    """Loads the weights of a BERT preset in Hugging Face's format.

    KerasHub's own converter leaves the head of a masked language model random, and asks for a pooler, which
    `BertForMaskedLM` does not have.

    Args:
        variables: by their names in that format: `encoder_variables` or `masked_lm_variables`.
        preset: its folder, or `hf://user/name`.

    Returns:
        Whether it has the pooler's weights; if not, they are left as they are.

    Raises:
        UserError: when the preset lacks other weights, of a head for example.
    """
    masked = " masked language model" if DECODER_BIAS in variables else ""
    with one_line(f"cannot load {preset}"), safe_open(get_file(preset, "model.safetensors"), "numpy") as file:
        # Checkpoints that come from TensorFlow name a norm's scale and shift gamma and beta.
        names = {name.replace(".gamma", ".weight").replace(".beta", ".bias"): name for name in file.keys()}  # noqa: SIM118
        if "embeddings.word_embeddings.weight" in names:  # of an encoder alone
            names |= {f"bert.{name}": own for name, own in names.items()}
        if "cls.predictions.decoder.bias" in names:  # another name for the same
            names.setdefault(DECODER_BIAS, "cls.predictions.decoder.bias")
        for name, variable in variables.items():
            if name in names:
                tensor = file.get_tensor(names[name])
                variable.assign(np.reshape(tensor.T if variable.path.endswith("kernel") else tensor, variable.shape))
            elif ".pooler." not in name:  # which takes no part in masked language modelling
                raise UserError(f"the preset {preset} lacks {name}; give a BERT{masked}")
    return "bert.pooler.dense.weight" in names


def read_vocabulary(preset: str) -> WordPieces:
    """The WordPiece vocabulary of a BERT preset in Hugging Face's format; a `UserError` when it has none."""
    with one_line(f"cannot load {preset}"):
        told = has_file(preset, "tokenizer_config.json")  # the oldest checkpoints have vocab.txt alone
        settings = load_json(preset, "tokenizer_config.json") if told else {}
        lowercase, strip_accents = settings.get("do_lower_case", True), settings.get("strip_accents")
        if has_file(preset, "vocab.txt"):
            pieces = get_file(preset, "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        else:  # as transformers 5 saves it
            ids = load_json(preset, "tokenizer.json")["model"]["vocab"]
            pieces = sorted(ids, key=ids.get)
    return WordPieces(pieces, lowercase, lowercase if strip_accents is None else strip_accents)


@contextlib.contextmanager
def one_line(message: str) -> Iterator[None]:
    """Converts errors of KerasHub, h5py, safetensors and the file system to a `UserError` with this message."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise UserError(f"{message} ({first_line(error)})") from error


def encoder_variables(backbone: keras_hub.models.BertBackbone) -> dict[str, keras.Variable]:
    """An encoder's variables by their names in Hugging Face's format, where a kernel is [outputs, inputs]."""
    layers = {
        "embeddings.word_embeddings": backbone.token_embedding,
        "embeddings.position_embeddings": backbone.position_embedding,
        "embeddings.token_type_embeddings": backbone.segment_embedding,
        "embeddings.LayerNorm": backbone.embeddings_layer_norm,
        "pooler.dense": backbone.pooled_dense,
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
            layers[f"encoder.layer.{i}.{name}"] = layer
    return _variables({f"bert.{name}": layer for name, layer in layers.items()})


def masked_lm_variables(model: keras_hub.models.BertMaskedLM) -> dict[str, keras.Variable]:
    """As `encoder_variables`, with those of the masked language model's head."""
    head = model.masked_lm_head
    layers = {
        "cls.predictions.transform.dense": head._intermediate_dense,
        "cls.predictions.transform.LayerNorm": head._intermediate_layer_norm,
    }
    return {DECODER_BIAS: head._bias} | encoder_variables(model.backbone) | _variables(layers)


def _variables(layers: dict[str, keras.layers.Layer]) -> dict[str, keras.Variable]:
    variables: dict[str, keras.Variable] = {}
    for name, layer in layers.items():  # an embedding has no bias
        variables |= zip((f"{name}.weight", f"{name}.bias"), layer.weights, strict=False)
    return variables
