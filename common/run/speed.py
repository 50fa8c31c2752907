# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs utilisation (MFU) of training a language model: its FLOPs, and the devices' peak; and peak memory."""

import contextlib
import math
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import keras
import keras_hub
import tensorflow as tf

from common.files import cached_file
from keras_replicas import num_workers

SECONDS = 0.7  # for which products are repeated; the fastest counts
FEWEST = 5  # products, even if they take longer


class ModelFlops(NamedTuple):
    """What MFU is computed from: Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 4.1."""

    per_token: float  # floating-point operations of training
    peak: float  # FLOP/s of all devices

    def utilisation(self, tokens_per_second: float) -> float:
        """MFU at that throughput, as a fraction."""
        return tokens_per_second * self.per_token / self.peak


UNKNOWN = ModelFlops(0.0, math.inf)


def model_flops(model: keras.Model, config: Any) -> ModelFlops:
    """What a run's MFU is computed from.

    The peak is measured, with matrix products in the model's compute dtype, once per machine; PaLM takes the vendor's.
    All devices are assumed to be like this worker's first one; logical devices share one.

    Args:
        model: with a BERT as its `backbone`, or a causal language model, made inside the strategy's scope.
        config: a masked language model's, with a `seq_length` and a `mask_rate`, the share of tokens for which the head
            computes logits over the vocabulary; a causal one's, with a `seq_length` and a `lora_rank`; or a
            classifier's, with a `lora_rank`. A classifier's FLOPs are a lower bound: of all layers but the last, and
            without attention's own products, as the work for these depends on the batch. With LoRA, kernels have no
            gradient, so two of the three products with each remain.
    """
    gpus = tf.config.list_physical_devices("GPU")
    devices = min(len(gpus), model.distribute_strategy.num_replicas_in_sync // num_workers()) if gpus else 1
    bert = model.backbone
    widths, pieces = (bert.hidden_dim, bert.intermediate_dim), bert.vocabulary_size
    if isinstance(model, keras_hub.models.CausalLM):
        per_token = causal_flops_per_token(bert, config.seq_length, bool(config.lora_rank))
    elif hasattr(config, "mask_rate"):
        per_token = flops_per_token(*widths, bert.num_layers, pieces, config.seq_length, config.mask_rate)
    else:
        per_token = flops_per_token(*widths, bert.num_layers - 1, pieces, 0, 0.0) * (2 / 3 if config.lora_rank else 1)
    return ModelFlops(per_token, num_workers() * devices * device_peak(keras.config.dtype_policy().compute_dtype))


def flops_per_token(
    width: int, inner_width: int, num_layers: int, vocabulary_size: int, seq_length: int, mask_rate: float
) -> float:
    """Floating-point operations of training for one token, in this project's formulation of the model.

    A product of a vector with an n x m matrix has 2 n m operations, and its backward pass twice as many: 6 for each
    weight (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). A layer of width h and inner width i has 4 h^2 + 2 h i
    weights. In sequences of s tokens, attention adds 12 h s per layer, for the scores and the mean of the values
    (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B). The head, with h^2 weights and h for each token of the
    vocabulary, is needed for masked tokens only, a fraction `mask_rate`. What is not a matrix product (norms, gelu,
    softmax, the optimizer) is not counted, so devices do more than MFU shows.
    """
    encoder = num_layers * (4 * width**2 + 2 * width * inner_width)
    head = width**2 + width * vocabulary_size
    return 6 * encoder + 12 * num_layers * width * seq_length + 6 * mask_rate * head


def causal_flops_per_token(backbone: keras.Model, seq_length: int, lora: bool = False) -> float:
    """As `flops_per_token`, from the kernels of a causal language model's backbone; not for a mixture of experts.

    All tokens are labels, so each is multiplied with the vocabulary's embeddings. The half of attention that the causal
    mask hides is counted: it is computed. With LoRA, kernels and embeddings have no gradient, which saves a third.
    """
    kernels = sum(math.prod(weight.shape) for weight in backbone.weights if weight.path.endswith("kernel"))
    head = backbone.hidden_dim * backbone.vocabulary_size
    return (4 if lora else 6) * (kernels + head) + 12 * backbone.num_layers * backbone.hidden_dim * seq_length


def device_peak(dtype: str) -> float:
    """`matmul_flops_per_second`, cached for this machine."""
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()  # on GPUs, float32 in fewer bits
    key = (device_name(), str(num_cores()), dtype, f"TF32 {tf32}", tf.__version__)

    def measure(path: Path) -> None:
        path.write_text(str(matmul_flops_per_second(dtype)))

    with contextlib.suppress(OSError):  # the disk is full: the peak is measured each time
        return float(cached_file("peak", key, measure).read_text())
    return matmul_flops_per_second(dtype)


def matmul_flops_per_second(dtype: str, seconds: float = SECONDS) -> float:
    """FLOP/s of the first device, from the fastest of several products of two large square matrices.

    A product of n x n matrices has 2 n^3 operations. On a CPU, the time is CPU time divided by the number of cores: the
    load of other processes does not count. On a GPU, a call does many products in sequence, as launching a call takes
    longer than computing one product.

    Args:
        dtype: `float32`, `bfloat16` or `float16`.
        seconds: how long products are repeated, at least `FEWEST` times, after one that is not timed.
    """
    gpu = bool(tf.config.list_physical_devices("GPU"))
    size, products, cores = (4096, 50, 1) if gpu else (2048, 1, num_cores())
    clock = time.perf_counter if gpu else time.process_time
    matrix = tf.cast(tf.random.stateless_normal([size, size], seed=[0, 0]) / math.sqrt(size), dtype)

    @tf.function
    def multiply():
        product = matrix
        for _ in tf.range(products):
            product = tf.matmul(product, matrix)
        return tf.reduce_sum(product[0])

    multiply().numpy()  # compiles
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < FEWEST or time.perf_counter() - began < seconds:
        before = clock()
        multiply().numpy()
        taken.append((clock() - before) / cores)
    return products * 2 * size**3 / min(taken)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def device_name() -> str:
    """The model of the first GPU, or of the CPU where there is none."""
    gpus = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU") if gpus else cpu_name()


def cpu_name() -> str:
    """The CPU's model, from Linux's `/proc/cpuinfo`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_memory_mb() -> float:
    """Peak host memory of this process, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
