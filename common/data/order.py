# SPDX-License-Identifier: Apache-2.0
"""The words of `keras_replicas.locate`, which gives the order of examples."""

NO_EXAMPLE = -1  # where the last batch of an epoch has no more: it must have weight 0


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Steps in which every example is used once: the ratio, rounded up."""
    return -(-num_examples // global_batch_size)
