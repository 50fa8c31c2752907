# SPDX-License-Identifier: Apache-2.0
"""Samples of what a causal language model writes during training."""

from collections.abc import Sequence

import keras
import keras_hub
import tensorflow as tf

from keras_replicas import UserError, is_chief

from .data.rows import Rows
from .model.generate import continuations, make_sampler

TOKENS = 4  # of a row that has no prompt


def beginnings(rows: Rows, tokenizer: keras_hub.models.Tokenizer, count: int = 3) -> list[str]:
    """The prompts of the first rows, to be continued; of rows without prompts, the first tokens."""
    texts = []
    ids, _, is_label = (part.numpy() for part in rows.read(tf.range(min(count, len(rows)), dtype=tf.int64)))
    for row, labels in zip(ids, is_label, strict=True):
        end = min(int(labels[1:].argmax()) + 1, rows.length // 2)  # the first token is no label, or a start token
        text = [
            int(number) for number in row[: end if end > 1 else TOKENS] if number not in tokenizer.special_token_ids
        ]
        texts += [tokenizer.detokenize(text)] if text else []
    return texts


class Samples(keras.callbacks.Callback):
    """Shows in TensorBoard, at each epoch's end, how the model continues some texts, with the same draws each time.

    Only the chief does so.

    Args:
        board: the writer.
        texts: the texts.
    """

    def __init__(self, board: tf.summary.SummaryWriter, texts: Sequence[str]):
        super().__init__()
        self.board, self.texts, self.sampler = board, texts, make_sampler()

    def on_epoch_end(self, epoch, logs=None):
        """Writes the texts verbatim, line breaks included; for a diverged model, why there are none."""
        if is_chief() and self.texts:
            try:
                written = list(continuations(self.model, self.texts, self.sampler))
            except UserError as error:
                written = [str(error)]
            with self.board.as_default(step=self.model.steps_done):
                tf.summary.text("samples", ["    " + text.replace("\n", "\n    ") for text in written])
