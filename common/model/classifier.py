# SPDX-License-Identifier: Apache-2.0
"""BERT as a classifier of texts. Call inside the strategy's scope."""

import keras_hub
import numpy as np

from common.data.byte_pairs import Vocabulary
from common.data.labelled import LabelledTexts
from common.errors import UserError
from common.model.backbones import backbone_from_size, from_preset
from common.model.huggingface import in_huggingface_form
from common.model.masked_lm import masked_lm_from_preset
from common.training.data_parallel import data_parallel

BertTextClassifier = data_parallel(keras_hub.models.BertTextClassifier)


def make_classifier(
    preset: str, size: str, vocabulary: Vocabulary, texts: LabelledTexts, dropout: float, seq_length: int
) -> keras_hub.models.BertTextClassifier:
    """A text classifier: a randomly initialized head on a BERT from a preset, or without one from a size.

    The head has an output for each class. For regression it has a single one, which begins at the mean of the training
    labels: AdamW would need many steps to get there.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, or is not a BERT.
    """
    if preset:
        backbone = _backbone_from_preset(preset, dropout)
    else:
        backbone = backbone_from_size(size, vocabulary, dropout, seq_length)
    model = BertTextClassifier(backbone, len(texts.classes) or 1, dropout=dropout, compile=False)
    if not texts.classes:
        model.output_dense.bias.assign([np.mean(texts.splits["train"].labels or [])])
    return model


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
