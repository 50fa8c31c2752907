# SPDX-License-Identifier: Apache-2.0
"""Samples of what a causal language model writes during training."""

from typing import Any

import keras
import tensorflow as tf

from common.model.generate import continuations, make_sampler
from common.run.callbacks import FitLog
from keras_replicas import UserError, is_chief


class Samples(keras.callbacks.Callback):
    """At each epoch's end, shows in TensorBoard how the model continues some texts, with the same draws each time.

    Only the chief does so. It needs a model of `keras_replicas.model`, which counts its steps.

    Args:
        log: the run's; `samples` are added to its TensorBoard file.
        data: the data trained on; the texts are its `prompts()`.
    """

    def __init__(self, log: FitLog, data: Any):
        super().__init__()
        self.log, self.prompts, self.sampler = log, data.prompts(), make_sampler()

    def on_epoch_end(self, epoch, logs=None):
        """Writes the texts verbatim, line breaks included; for a diverged model, why there are none."""
        if is_chief() and self.prompts:
            try:
                texts = continuations(self.model, self.prompts, self.sampler)
            except UserError as error:
                texts = [str(error)]
            with self.log.board.as_default(step=self.model.steps_done):
                tf.summary.text("samples", ["    " + text.replace("\n", "\n    ") for text in texts])
