# SPDX-License-Identifier: Apache-2.0
"""Times the steps of a Keras `fit`."""

import time
from collections.abc import Callable

import keras

WARM = 2  # steps at the beginning of each round, untimed: the first call compiles, and the input pipeline starts


class Clock(keras.callbacks.Callback):
    """Seconds and tokens of the steps after the first `WARM`.

    Args:
        tokens_of: maps a step of this `fit`, counted from 0, to its tokens, not counting padding.
    """

    def __init__(self, tokens_of: Callable[[int], int]):
        super().__init__()
        self.tokens_of = tokens_of
        self.seconds, self.tokens = 0.0, 0

    def on_train_batch_end(self, batch, logs=None):
        """Reads the clock."""
        now = time.perf_counter()
        if batch + 1 == WARM:
            self.began = now
        elif batch + 1 > WARM:
            self.seconds = now - self.began
            self.tokens += self.tokens_of(batch)
