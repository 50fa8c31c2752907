# SPDX-License-Identifier: Apache-2.0
"""Selects a `tf.distribute.Strategy` by the devices of this machine and the environment.

A program asks for a strategy and scales by `strategy.num_replicas_in_sync`; only this module knows how many devices or
machines there are.
"""

import contextlib
import ctypes
import os
import sys
import warnings

import tensorflow as tf

from keras_replicas.cluster import num_workers
from keras_replicas.errors import UserError
from keras_replicas.gpus import free_memory
from keras_replicas.workers import join

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of mallopt, from glibc's malloc.h
IN_USE = "the devices are already in use; ask for replicas={} in a new process"
PLAIN = "{} is a plain model, not exact on several replicas: give it to keras_replicas.data_parallel, in the scope"


def make_strategy(replicas: int = 0, *, deterministic: bool = False) -> tf.distribute.Strategy:
    """Picks the strategy for this process, by its devices. Call it before anything else touches a device.

    Build and compile the model in `with strategy.scope():`. `strategy.num_replicas_in_sync` is the number of replicas
    on all workers together. A plain model's `fit` or `evaluate` under several of them warns: use `data_parallel`.

    - Several workers (by `python -m keras_replicas launch`, `TF_CONFIG`, Slurm or Kubernetes):
      `MultiWorkerMirroredStrategy` over all GPUs of each, or the first `replicas`; on CPUs, a replica for each worker.
      It waits for all workers, which must all call it.
    - `TPU_NAME` is set: `TPUStrategy` over that TPU (untested).
    - GPUs: `MirroredStrategy` over all of them, or the first `replicas`; the others stay free. A single GPU is split
      into `replicas` logical devices of equal memory: that shows what N replicas compute, not how fast they are.
    - No GPU: `MirroredStrategy` over the CPU, split into `replicas` logical devices.

    Args:
        replicas: replicas on this machine; 0 for all its GPUs, or for two on the CPU.
        deterministic: makes GPUs bit-reproducible, as CPUs are, in full float32 precision. By default, a GPU sums in
            an order that depends on its threads, and multiplies in TF32, with a mantissa of 10 bits. An operation
            without a deterministic implementation then raises `tf.errors.UnimplementedError`. It cannot be undone.

    Raises:
        UserError: when this machine cannot have that many replicas, or can no longer, as the devices are in use; when
            there is no TPU at `TPU_NAME`; when a worker has not joined in time (300 s, `JOIN_TIMEOUT`), this one's port
            is in use, or `TF_CONFIG` is malformed.
    """
    if replicas < 0:
        raise UserError(f"replicas must be 0 or more, not {replicas}")
    if deterministic:
        tf.config.experimental.enable_tensor_float_32_execution(False)
        tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    if num_workers() > 1:
        return _of_workers(gpus, replicas)
    if name := os.environ.get("TPU_NAME"):
        try:
            return _warning(tf.distribute.TPUStrategy(tf.distribute.cluster_resolver.TPUClusterResolver.connect(name)))
        except (tf.errors.OpError, ValueError, RuntimeError, OSError) as error:
            raise UserError(
                f"no TPU at TPU_NAME={name} ({str(error).splitlines()[0]}). Give another, or unset it"
            ) from error
    if len(gpus) > 1 and replicas > len(gpus):
        raise UserError(
            f"this machine has {len(gpus)} GPUs, too few for replicas={replicas}; only a single one is split"
        )
    if len(gpus) == 1 and replicas > 1:
        free = free_memory()
        if free is None:
            raise UserError("cannot split the GPU: nvidia-smi does not tell its free memory; give replicas=1")
        return _mirrored(_split(gpus[0], replicas, free * 9 // 10 // replicas))  # a tenth is for CUDA's own use
    if gpus:
        _use_only(gpus[: replicas or None])
        return _mirrored([f"GPU:{i}" for i in range(replicas or len(gpus))], tf.distribute.NcclAllReduce)
    if (replicas or 2) >= num_cores():
        # Replicas that share cores slow each other down if each divides its operations over all of them.
        with contextlib.suppress(RuntimeError):  # TensorFlow is initialized, and keeps its threads
            tf.config.threading.set_intra_op_parallelism_threads(1)
    return _mirrored(_split(tf.config.list_physical_devices("CPU")[0], replicas or 2))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Makes glibc keep freed large blocks for reuse, instead of returning them to the system.

    gRPC copies the workers' gradients into new buffers in every step, and the system would zero each of their pages
    first. Without glibc, it does nothing.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _of_workers(gpus: list, replicas: int) -> tf.distribute.Strategy:
    """The strategy of one of several workers, with all its GPUs or the first `replicas`."""
    most = len(gpus) or 1
    if replicas > most:
        raise UserError(f"a worker has at most {most} replica(s) on this machine: leave out replicas={replicas}")
    _use_only(gpus[: replicas or None])
    keep_freed_memory()
    if num_cores() == 1:
        # TensorFlow answers other workers on the threads that compute: with only one, they would wait for a step.
        with contextlib.suppress(RuntimeError):  # TensorFlow is initialized, and keeps its threads
            tf.config.threading.set_inter_op_parallelism_threads(2)
    library = "NCCL" if gpus else "RING"
    return _warning(join(tf.distribute.experimental.CommunicationOptions(implementation=library)))


def _use_only(gpus: list) -> None:
    """Hides the other GPUs: TensorFlow reserves all memory of each GPU that it sees."""
    if len(gpus) > len(tf.config.get_visible_devices("GPU")):
        raise UserError(IN_USE.format(len(gpus)))
    with contextlib.suppress(RuntimeError):  # TensorFlow is initialized, and keeps its GPUs
        tf.config.set_visible_devices(gpus, "GPU")


def _split(device, count: int, memory_mb: int | None = None) -> list[str]:
    """Names of the first `count` logical devices of a physical one, which is first split if need be."""
    if len(tf.config.get_logical_device_configuration(device) or []) < count:
        logical = [tf.config.LogicalDeviceConfiguration(memory_limit=memory_mb)] * count
        try:
            tf.config.set_logical_device_configuration(device, logical)
        except RuntimeError as error:
            raise UserError(IN_USE.format(count)) from error
    return [f"{device.device_type}:{i}" for i in range(count)]


def _mirrored(devices: list[str], reduce: type = tf.distribute.ReductionToOneDevice) -> tf.distribute.MirroredStrategy:
    # NCCL needs a whole GPU for each replica; a sum on one device works on CPUs and on parts of a GPU too.
    return _warning(tf.distribute.MirroredStrategy(devices, cross_device_ops=reduce()))


def _warning(strategy):
    """The strategy; one of several replicas warns when it runs a plain model's step, such as a loaded one's."""
    run = strategy.run

    def run_step(fn, *args, **kwargs):
        model = getattr(fn, "__self__", None)
        if hasattr(model, "train_function") and not hasattr(model, "plain_class"):
            warnings.warn(PLAIN.format(type(model).__name__), stacklevel=2)
        return run(fn, *args, **kwargs)

    if strategy.num_replicas_in_sync > 1:
        strategy.run = run_step
    return strategy
