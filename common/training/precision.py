# SPDX-License-Identifier: Apache-2.0
"""The dtype policy of a run."""

from pathlib import Path

import keras
import tensorflow as tf

# Width of a model whose matmuls outweigh the casts around them. BERT-base (768) trained 1.8 times as fast in bfloat16
# on a CPU with AMX; smaller ones were not measured.
WIDE = 768


def choose_precision(precision: str, jit: bool, width: int) -> str:
    """The Keras dtype policy: as given or, for `auto`, chosen by the hardware and the model, never by a timing.

    | hardware | model | policy |
    | --- | --- | --- |
    | GPUs of compute capability 8.0 or more | any | `mixed_bfloat16` |
    | no GPU, a CPU with AMX, no jit (XLA does not use AMX) | as wide as BERT-base | `mixed_bfloat16` |
    | any other | any | `float32` |

    Sets Keras's `floatx` to float32, whatever `~/.keras/keras.json` says: only the policy counts.

    Args:
        precision: a policy, or `auto`.
        jit: whether the step is compiled by XLA.
        width: of the model's layers.
    """
    keras.config.set_floatx("float32")
    if precision != "auto":
        return precision
    if gpus := tf.config.list_physical_devices("GPU"):
        capabilities = [tf.config.experimental.get_device_details(gpu).get("compute_capability") for gpu in gpus]
        fast = all(capability and capability >= (8, 0) for capability in capabilities)
    else:
        fast = has_amx() and width >= WIDE and not jit
    return "mixed_bfloat16" if fast else "float32"


def has_amx() -> bool:
    """Whether the CPU multiplies bfloat16 matrices in hardware, by Linux's `/proc/cpuinfo`."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
