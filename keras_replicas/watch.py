# SPDX-License-Identifier: Apache-2.0
"""What `check` compares of each step."""

import keras
import numpy as np

KINDS = ("layer state", "optimizer state", "weight")
SKETCH = 4096  # numbers that are kept of a large tensor


class Watch(keras.callbacks.Callback):
    """Gives a model its weights at the start, and notes what is to be compared after each step."""

    def __init__(self, start):
        super().__init__()
        self.start, self.step = start, 0
        self.values: list[tuple] = []  # kind, step, name, value

    def note(self, kind, values):
        """Keeps values by name; of a large one, `SKETCH` sums with random signs, whose norm is much the same."""
        for name in sorted(values, key=lambda name: (name != "loss", name)):
            value = np.asarray(values[name])
            if value.size > SKETCH:
                signs = np.random.default_rng(0).choice([-1.0, 1.0], value.size)
                value = np.bincount(np.arange(value.size) % SKETCH, signs * value.ravel())
            self.values.append((kind, self.step, f"{kind} {name} after step {self.step}", value))

    def on_train_begin(self, logs=None):
        """All is built by now."""
        if self.step == 0 and self.start:
            self.model.set_weights(self.start)
        self.start = self.start or self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        """Losses and metrics are running means."""
        self.step += 1
        self.note("mean", logs)
        optimizer = getattr(self.model.optimizer, "variables", [])
        of_kinds = self.model.non_trainable_weights, optimizer, self.model.trainable_weights
        for kind, variables in zip(KINDS, of_kinds, strict=True):
            for variable in variables:
                self.note(kind, {variable.path: variable.numpy()})
