# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes doctor`: the doctor of `keras_replicas`, with a model of KerasHub's."""

import argparse
import sys

import keras_hub
import numpy as np

from keras_replicas import doctor as library
from keras_replicas.doctor_models import TOKENS, VOCABULARY, Case

MASKS = 3  # in each sequence


def bert() -> keras_hub.models.BertMaskedLM:
    """A small BERT.

    Its table of segments is frozen: plain Keras's Adam squares the gradients of a row one by one, and ours does not.
    """
    backbone = keras_hub.models.BertBackbone(VOCABULARY, 1, 2, 16, 32, dropout=0.0, max_sequence_length=TOKENS)
    for name in ("segment_embedding", "pooled_dense"):  # the second is not used here
        backbone.get_layer(name).trainable = False
    return keras_hub.models.BertMaskedLM(backbone, preprocessor=None)


def cases() -> dict[str, Case]:
    """KerasHub's `BertMaskedLM`, by its name, with the tokens of the library's model."""
    masked = library.cases()["masked"]
    ids = masked.data["x"]
    positions = np.argsort(np.random.default_rng(0).random(ids.shape))[:, :MASKS]
    labels = np.take_along_axis(masked.data["y"], positions, axis=1)
    x = {"token_ids": ids, "segment_ids": ids * 0, "padding_mask": ids > 0, "mask_positions": positions}
    data = {"x": x, "y": labels, "sample_weight": (labels > 0).astype("float32")}
    return {"BertMaskedLM": masked._replace(build=bert, data=data, ways=())}


def doctor(options: argparse.Namespace) -> int:
    """See `keras_replicas.doctor.doctor`."""
    return library.doctor(options, cases(), __name__, {"keras-hub": "0.32"})


if __name__ == "__main__":
    library.work(sys.argv[1], library.cases() | cases())
