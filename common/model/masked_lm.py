# SPDX-License-Identifier: Apache-2.0
"""BERT and RoBERTa as masked language models, uncompiled. Call inside the strategy's scope."""

import keras_hub

from .huggingface import read_weights
from .presets import backbone_from_size, from_preset, huggingface_type


def masked_lm_from_size(
    size: str, tokenizer: keras_hub.models.Tokenizer, dropout: float, seq_length: int
) -> keras_hub.models.MaskedLM:
    """A BERT, or for a `RobertaTokenizer` a RoBERTa, with random weights; see `presets.backbone_from_size`."""
    roberta = isinstance(tokenizer, keras_hub.models.RobertaTokenizer)
    task = keras_hub.models.RobertaMaskedLM if roberta else keras_hub.models.BertMaskedLM
    backbone = backbone_from_size(task.backbone_cls, size, tokenizer.vocabulary_size(), dropout, seq_length)
    return _without_pooler(task(backbone, compile=False))


def masked_lm_from_preset(preset: str, dropout: float = 0.0, dtype: str | None = None) -> keras_hub.models.MaskedLM:
    """A BERT or RoBERTa with the weights of a preset, in KerasHub's form or, of a BERT, in Hugging Face's.

    Args:
        preset: its name or folder. KerasHub's need not have a masked language model's head: it is then random.
        dropout: the model's dropout, whatever the preset was saved with.
        dtype: a Keras dtype policy; None for the current one.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, or it is of another kind.
    """
    models, options = keras_hub.models, {"dropout": dropout, "dtype": dtype, "load_weights": False}
    if huggingface_type(preset):
        model = models.BertMaskedLM(from_preset(models.BertBackbone, preset, **options), compile=False)
        read_weights(model, preset)
    else:
        backbone = from_preset(models.Backbone, preset, **options)
        model = from_preset(models.MaskedLM, preset, backbone=backbone, preprocessor=None, compile=False)
    return _without_pooler(model)


def _without_pooler(model: keras_hub.models.MaskedLM) -> keras_hub.models.MaskedLM:
    # BERT's pooled output takes no part in masked language modelling; its weights would have no gradient.
    if isinstance(model, keras_hub.models.BertMaskedLM):
        model.backbone.pooled_dense.trainable = False
    return model
