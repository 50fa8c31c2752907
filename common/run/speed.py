# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs utilisation (MFU) of training a BERT, and peak memory."""

import math
import resource
import sys
from typing import NamedTuple

import keras
import tensorflow as tf

from common.devices.cluster import num_workers
from common.devices.peak import device_peak


class ModelFlops(NamedTuple):
    """What model FLOPs utilisation (MFU) is computed from: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 4.1.

    Attributes:
        per_token: floating-point operations of training, per token.
        peak: peak FLOP/s of all devices.
    """

    per_token: float
    peak: float

    def utilisation(self, tokens_per_second: float) -> float:
        """MFU at that throughput, as a fraction."""
        return tokens_per_second * self.per_token / self.peak


UNKNOWN = ModelFlops(0.0, math.inf)


def model_flops(
    strategy: tf.distribute.Strategy, backbone: keras.Model, seq_length: int, mask_rate: float = 0.0
) -> ModelFlops:
    """What a run's MFU is computed from.

    The peak is measured, where PaLM takes the vendor's: by matrix products in the model's compute dtype, once per
    machine. All devices are assumed to be like this worker's first one; logical devices share one.

    Args:
        strategy: that trains.
        backbone: KerasHub's, of BERT or RoBERTa.
        seq_length: tokens in a sequence.
        mask_rate: fraction of tokens for which a head computes logits over the vocabulary; 0 for a classifier.
    """
    gpus = tf.config.list_physical_devices("GPU")
    devices = min(len(gpus), strategy.num_replicas_in_sync // num_workers()) if gpus else 1
    per_token = flops_per_token(
        backbone.hidden_dim,
        backbone.intermediate_dim,
        backbone.num_layers,
        backbone.vocabulary_size,
        seq_length,
        mask_rate,
    )
    return ModelFlops(per_token, num_workers() * devices * device_peak(keras.config.dtype_policy().compute_dtype))


def flops_per_token(
    width: int, inner_width: int, num_layers: int, vocabulary_size: int, seq_length: int, mask_rate: float
) -> float:
    """Floating-point operations of training for one token, in this project's formulation of the model.

    A product of a vector with an n x m matrix has 2 n m operations, and its backward pass twice as many: 6 for each
    weight (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Of a layer of width h and inner width i, these are
    4 h^2 + 2 h i. Attention adds 12 h s a layer, for the scores and the mean of s values (Chowdhery et al. 2022, PaLM,
    arXiv:2204.02311, appendix B). The head, h^2 and h for each of V tokens, is needed for masked tokens only. What is
    not a matrix product (norms, gelu, softmax, the optimizer) is not counted, so devices do more than MFU shows.

    Args:
        width: h, of a layer.
        inner_width: i.
        num_layers: of the encoder.
        vocabulary_size: V, tokens in the vocabulary.
        seq_length: s, tokens that each attends to.
        mask_rate: fraction of tokens that are masked.
    """
    encoder = num_layers * (4 * width**2 + 2 * width * inner_width)
    head = width**2 + width * vocabulary_size
    return 6 * encoder + 12 * num_layers * width * seq_length + 6 * mask_rate * head


def peak_memory_mb() -> float:
    """Peak host memory of this process, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
