# SPDX-License-Identifier: Apache-2.0
"""What the peers on torch share: memory, endless batches, one step with Accelerate, and the timing of steps."""

import collections
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator

WARM = 2  # as in benchmarks.clock, which needs Keras
# By default, glibc gives a large tensor's memory back after use, and the kernel clears it for the next: up to half of
# a step's time. Here it keeps all, as do the allocators that torch's guide to tuning recommends, and as
# `keras_replicas.strategy.keep_freed_memory` has it for workers, which needs TensorFlow.
for parameter, value in ((-4, 0), (-1, -1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
    ctypes.CDLL(None).mallopt(parameter, value)


def without_end(loader) -> Iterator[Any]:
    """A loader's batches, epoch after epoch."""
    while True:
        yield from loader


def train_step(accelerator: Accelerator, loss: torch.Tensor, optimizer, schedule) -> float:
    """Updates the weights by a batch's loss, and returns the loss, as the other contenders' steps show theirs."""
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss.item()


def time_steps(step: Callable, batches: Iterator[Any], steps: int, count: Callable[[Any], dict[str, int]]):
    """Trains some steps, after a few untimed ones; returns `steps`, their `seconds`, and the sums of `count(batch)`."""
    for batch in itertools.islice(batches, WARM):
        step(batch)
    counts, began = collections.Counter(), time.perf_counter()
    for batch in itertools.islice(batches, steps):
        step(batch)
        counts.update(count(batch))
    return {"steps": steps, "seconds": time.perf_counter() - began} | dict(counts)
