# SPDX-License-Identifier: Apache-2.0
"""Shards of `tf.train.Example`, as BERT's pipelines write them: int64 `token_ids` or `input_ids` of texts of tokens."""

import fnmatch
import functools
from collections.abc import Iterable, Iterator

import keras_hub
import numpy as np
import tensorflow as tf

from keras_replicas import UserError

from .vocabulary import vectors

NAMES = {"train": "*train*.tfrecord*", "validation": "*valid*.tfrecord*", "test": "*test*.tfrecord*"}
FEATURES = {name: tf.io.RaggedFeature(tf.int64) for name in ("token_ids", "input_ids")}  # a missing one is empty


def find_examples(folder: str) -> dict[str, list[str]]:
    """The files of each split. Raises a `UserError` if there is none for train or validation."""
    names = sorted(tf.io.gfile.listdir(folder)) if tf.io.gfile.isdir(folder) else []
    files = {split: [f"{folder}/{name}" for name in fnmatch.filter(names, NAMES[split])] for split in NAMES}
    if not files["train"] or not files["validation"]:
        raise UserError(f"{folder} has no rows of text, and no {NAMES['train']} with {NAMES['validation']}")
    return {split: of_split for split, of_split in files.items() if of_split}


def example_rows(
    files: dict[str, list[str]], tokenizer: keras_hub.models.Tokenizer
) -> tuple[dict[str, Iterable[np.ndarray]], int]:
    """Each split's rows, without start, end and padding, and the longest one's length; a `UserError` on other ids."""
    texts = {split: functools.partial(_texts, files[split], tokenizer) for split in files}
    sizes = [(len(ids), ids.max()) for rows in texts.values() for ids in rows()]
    if not sizes or max(highest for _, highest in sizes) >= tokenizer.vocabulary_size():
        raise UserError(f"{files['train'][0]} and the files like it have no ids, or some that their tokenizer lacks")
    return {split: rows() for split, rows in texts.items()}, max(length for length, _ in sizes)


def _texts(files: list[str], tokenizer: keras_hub.models.Tokenizer) -> Iterator[np.ndarray]:
    for records in tf.data.TFRecordDataset(files, "GZIP" if files[0].endswith(".gz") else None).batch(1024):
        ids_of = tf.io.parse_example(records, FEATURES)
        for ids in vectors(tf.concat([ids_of[name] for name in FEATURES], axis=1)):
            ids = np.trim_zeros(ids - tokenizer.pad_token_id, "b") + tokenizer.pad_token_id
            ends = [np.sum(ids[:1] == tokenizer.start_token_id), np.sum(ids[-1:] == tokenizer.end_token_id)]
            if len(ids) > sum(ends):
                yield ids[ends[0] : len(ids) - ends[1]]
