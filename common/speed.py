# SPDX-License-Identifier: Apache-2.0
"""How much arithmetic training a BERT takes, how much the machine could do, and the memory it took."""

import resource
import sys
import time

import keras
import tensorflow as tf

from common.cluster import num_workers

PEAK_SIZE = 1024  # rows and columns of the matrices whose product gives the peak
PEAK_PRODUCTS = 15  # of which the fastest counts: a tenth of a second on two cores


def peak_tokens_per_second(
    strategy: tf.distribute.Strategy, backbone: keras.Model, seq_length: int, mask_rate: float = 0.0
) -> float:
    """Tokens that all devices would train on in a second if they did nothing but the model's matrix products.

    A device's speed is measured, by products of square matrices in the format that the model computes in. All are taken
    to be like this worker's first one; logical devices share one.

    Args:
        strategy: that trains.
        backbone: KerasHub's, of BERT or RoBERTa.
        seq_length: tokens in a sequence.
        mask_rate: share of tokens for which a head gives logits over the vocabulary; 0 for a classifier.
    """
    gpus = tf.config.list_physical_devices("GPU")
    devices = min(len(gpus), strategy.num_replicas_in_sync // num_workers()) if gpus else 1
    flops = flops_per_token(
        backbone.hidden_dim,
        backbone.intermediate_dim,
        backbone.num_layers,
        backbone.vocabulary_size,
        seq_length,
        mask_rate,
    )
    return num_workers() * devices * matmul_flops_per_second(keras.config.dtype_policy().compute_dtype) / flops


def flops_per_token(
    width: int, inner_width: int, num_layers: int, vocabulary_size: int, seq_length: int, mask_rate: float
) -> float:
    """Floating-point operations that training needs for one token, by the maths of this project's formulation.

    A product of a vector with an n x m matrix has 2 n m operations, and its backward pass twice as many: 6 for each
    weight (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Of a layer of width h and inner width i, these are
    4 h^2 + 2 h i. Attention adds 12 h s a layer, for the scores and the mean of s values (Chowdhery et al. 2022, PaLM,
    arXiv:2204.02311, appendix B). The head, h^2 and h for each of V pieces, is needed for masked tokens only. What is
    not a matrix product (norms, gelu, softmax, the optimizer) is left out, so a share of the peak is a lower bound.

    Args:
        width: h, of a layer.
        inner_width: i.
        num_layers: of the encoder.
        vocabulary_size: V, pieces.
        seq_length: s, tokens to which one attends.
        mask_rate: share of tokens that are masked.
    """
    encoder = num_layers * (4 * width**2 + 2 * width * inner_width)
    head = width**2 + width * vocabulary_size
    return 6 * encoder + 12 * num_layers * width * seq_length + 6 * mask_rate * head


def matmul_flops_per_second(dtype: str, size: int = PEAK_SIZE, products: int = PEAK_PRODUCTS) -> float:
    """The fastest of some products of two n x n matrices, of 2 n^3 operations, on the first device.

    Args:
        dtype: `float32`, `bfloat16` or `float16`.
        size: n.
        products: to time, after one that is not.
    """
    matrix = tf.cast(tf.random.stateless_normal([size, size], seed=[0, 0]), dtype)
    multiply = tf.function(lambda: tf.reduce_sum(tf.matmul(matrix, matrix)[0]))
    multiply()  # compiles
    seconds = []
    for _ in range(products):
        began = time.perf_counter()
        multiply().numpy()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def peak_memory_mb() -> float:
    """The most main memory that this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
