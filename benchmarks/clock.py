# SPDX-License-Identifier: Apache-2.0
"""Times the steps of a Keras `fit`."""

import time

import keras

WARM = 2  # steps at the beginning of each round, untimed: the first call compiles, and the input pipeline starts


class Clock(keras.callbacks.Callback):
    """The `seconds` of the steps after the first `WARM`."""

    seconds = 0.0

    def on_train_batch_end(self, batch, logs=None):
        """Reads the clock."""
        now = time.perf_counter()
        if batch + 1 == WARM:
            self.began = now
        elif batch + 1 > WARM:
            self.seconds = now - self.began
