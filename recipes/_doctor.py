# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes doctor`: the doctor of `keras_replicas`, with a model of KerasHub's."""

import argparse

import keras_hub
import numpy as np

from keras_replicas import doctor as library
from keras_replicas.doctor_models import TOKENS, VOCABULARY, compiled, sentences

MASKS = 3  # in each sequence


def bert():
    """KerasHub's `BertMaskedLM`, small, with the tokens of the library's models."""
    backbone = keras_hub.models.BertBackbone(VOCABULARY, 1, 2, 16, 32, dropout=0.1, max_sequence_length=TOKENS)
    backbone.get_layer("pooled_dense").trainable = False  # it is not used here
    model = keras_hub.models.BertMaskedLM(backbone, preprocessor=None)
    ids = sentences()
    positions = np.argsort(np.random.default_rng(0).random(ids.shape))[:, :MASKS]
    labels = np.take_along_axis(ids, positions, axis=1)
    masked = ids.copy()
    np.put_along_axis(masked, positions, 1, axis=1)
    x = {"token_ids": masked, "segment_ids": ids * 0, "padding_mask": ids > 0, "mask_positions": positions}
    return compiled(model), x, labels, (labels > 0).astype("float32")


def doctor(options: argparse.Namespace) -> int:
    """Runs the library's doctor, with KerasHub's model too; returns the exit status."""
    return library.doctor(options, bert, **{"keras-hub": "0.32"})
