# SPDX-License-Identifier: Apache-2.0
"""BERT as a classifier of texts. Call inside the strategy's scope."""

import keras_hub

from common.data.byte_pairs import Vocabulary
from common.errors import UserError
from common.model.backbones import backbone_from_size, from_preset
from common.model.huggingface import in_huggingface_form
from common.model.masked_lm import masked_lm_from_preset
from common.training.data_parallel import data_parallel

BertTextClassifier = data_parallel(keras_hub.models.BertTextClassifier)


def make_classifier(
    preset: str, size: str, vocabulary: Vocabulary, num_classes: int, dropout: float, seq_length: int
) -> keras_hub.models.BertTextClassifier:
    """A text classifier: a randomly initialized head on a BERT from a preset, or without one from a size.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, or is not a BERT.
    """
    if preset:
        backbone = _backbone_from_preset(preset, dropout)
    else:
        backbone = backbone_from_size(size, vocabulary, dropout, seq_length)
    return BertTextClassifier(backbone, num_classes, dropout=dropout, compile=False)


def _backbone_from_preset(preset: str, dropout: float) -> keras_hub.models.BertBackbone:
    if in_huggingface_form(preset):
        backbone = masked_lm_from_preset(preset, dropout).backbone
        backbone.pooled_dense.trainable = True
        return backbone
    plain = from_preset(keras_hub.models.Backbone, preset)
    if not isinstance(plain, keras_hub.models.BertBackbone):
        raise UserError(f"the preset {preset} is a {type(plain).__name__}; give a BERT preset")
    backbone = type(plain).from_config(plain.get_config() | {"dropout": dropout})
    backbone.set_weights(plain.get_weights())
    return backbone
