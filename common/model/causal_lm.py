# SPDX-License-Identifier: Apache-2.0
"""Causal language models: GPT-2 from a size, or any of KerasHub's from a preset. Call inside the strategy's scope."""

import functools
import inspect
import math
from pathlib import Path

import keras
import keras_hub

from common.data.byte_pairs import Vocabulary
from common.data.wordpiece import WordPieces
from common.model.backbones import backbone_from_size, from_preset
from common.model.counts import counting
from common.model.lora import enable_lora, save_adapter
from common.model.preset_files import task_class
from common.model.saving import save_task
from keras_replicas import UserError

END = "<|endoftext|>"  # GPT-2's only special token


@functools.cache
def causal_lm_class(kind: type[keras_hub.models.CausalLM]) -> type[keras_hub.models.CausalLM]:
    """A family's class, such as `GPT2CausalLM`, for N replicas."""
    return counting(kind)


def make_preprocessor(
    preset: str, vocabulary: Vocabulary | None, seq_length: int
) -> keras_hub.models.CausalLMPreprocessor:
    """A model's preprocessor, for `seq_length` tokens: a preset's, or GPT-2's for a vocabulary of RoBERTa's byte pairs.

    Of that vocabulary, the end token `</s>` becomes GPT-2's, with the same id; the other four special tokens stand for
    no text, and are never predicted. If both a preset and a vocabulary are given, they must agree.

    Raises:
        UserError: when there is no such preset of a causal language model, it cannot be fetched, or it has another
            vocabulary; or when the vocabulary is of word pieces.
    """
    if isinstance(vocabulary, WordPieces):
        raise UserError("the shards are of word pieces: write them with --architecture roberta, for byte pairs")
    ids = {}
    if vocabulary:
        names = {vocabulary.special.end: END}
        ids = {names.get(piece, piece): number for number, piece in enumerate(vocabulary.pieces)}
    if preset:
        own = from_preset(keras_hub.models.CausalLMPreprocessor, preset, sequence_length=seq_length)
        if vocabulary and getattr(own.tokenizer, "vocabulary", None) != ids:
            raise UserError(f"the preset {preset} has another vocabulary than the shards. Give text, by --corpus")
        return own
    assert vocabulary, "neither a preset nor a vocabulary"
    tokenizer = keras_hub.models.GPT2Tokenizer(ids, vocabulary.merges)
    return keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=seq_length)


def pieces_of(tokenizer: keras_hub.models.Tokenizer) -> list[str]:
    """A tokenizer's vocabulary: its tokens, by id."""
    return [tokenizer.id_to_token(number) for number in range(tokenizer.vocabulary_size())]


def make_causal_lm(
    preset: str,
    size: str,
    preprocessor: keras_hub.models.CausalLMPreprocessor,
    dropout: float,
    lora_rank: int | None = None,
) -> keras_hub.models.CausalLM:
    """A causal language model of any family that KerasHub has, from a preset or, without one, a GPT-2 from a size.

    Args:
        preset: a KerasHub name, or a folder or `hf://` in a format that KerasHub reads; or empty.
        size: a size of `sizes.py`, if there is no preset; see `backbones.backbone_from_size`.
        preprocessor: the model's preprocessor.
        dropout: the model's dropout, in families that have one.
        lora_rank: rank of adapters for the attention's query and value kernels; only these are then trained.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, it needs more than text, it has too few
            positions or another vocabulary than its tokenizer, or KerasHub has no LoRA for it.
    """
    length = preprocessor.sequence_length
    if preset:
        backbone = _backbone_from_preset(preset, dropout, preprocessor)
    else:
        pieces = preprocessor.tokenizer.vocabulary_size()
        backbone = backbone_from_size(keras_hub.models.GPT2Backbone, size, pieces, dropout, length)
    if length > (positions := getattr(backbone, "max_sequence_length", math.inf)):
        raise UserError(f"--seq-length {length} is more than the {positions} positions of the preset {preset}")
    if (pieces := preprocessor.tokenizer.vocabulary_size()) > backbone.vocabulary_size:
        known = f"its tokenizer has {pieces} tokens, the model {backbone.vocabulary_size}"
        raise UserError(f"the preset {preset} is of parts that do not belong together: {known}")
    # Embedding weights are not cast: even in mixed precision, logits would be computed in float32, twice as slowly.
    backbone.token_embedding.reverse_dtype = backbone.token_embedding.compute_dtype
    if lora_rank:
        enable_lora(backbone, lora_rank)
        for variable in backbone.trainable_variables:  # not the biases beside them: an adapter's file has none
            variable.trainable = variable.name.startswith("lora_")
    kind = task_class(keras_hub.models.CausalLM, type(backbone))
    return causal_lm_class(kind)(backbone=backbone, preprocessor=preprocessor, compile=False)


def save_causal_lm(model: keras_hub.models.CausalLM, preset: str, adapter: Path, folder: Path, card: str = "") -> None:
    """Saves a model as a preset, with adapters merged into their kernels, and also the adapters by themselves.

    Args:
        model: a model with its preprocessor.
        preset: the preset that it began from, to whose weights the adapters belong.
        adapter: folder for the adapters, if there are any; see `lora.save_adapter`.
        folder: folder for the preset, with a `card`, if given, as its `README.md`.
    """
    save_task(model, model.preprocessor, folder, card)
    if any(weight.name.startswith("lora_") for weight in model.weights):
        save_adapter(model, preset, adapter)


def _backbone_from_preset(preset: str, dropout: float, preprocessor) -> keras_hub.models.Backbone:
    options = {"dropout": dropout} if "dropout" in inspect.signature(preprocessor.backbone_cls).parameters else {}
    backbone = from_preset(keras_hub.models.Backbone, preset, dtype=keras.config.dtype_policy(), **options)
    if {*backbone.input} != {"token_ids", "padding_mask"}:
        raise UserError(f"the preset {preset} takes {', '.join(sorted(backbone.input))}; give a model of text alone")
    return backbone
