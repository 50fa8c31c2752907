# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes doctor`: the library's doctor, with KerasHub's `BertMaskedLM` beside its own models."""

import keras_hub
import numpy as np

from keras_replicas.doctor import EXAMPLES, IDS, LENGTH, MODELS, RANDOM, WORDS, doctor

MASKS = 3  # positions to predict in a sequence


def bert() -> keras_hub.models.BertMaskedLM:
    """A small BERT without dropout, whose noise differs between replicas."""
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 12, "intermediate_dim": 24}
    backbone = keras_hub.models.BertBackbone(WORDS, dropout=0.0, max_sequence_length=LENGTH, **sizes)
    return keras_hub.models.BertMaskedLM(backbone, preprocessor=None, compile=False)


def examine(as_json: bool, workers: int) -> int:
    """Prints a row for each check; returns the exit status."""
    x = {
        "token_ids": IDS,
        "segment_ids": np.zeros_like(IDS),
        "padding_mask": (np.arange(LENGTH) < RANDOM.integers(4, LENGTH + 1, (EXAMPLES, 1))).astype(np.int32),
        "mask_positions": RANDOM.integers(0, 4, (EXAMPLES, MASKS)).astype(np.int32),
    }
    labels = RANDOM.integers(0, WORDS, (EXAMPLES, MASKS))
    weights = (RANDOM.uniform(size=labels.shape) < 0.8).astype(np.float32)
    return doctor(as_json, workers, MODELS | {"KerasHub's BertMaskedLM": (bert, (x, labels, weights))})
