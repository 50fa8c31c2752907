# SPDX-License-Identifier: Apache-2.0
"""Exports a GPT-2 to Hugging Face transformers.

Both compute the same up to rounding, with the tanh form of gelu. The tokenizer splits a text as KerasHub's does, not by
GPT-2's own pattern, and begins it with an end token, as KerasHub's preprocessor does.
"""

import functools
import json
from pathlib import Path

import keras_hub
import numpy as np
from safetensors.numpy import save
from tokenizers import processors

from common.data.byte_pairs import byte_pair_tokenizer
from common.model.export import require_new, task_class, write_folder
from common.model.huggingface import one_line
from keras_replicas import UserError


def export_gpt2(preset: str, folder: Path) -> None:
    """Writes a folder that `transformers.pipeline("text-generation", folder)` loads. It is written atomically.

    Args:
        preset: the KerasHub preset of a GPT-2: a name, or a folder made by `save_to_preset`.
        folder: destination; it must be empty or not exist.

    Raises:
        UserError: when the preset is not one, or the folder cannot be written.
    """
    require_new(folder)
    if task_class(preset) != "GPT2CausalLM":
        raise UserError(f"cannot load {preset} as a GPT2CausalLM that KerasHub saved")
    with one_line(f"cannot load {preset} as a GPT2CausalLM that KerasHub saved"):
        model = keras_hub.models.GPT2CausalLM.from_preset(preset, dtype="float32", compile=False)
    write_folder(folder, functools.partial(_write, model.backbone, model.preprocessor.tokenizer))


def gpt2_tensors(backbone: keras_hub.models.GPT2Backbone) -> dict[str, np.ndarray]:
    """A GPT-2's weights by their names in transformers, where a kernel is [inputs, outputs]."""
    width = backbone.hidden_dim
    tensors = {
        "wte.weight": backbone.token_embedding.embeddings,
        "wpe.weight": backbone.position_embedding.position_embeddings,
    }
    norms = {"ln_f": backbone.layer_norm}
    for i, block in enumerate(backbone.transformer_layers):
        attention = block._self_attention_layer
        norms |= {f"h.{i}.ln_1": block._self_attention_layer_norm, f"h.{i}.ln_2": block._feedforward_layer_norm}
        inputs = (attention.query_dense, attention.key_dense, attention.value_dense)
        for name, layers in {
            "attn.c_attn": inputs,  # side by side
            "attn.c_proj": (attention.output_dense,),
            "mlp.c_fc": (block._feedforward_intermediate_dense,),
            "mlp.c_proj": (block._feedforward_output_dense,),
        }.items():
            rows = backbone.intermediate_dim if name == "mlp.c_proj" else width
            kernels = [np.reshape(layer.kernel, [rows, -1]) for layer in layers]
            tensors[f"h.{i}.{name}.weight"] = np.concatenate(kernels, axis=1)
            tensors[f"h.{i}.{name}.bias"] = np.concatenate([np.ravel(layer.bias) for layer in layers])
    for name, norm in norms.items():
        tensors |= {f"{name}.weight": norm.gamma, f"{name}.bias": norm.beta}
    return {f"transformer.{name}": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _write(backbone: keras_hub.models.GPT2Backbone, tokenizer: keras_hub.models.GPT2Tokenizer, folder: Path) -> None:
    # The library's own save_file makes a file that only its owner can read.
    (folder / "model.safetensors").write_bytes(save(gpt2_tensors(backbone), metadata={"format": "pt"}))
    end, number = tokenizer.end_token, tokenizer.end_token_id
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": backbone.vocabulary_size,
        "n_layer": backbone.num_layers,
        "n_head": backbone.num_heads,
        "n_embd": backbone.hidden_dim,
        "n_inner": backbone.intermediate_dim,
        "n_positions": backbone.max_sequence_length,
        "resid_pdrop": backbone.dropout,
        "embd_pdrop": backbone.dropout,
        "attn_pdrop": backbone.dropout,
        "activation_function": "gelu_new",  # the tanh form
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": number,
        "eos_token_id": number,
        "dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is; GPT2Tokenizer splits differently
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "model_max_length": backbone.max_sequence_length,
    }
    for name, entries in {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "vocab.json": dict(tokenizer.vocabulary),
    }.items():
        (folder / name).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    merges = [merge for merge in tokenizer.merges if not merge.startswith("#version")]
    (folder / "merges.txt").write_text("".join(f"{merge}\n" for merge in merges), encoding="utf-8")
    own = byte_pair_tokenizer(tokenizer.vocabulary, merges)
    own.add_special_tokens([end])
    own.post_processor = processors.TemplateProcessing(single=f"{end} $0", special_tokens=[(end, number)])
    own.save(str(folder / "tokenizer.json"))
