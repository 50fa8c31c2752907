# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA GPUs of this machine, from `nvidia-smi`: for code that runs before TensorFlow is imported."""

import itertools
import os
import subprocess

from keras_replicas.errors import UserError


def gpu_names() -> list[str]:
    """A line for each GPU of the machine; empty if `nvidia-smi` is not available."""
    return [line for line in _ask("--list-gpus") if line.startswith("GPU ")]  # without the parts of split GPUs


def free_memory() -> int | None:
    """Free memory of the first visible GPU, in MiB; None if `nvidia-smi` does not tell."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = ["--query-gpu=memory.free", "--format=csv,noheader,nounits", *(["--id", visible] if visible else [])]
    answer = _ask(*words)
    return int(answer[0]) if answer and answer[0].isdecimal() else None


def visible_gpus() -> list[str]:
    """The name in `CUDA_VISIBLE_DEVICES` of each GPU that this process may use; if not set, all of the machine's.

    As in CUDA, the first invalid one ends the list:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    """
    found = [str(i) for i in range(len(gpu_names()))]
    if not found or "CUDA_VISIBLE_DEVICES" not in os.environ:
        return found
    names = (name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    # A name is a GPU's number, or its UUID, whose beginning is enough.
    return list(itertools.takewhile(lambda name: name in found or name.startswith(("GPU-", "MIG-")), names))


def gpu_shares(workers: int) -> tuple[list[str], int]:
    """The `CUDA_VISIBLE_DEVICES` of each worker on this machine, and the number of unused GPUs.

    Workers that train synchronously must have the same number of GPUs. Without a visible GPU, there are no shares.

    Raises:
        UserError: when there are fewer GPUs than workers.
    """
    gpus = visible_gpus()
    share = len(gpus) // workers
    if not gpus:
        return [], 0
    if not share:
        raise UserError(
            f"{workers} workers need a GPU each, and this process may use {len(gpus)}. "
            "Start fewer workers, or set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    return [",".join(gpus[i * share : (i + 1) * share]) for i in range(workers)], len(gpus) - workers * share


def _ask(*words: str) -> list[str]:
    """The lines that `nvidia-smi` answers; none if it fails."""
    try:
        answer = subprocess.check_output(["nvidia-smi", *words], text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return []
    return answer.splitlines()
