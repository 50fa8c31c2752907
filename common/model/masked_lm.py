# SPDX-License-Identifier: Apache-2.0
"""BERT and RoBERTa as masked language models. Call inside the strategy's scope."""

import keras_hub

from common.data.byte_pairs import BytePairs, Vocabulary
from common.data.wordpiece import WordPieces
from common.model.backbones import backbone_from_size, from_preset
from common.model.counts import counting
from common.model.huggingface import in_huggingface_form, masked_lm_variables, read_vocabulary, read_weights

BertMaskedLM = counting(keras_hub.models.BertMaskedLM)
RobertaMaskedLM = counting(keras_hub.models.RobertaMaskedLM)


def masked_lm_from_size(
    size: str, vocabulary: Vocabulary, dropout: float, seq_length: int
) -> keras_hub.models.MaskedLM:
    """A masked language model with random weights; see `backbones.backbone_from_size`."""
    task = BertMaskedLM if isinstance(vocabulary, WordPieces) else RobertaMaskedLM
    backbone = backbone_from_size(task.backbone_cls, size, len(vocabulary.pieces), dropout, seq_length)
    return _without_pooler(task(backbone, compile=False))


def masked_lm_from_preset(preset: str, dropout: float = 0.0, dtype: str | None = None) -> keras_hub.models.MaskedLM:
    """A BERT or RoBERTa with the weights of a preset: a name, or a folder made by `save_to_preset` or `export_bert`.

    Args:
        preset: its name or folder.
        dropout: the model's dropout.
        dtype: a Keras dtype policy; None for the current one.

    Raises:
        UserError: when there is no such preset, or it cannot be fetched.
    """
    if in_huggingface_form(preset):
        options = {"dropout": dropout, "dtype": dtype, "load_weights": False}
        model = BertMaskedLM(from_preset(keras_hub.models.BertBackbone, preset, **options), compile=False)
        read_weights(masked_lm_variables(model), preset)
        return _without_pooler(model)
    plain = from_preset(keras_hub.models.MaskedLM, preset, dtype=dtype, compile=False)
    bert = isinstance(plain, keras_hub.models.BertMaskedLM)
    # KerasHub 0.32 keeps the dropout that a preset was saved with, whatever is asked for.
    backbone = type(plain.backbone).from_config(plain.backbone.get_config() | {"dropout": dropout})
    model = (BertMaskedLM if bert else RobertaMaskedLM)(backbone, compile=False)
    model.set_weights(plain.get_weights())
    return _without_pooler(model)


def preset_vocabulary(preset: str) -> Vocabulary:
    """The vocabulary of a preset.

    Raises:
        UserError: when there is no such preset, or it cannot be fetched.
    """
    if in_huggingface_form(preset):
        return read_vocabulary(preset)
    tokenizer = from_preset(keras_hub.models.Tokenizer, preset)
    if isinstance(tokenizer, keras_hub.models.RobertaTokenizer):
        pieces = sorted(tokenizer.vocabulary, key=tokenizer.vocabulary.get)
        return BytePairs(pieces, [merge for merge in tokenizer.merges if not merge.startswith("#version")])
    return WordPieces(tokenizer.get_vocabulary(), tokenizer.lowercase, tokenizer.strip_accents)


def _without_pooler(model: keras_hub.models.MaskedLM) -> keras_hub.models.MaskedLM:
    # BERT's pooled output takes no part in masked language modelling; its weights would have no gradient.
    if isinstance(model, BertMaskedLM):
        model.backbone.pooled_dense.trainable = False
    return model
