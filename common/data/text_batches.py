# SPDX-License-Identifier: Apache-2.0
"""Inputs of a text classifier from labelled texts: encoded once, read in an order that is a function of seed and step.

Examples of similar length share a batch, which is padded to a length that holds the longest.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import keras_hub
import numpy as np
import tensorflow as tf

from common.data.by_length import batches_by_length, padded_length
from common.data.labelled import LabelledTexts
from keras_replicas.errors import UserError
from keras_replicas.order import NO_EXAMPLE, Scaled, steps_per_epoch

TEXTS_AT_ONCE = 4096


def encode(
    texts: Sequence[tuple[str, ...]], preprocessor: keras_hub.models.TextClassifierPreprocessor
) -> dict[str, np.ndarray]:
    """A model's inputs, by name: its preprocessor's output for one or two texts each, [examples, sequence_length].

    Among them are `token_ids` and `padding_mask`, which is 1 for a token and 0 for padding.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        columns = tuple(list(column) for column in zip(*texts[start : start + TEXTS_AT_ONCE], strict=True))
        for name, values in preprocessor(x=columns).items():
            dtype = np.int32 if name == "token_ids" else np.uint8
            parts.setdefault(name, []).append(np.asarray(values).astype(dtype))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


@dataclass(frozen=True)
class EncodedTexts:
    """Labelled texts, the preprocessor that encoded them, and what `encode` returns for each split."""

    texts: LabelledTexts
    preprocessor: keras_hub.models.TextClassifierPreprocessor
    inputs: dict[str, dict[str, np.ndarray]]
    few_lengths: bool  # pad batches to a multiple of 32 tokens, because XLA compiles for each length; else of 4

    @classmethod
    def of(
        cls,
        texts: LabelledTexts,
        preprocessor: keras_hub.models.TextClassifierPreprocessor,
        few_lengths: bool = False,
    ) -> "EncodedTexts":
        """Encodes all splits.

        Raises:
            UserError: when the preprocessor's `sequence_length` has no room for a token of each text.
        """
        example = next(part.texts[0] for part in texts.splits.values() if part.texts)
        least = int(np.sum(preprocessor(x=tuple([""] for _ in example))["padding_mask"])) + len(example)
        if preprocessor.sequence_length < least:
            raise UserError(
                f"--seq-length {preprocessor.sequence_length} has no room for a token of each text. "
                f"Give at least {least}"
            )
        inputs = {split: encode(part.texts, preprocessor) for split, part in texts.splits.items()}
        return cls(texts, preprocessor, inputs, few_lengths)

    def sizes(self) -> dict[str, int]:
        """The number of examples in each split."""
        return {split: len(inputs["token_ids"]) for split, inputs in self.inputs.items()}

    def checksums(self) -> dict[str, int]:
        """A checksum of the ids and labels of each split."""
        dtype = self.texts.label_dtype
        labels = {split: np.array(part.labels or [], dtype).data for split, part in self.texts.splits.items()}
        ids = {split: inputs["token_ids"].data for split, inputs in self.inputs.items()}
        return {split: zlib.crc32(labels[split], zlib.crc32(ids[split])) for split in ids}

    def steps(self, split: str, scaled: Scaled) -> int:
        """Steps in which every example of a split is used once."""
        return steps_per_epoch(self.sizes()[split], scaled.global_batch_size)

    def batches(
        self,
        split: str,
        scaled: Scaled,
        steps: range,
        shuffle_seed: int | None = None,
        num_shards: int = 1,
        shard: int = 0,
    ) -> tf.data.Dataset:
        """One shard's batches (x, examples), each of one replica's size: a pure function of the seed and the step.

        They are for these steps of the run. A seed gives a new order in each epoch; None, for the steps of one epoch,
        puts the shortest examples first.

        Returns:
            What `encode` returns, int32 [batch size, length of the global batch]; and the examples' rows in the split,
            int64 [batch size], `order.NO_EXAMPLE` where there is none, and all is padding.
        """
        lengths, inputs_of = self._inputs(split)
        return batches_by_length(steps, lengths, scaled, shuffle_seed, inputs_of, num_shards, shard).prefetch(8)

    def labelled_batches(self, split: str, *arguments, **shard) -> tf.data.Dataset:
        """As `batches`, but (x, y, weight), with labels, and with weights that are 0 for padding."""
        return self.batches(split, *arguments, **shard).map(self._with_labels(split))

    def _inputs(self, split: str) -> tuple[tf.Tensor, Callable]:
        """The lengths of a split's examples, and a function from a batch's examples to (x, examples)."""
        with tf.device("CPU"):
            inputs = {name: tf.constant(values) for name, values in self.inputs[split].items()}
            places = tf.range(1, tf.shape(inputs["padding_mask"])[1] + 1)
            # A text may contain the name of the padding token, so that the mask has gaps.
            lengths = tf.reduce_max(tf.cast(inputs["padding_mask"], tf.int32) * places, axis=1)

        def inputs_of(examples):
            rows = tf.maximum(examples, 0)
            length = padded_length(examples, lengths, 32 if self.few_lengths else 4)
            x = {name: tf.cast(tf.gather(values, rows)[:, :length], tf.int32) for name, values in inputs.items()}
            x["padding_mask"] *= tf.cast(examples != NO_EXAMPLE, tf.int32)[:, None]
            return x, examples

        return lengths, inputs_of

    def _with_labels(self, split: str) -> Callable:
        labels = self.texts.splits[split].labels
        assert labels is not None, "the split has no labels"
        by_example = tf.constant(labels, self.texts.label_dtype)

        def look_up(x, examples):
            return x, tf.gather(by_example, tf.maximum(examples, 0)), tf.cast(examples != NO_EXAMPLE, tf.float32)

        return look_up


def in_order(batches: Iterable[tuple[tf.Tensor, tf.Tensor]], num_examples: int) -> np.ndarray:
    """Rows for all examples, [examples, columns], from batches of (examples, rows), where each example comes once."""
    parts = [(examples.numpy(), rows.numpy()) for examples, rows in batches]
    result = np.full((num_examples, parts[0][1].shape[1]), np.nan, np.float32)
    for examples, rows in parts:
        result[examples[examples != NO_EXAMPLE]] = rows[examples != NO_EXAMPLE]
    return result
