# SPDX-License-Identifier: Apache-2.0
"""The small models of the doctor, of Keras's own layers, with their data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

EXAMPLES, BATCH, EPOCHS = 77, 8, 2  # 20 steps, two of them of 5 examples
EVEN = 72  # examples where each replica's part of a batch must be divisible too
TOKENS, VOCABULARY = 12, 30


class Case(NamedTuple):
    """A model with its data.

    Attributes:
        build: makes the model; its dropout must be 0.
        data: the arguments `x`, `y` and perhaps `sample_weight` of `fit`.
        loss: for `compile`.
        ways: options of the trainer with which it is trained too: `accumulate`, and arguments of `compile`.
    """

    build: Callable[[], keras.Model]
    data: dict[str, Any]
    loss: keras.losses.Loss
    ways: tuple[dict[str, Any], ...] = ()


def masked() -> keras.Model:
    """Predicts tokens that were replaced; one table is the first and the last matrix, and the padding is masked."""
    ids = keras.Input((TOKENS,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(VOCABULARY, 16)
    x = table(ids)
    attention = keras.layers.MultiHeadAttention(2, 8, use_bias=False)
    x = keras.layers.LayerNormalization()(x + attention(x, x, attention_mask=keras.ops.not_equal(ids, 0)[:, None]))
    return keras.Model(ids, table(x, reverse=True))


def causal() -> keras.Model:
    """Predicts each next token."""
    ids = keras.Input((TOKENS,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(VOCABULARY, 16)
    x = table(ids)
    x = keras.layers.LayerNormalization()(x + keras.layers.Conv1D(16, 3, padding="causal", activation="gelu")(x))
    return keras.Model(ids, table(x, reverse=True))


def classifier(dropout: float = 0.0) -> keras.Model:
    """Two dense layers."""
    x = inputs = keras.Input((8,))
    x = keras.layers.Dropout(dropout)(keras.layers.Dense(16, "gelu")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def batch_normalized() -> keras.Model:
    """A convolution whose outputs are normalised over the batch."""
    images = keras.Input((6, 6, 3))
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, use_bias=False)(images))
    x = keras.layers.GlobalAveragePooling2D()(keras.activations.relu(x))
    return keras.Model(images, keras.layers.Dense(3)(x))


def cases() -> dict[str, Case]:
    """The models by name, with data from fixed seeds."""
    random = np.random.default_rng(0)
    lengths = random.integers(4, TOKENS + 1, (EXAMPLES, 1))
    tokens = random.integers(2, VOCABULARY, (EXAMPLES, TOKENS + 1)) * (np.arange(TOKENS + 1) < lengths)
    ids, following = tokens[:, :-1], tokens[:, 1:]
    replaced = (random.random(ids.shape) < 0.3) & (ids > 0)
    rows, images = random.normal(size=(EXAMPLES, 8)), random.normal(size=(EXAMPLES, 6, 6, 3))
    classes = random.integers(0, 3, EXAMPLES)

    def weighted(x, y, weight):
        return {"x": x, "y": y, "sample_weight": weight.astype("float32")}

    def loss(reduction="sum_over_batch_size"):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)

    of_labels, in_parts = loss("mean_with_sample_weight"), {"accumulate": 2, "steps_per_execution": 7}
    return {
        "masked": Case(masked, weighted(np.where(replaced, 1, ids), ids, replaced), of_labels, (in_parts,)),
        "causal": Case(causal, weighted(ids, following, following > 0), of_labels),
        "classifier": Case(
            classifier, {"x": rows.astype("float32"), "y": classes}, loss(), (in_parts, {"jit_compile": True})
        ),
        "batch norm": Case(batch_normalized, {"x": images.astype("float32"), "y": classes}, loss()),
    }
