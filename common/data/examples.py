# SPDX-License-Identifier: Apache-2.0
"""Labelled texts as a text classifier's inputs: encoded once, and read in batches of any order.

A random order gives a batch's examples similar lengths, as in transformers' `LengthGroupedSampler`: an epoch's examples
are shuffled, sorted by length within groups of some batches, and divided into batches, which are shuffled in turn.
"""

import itertools
import zlib
from typing import Any

import keras_hub
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from keras_replicas import Batches, UserError, locate

from .labelled import LabelledTexts
from .vocabulary import encode, not_seen, tell, unknown_id

EXAMPLES_AT_ONCE = 4096
MULTIPLE = 8 if tf.config.list_physical_devices("GPU") else 1  # of tokens: GPUs are faster with 8, CPUs without padding
GROUP = 64  # batches whose examples are sorted by length together; a quarter of an epoch's, if that is fewer


class EncodedTexts:
    """Labelled texts, encoded on all cores by the tokenizer and the `packer` of a KerasHub preprocessor.

    `inputs` has for each split what the preprocessor makes of its texts: `token_ids` and, if the family has them,
    `padding_mask` (0 for padding) and `segment_ids`; integers, [examples, sequence length]. Raises a `UserError` when
    this length has no room for a token of each text. `not_seen` has, for each split, what `vocabulary.not_seen` says.
    """

    def __init__(self, texts: LabelledTexts, preprocessor: keras_hub.models.TextClassifierPreprocessor):
        self.texts, self.preprocessor, self._pad = texts, preprocessor, preprocessor.tokenizer.pad_token_id
        example = next(iter(texts.splits.values())).texts[0]
        empty = preprocessor(x=tuple([""] for _ in example))  # this also makes the packer
        self._around = int(np.sum(np.asarray(empty["token_ids"]) != self._pad))  # special tokens
        least = self._around + len(example)
        if preprocessor.sequence_length < least:
            raise UserError(f"a sequence needs {least} tokens or more, for one of each text: make it longer")
        self.evaluated = [split for split in texts.splits if split != "train"]
        self.not_seen: dict[str, dict[str, Any]] = {}
        self._segments: dict[str, np.ndarray] = {}
        self.inputs = {split: self._encode(split, part.texts, [*empty]) for split, part in texts.splits.items()}

    def batches(self, split: str, batch_size: int, shuffle_seed: int | None = None) -> "TextBatches":
        """A split's batches for `fit`, `evaluate`, `predict` or `distribute`, which begin at any step.

        With a seed, each epoch has a new random order: a pure function of the seed and the step, for any number of
        replicas. A batch is (x, y, sample_weight), with weight 0 where there is no example; without labels, (x,).
        Without a seed, the examples come in their own order, and nothing else does: `predict` returns a row for each.
        x has the `inputs`, int32 [examples, length of the batch's longest text; on GPUs, to a multiple of 8].
        """
        return TextBatches(self, split, batch_size, shuffle_seed)

    def seen(self, split: str) -> list[list[list[int]]]:
        """For each example, the ids of each of its texts, with special tokens, that the model sees."""
        rows, columns = self.inputs[split]["token_ids"], range(len(self.texts.splits[split].texts[0]))
        is_token = np.arange(rows.shape[1]) < lengths_of(rows, self._pad)[:, None]
        masks = [is_token & (self._segments[split] == column) for column in columns]
        return [[ids[mask].tolist() for mask in masks_of] for ids, *masks_of in zip(rows, *masks, strict=True)]

    def _encode(self, split: str, texts: list[tuple[str, ...]], names: list[str]) -> dict[str, np.ndarray]:
        columns = len(texts[0])
        shown = tqdm(itertools.chain(*texts), f"tokens of {split}", columns * len(texts), unit=" texts", delay=5)
        ids = encode(shown, self.preprocessor.tokenizer)
        segment = tf.RaggedTensorSpec([None, None], tf.int32)
        pack = tf.function(self.preprocessor.packer, input_signature=[(segment,) * columns])
        parts: list[dict[str, np.ndarray]] = []
        lengths: list[int] = []
        unknown, unknowns = unknown_id(self.preprocessor.tokenizer), 0
        while group := list(itertools.islice(ids, columns * EXAMPLES_AT_ONCE)):
            segments = [group[column::columns] for column in range(columns)]
            lengths += [self._around + sum(map(len, of_example)) for of_example in zip(*segments, strict=True)]
            unknowns += int(np.sum(np.concatenate(group) == unknown))
            ragged = (tf.RaggedTensor.from_row_lengths(np.concatenate(rows), [*map(len, rows)]) for rows in segments)
            token_ids, segment_ids = (np.asarray(ids_of) for ids_of in pack(tuple(ragged)))
            arrays = {"token_ids": token_ids, "segment_ids": segment_ids, "padding_mask": token_ids != self._pad}
            kept = {*names, "segment_ids"}
            parts.append({name: arrays[name].astype(np.int32 if name == "token_ids" else np.uint8) for name in kept})
        self.not_seen[split] = not_seen(lengths, self.preprocessor.sequence_length, unknowns)
        tell(split, self.not_seen[split])
        self._segments[split] = np.concatenate([part["segment_ids"] for part in parts])
        return {name: np.concatenate([part[name] for part in parts]) for name in names}


