# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP/s of a device, measured once per machine."""

import contextlib
import math
import os
import platform
import sys
import time
from pathlib import Path

import tensorflow as tf

from common.caching import cached_file

SECONDS = 0.7  # for which products are repeated; the fastest counts
FEWEST = 5  # products, where they take longer


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
    """FLOP/s of the first device, by the fastest product of two large square matrices.

    A product of n x n matrices has 2 n^3 operations. On a CPU, the time is CPU time divided by the number of cores: the
    load of other processes does not count. On a GPU, a call does many products in sequence, as launching a call takes
    longer than computing one product.

    Args:
        dtype: `float32`, `bfloat16` or `float16`.
        seconds: for which products are repeated, after one that is not timed, and at least `FEWEST` times.
    """
    gpu = bool(tf.config.list_physical_devices("GPU"))
    size, products, cores = (4096, 50, 1) if gpu else (2048, 1, num_cores())
    clock = time.perf_counter if gpu else time.process_time
    matrix = tf.cast(tf.random.stateless_normal([size, size], seed=[0, 0]) / math.sqrt(size), dtype)

    @tf.function
    def multiply():
        _, product = tf.while_loop(
            lambda i, _: i < products, lambda i, left: (i + 1, tf.matmul(left, matrix)), (0, matrix)
        )
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
    """The CPU's model, by Linux's `/proc/cpuinfo`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
