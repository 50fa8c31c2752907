# SPDX-License-Identifier: Apache-2.0
"""Texts as ids, by KerasHub's tokenizers."""

from collections.abc import Sequence

import keras_hub
import tensorflow as tf


def token_ids(texts: Sequence[tuple[str, ...]], tokenizer: keras_hub.models.Tokenizer) -> list[list[list[int]]]:
    """The ids of each example's texts. No special tokens are added, but the name of one in a text may become it."""
    columns = [_ragged(tokenizer(list(column))) for column in zip(*texts, strict=True)]
    return [list(parts) for parts in zip(*columns, strict=True)]


def _ragged(ids) -> list[list[int]]:
    return ids.to_list() if isinstance(ids, tf.RaggedTensor) else [list(map(int, part)) for part in ids]