def lengths_of(ids: np.ndarray, pad: int) -> np.ndarray:
    """Up to the last token of each row that is no padding: a text may contain the name of the padding token."""
    return (np.arange(1, ids.shape[1] + 1) * (ids != pad)).max(axis=1)


class TextBatches(Batches):
    """What `EncodedTexts.batches` returns."""

    def __init__(self, data: EncodedTexts, split: str, batch_size: int, shuffle_seed: int | None):
        self.not_seen, labels = data.not_seen[split], data.texts.splits[split].labels
        ids, shuffle = data.inputs[split]["token_ids"], shuffle_seed is not None
        super().__init__(self._read, batch_size, size=len(ids), shuffle=shuffle, seed=shuffle_seed or 0)
        label_array = np.array(labels or [], np.int32 if data.texts.classes else np.float32)
        self._checksum = zlib.crc32(label_array.data, zlib.crc32(ids.data))
        with tf.device("CPU"):
            self._inputs = {name: tf.constant(values) for name, values in data.inputs[split].items()}
            self._lengths = tf.constant(lengths_of(ids, data.preprocessor.tokenizer.pad_token_id), tf.int64)
            self._labels = None if labels is None else tf.constant(label_array)

    def iter_from_step(self, step: int, context: tf.distribute.InputContext) -> tf.data.Dataset:
        """The parts of the batches from that step on, for the replicas of one input pipeline."""
        replicas, here = context.num_replicas_in_sync, context.num_replicas_in_sync // context.num_input_pipelines
        steps, part, first = len(self), -(-self.batch_size // replicas), context.input_pipeline_id * here

        @tf.autograph.experimental.do_not_convert
        def parts(epoch):
            examples = self._steps(epoch)
            longest = tf.repeat(tf.reduce_max(self._lengths_of(examples), axis=1), here)
            padded = tf.pad(examples, [[0, 0], [0, part * replicas - self.batch_size]], constant_values=-1)
            of_here = tf.reshape(padded, [steps, replicas, part])[:, first : first + here]
            return tf.reshape(of_here, [steps * here, part]), longest

        epochs = tf.data.Dataset.range(step // steps, tf.int64.max)
        of_here = epochs.map(parts).prefetch(1).unbatch().skip(step % steps * here)
        return of_here.map(self._read, num_parallel_calls=2).prefetch(8)

    def fingerprint(self) -> dict[str, Any]:
        """Facts that must be the same on all workers, and in a resumed run."""
        return super().fingerprint() | {"checksum of texts and labels": self._checksum}

    def _steps(self, epoch: tf.Tensor) -> tf.Tensor:
        """The examples of each of an epoch's steps, int64 [steps, batch size]; -1 where there is none."""
        steps, seed = len(self), self.seed if self.shuffle else None
        positions = tf.range(steps * self.batch_size, dtype=tf.int64)
        _, examples = locate(epoch * steps * self.batch_size + positions, self.size, self.batch_size, seed)
        if not self.shuffle:
            return tf.reshape(examples, [steps, self.batch_size])
        group = positions // (min(GROUP, max(1, steps // 4)) * self.batch_size)
        in_groups = group * (tf.reduce_max(self._lengths) + 1) + self._lengths_of(examples)
        by_length = tf.gather(examples, tf.argsort(in_groups, stable=True))
        _, order = locate(epoch * steps + tf.range(steps, dtype=tf.int64), steps, 1, seed)
        return tf.gather(tf.reshape(by_length, [steps, self.batch_size]), order)

    def _lengths_of(self, examples: tf.Tensor) -> tf.Tensor:
        return tf.where(examples < 0, np.int64(0), tf.gather(self._lengths, tf.maximum(examples, 0)))

    @tf.autograph.experimental.do_not_convert
    def _read(self, examples: tf.Tensor, longest: tf.Tensor) -> tuple:
        if not self.shuffle:
            examples = tf.boolean_mask(examples, examples >= 0)
        rows, exists = tf.maximum(examples, 0), examples >= 0
        length = tf.minimum(-(-longest // MULTIPLE) * MULTIPLE, self._inputs["token_ids"].shape[1])
        x = {name: tf.cast(tf.gather(values, rows)[:, :length], tf.int32) for name, values in self._inputs.items()}
        x = {name: tf.where(exists[:, None], values, 0) for name, values in x.items()}
        if self._labels is None:
            return (x,)
        return x, tf.gather(self._labels, rows), tf.cast(exists, tf.float32)
