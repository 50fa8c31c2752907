# SPDX-License-Identifier: Apache-2.0
"""Causal language models, uncompiled: GPT-2 from a size, or any of KerasHub's from a preset."""

import inspect
import math

import keras
import keras_hub

from keras_replicas import UserError

from .presets import backbone_from_size, enable_lora, from_preset

END = "<|endoftext|>"  # GPT-2's only special token


def make_preprocessor(
    preset: str, tokenizer: keras_hub.models.Tokenizer | None, seq_length: int
) -> keras_hub.models.CausalLMPreprocessor:
    """A model's preprocessor, for `seq_length` tokens: a preset's, or GPT-2's for a vocabulary of byte pairs.

    Of a `RobertaTokenizer`, the end token `</s>` becomes GPT-2's, with the same id; the other four special tokens stand
    for no text, and are never predicted. If both a preset and a tokenizer are given, they must agree.

    Raises:
        UserError: when there is no such preset of a causal language model, it cannot be fetched, or it has another
            vocabulary; or when the tokenizer is not of byte pairs.
    """
    if not isinstance(tokenizer, keras_hub.tokenizers.BytePairTokenizer | None):
        raise UserError(f"a causal language model needs byte pairs; this vocabulary is a {type(tokenizer).__name__}")
    ids = dict(tokenizer.vocabulary) if tokenizer else {}
    if isinstance(tokenizer, keras_hub.models.RobertaTokenizer):
        ids[END] = ids.pop(tokenizer.end_token)
    if preset:
        own = from_preset(keras_hub.models.CausalLMPreprocessor, preset, sequence_length=seq_length)
        if tokenizer and getattr(own.tokenizer, "vocabulary", None) != ids:
            raise UserError(f"the preset {preset} has another vocabulary than the data: give text, not token ids")
        return own
    assert tokenizer, "neither a preset nor a tokenizer"
    gpt2 = keras_hub.models.GPT2Tokenizer(ids, tokenizer.merges)
    return keras_hub.models.GPT2CausalLMPreprocessor(gpt2, sequence_length=seq_length)


def make_causal_lm(
    preset: str,
    size: str,
    preprocessor: keras_hub.models.CausalLMPreprocessor,
    dropout: float,
    lora_rank: int | None = None,
) -> keras_hub.models.CausalLM:
    """A causal language model of any family that KerasHub has, from a preset or, without one, a GPT-2 from a size.

    Call it inside the strategy's scope.

    Args:
        preset: a KerasHub name, or a folder or `hf://` in a form that KerasHub reads; or empty.
        size: a size of `sizes.py`, if there is no preset; see `presets.backbone_from_size`.
        preprocessor: the model's preprocessor.
        dropout: the model's dropout, in families that have one.
        lora_rank: rank of adapters for the attention's query and value kernels; only these are then trained.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, it needs more than text, it has too few
            positions or another vocabulary than its tokenizer, or KerasHub has no LoRA for it.
    """
    models, tokens = keras_hub.models, preprocessor.tokenizer.vocabulary_size()
    if preset:
        has_dropout = "dropout" in inspect.signature(preprocessor.backbone_cls).parameters
        options = {"dropout": dropout} if has_dropout else {}
        backbone = from_preset(models.Backbone, preset, dtype=keras.config.dtype_policy(), **options)
    else:
        backbone = backbone_from_size(models.GPT2Backbone, size, tokens, dropout, preprocessor.sequence_length)
    if {*backbone.input} != {"token_ids", "padding_mask"}:
        raise UserError(f"the preset {preset} takes {', '.join(sorted(backbone.input))}; give a model of text alone")
    length, positions = preprocessor.sequence_length, getattr(backbone, "max_sequence_length", math.inf)
    if length > positions:
        raise UserError(f"{length} tokens are more than the {positions} positions of the preset {preset}")
    if tokens > backbone.vocabulary_size:
        known = f"its tokenizer has {tokens} tokens, the model {backbone.vocabulary_size}"
        raise UserError(f"the preset {preset} is of parts that do not belong together: {known}")
    # Embedding weights are not cast: even in mixed precision, logits would be computed in float32, twice as slowly.
    backbone.token_embedding.reverse_dtype = backbone.token_embedding.compute_dtype
    if lora_rank:
        enable_lora(backbone, lora_rank)
    options = {"backbone": backbone, "preprocessor": preprocessor, "compile": False}
    if preset:
        return from_preset(models.CausalLM, preset, load_weights=False, **options)
    return models.GPT2CausalLM(**options)
