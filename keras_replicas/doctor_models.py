# SPDX-License-Identifier: Apache-2.0
"""The small models of the doctor, of Keras's own layers: each function returns (model, x, y[, sample_weight])."""

import keras
import numpy as np

EXAMPLES, TOKENS, VOCABULARY = 77, 12, 30


def masked():
    """Predicts tokens that were replaced; one table is the first and the last matrix, and the padding is masked."""
    tokens, random = sentences(), np.random.default_rng(1)
    ids = keras.Input((TOKENS,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(VOCABULARY, 16)
    x = table(ids)
    attention = keras.layers.MultiHeadAttention(2, 8, dropout=0.1)
    x = keras.layers.LayerNormalization()(x + attention(x, x, attention_mask=keras.ops.not_equal(ids, 0)[:, None]))
    replaced = (random.random(tokens.shape) < 0.3) & (tokens > 0)
    model = compiled(keras.Model(ids, table(x, reverse=True)), reduction="mean_with_sample_weight")
    return model, np.where(replaced, 1, tokens), tokens, replaced.astype("float32")


def causal():
    """Predicts each next token."""
    tokens = sentences()
    ids = keras.Input((TOKENS - 1,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(VOCABULARY, 16)
    x = table(ids)
    x = keras.layers.LayerNormalization()(x + keras.layers.Conv1D(16, 3, padding="causal", activation="gelu")(x))
    model = compiled(keras.Model(ids, table(x, reverse=True)))
    return model, tokens[:, :-1], tokens[:, 1:], (tokens[:, 1:] > 0).astype("float32")


def batch_norm():
    """A convolution whose outputs are normalised over the batch."""
    random, images = np.random.default_rng(0), keras.Input((6, 6, 3))
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, use_bias=False)(images))
    x = keras.layers.GlobalAveragePooling2D()(keras.activations.relu(x))
    model = compiled(keras.Model(images, keras.layers.Dense(3)(x)))
    return model, random.normal(size=(EXAMPLES, 6, 6, 3)), random.integers(0, 3, EXAMPLES)


def compiled(model, reduction="sum_over_batch_size"):
    """The model, which tells classes."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile("adam", loss, weighted_metrics=["accuracy"], jit_compile=False)
    return model


def sentences():
    """Tokens from 2, after which some have padding, 0."""
    random = np.random.default_rng(0)
    lengths = random.integers(4, TOKENS + 1, (EXAMPLES, 1))
    return random.integers(2, VOCABULARY, (EXAMPLES, TOKENS)) * (np.arange(TOKENS) < lengths)
