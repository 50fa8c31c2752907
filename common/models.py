# SPDX-License-Identifier: Apache-2.0
"""BERT and RoBERTa, as masked language models and as classifiers, from a size or a preset. Call inside the scope."""

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import keras
import keras_hub
import tensorflow as tf

from common.byte_pairs import BytePairs, Vocabulary
from common.command_line import UserError, first_line
from common.data_parallel import data_parallel
from common.huggingface import in_huggingface_form, read_vocabulary, read_weights
from common.losses import LabelAccuracy
from common.replicas import COUNTS
from common.sizes import dimensions
from common.wordpiece import WordPieces


class CountsTokens:
    """For a `data_parallel` class: metrics `accuracy`, `labels`, `tokens` and `slots`, and means over all labels.

    `labels` is the sum of the weights; `tokens` are counted without padding, for which `x["padding_mask"]` is 0; and
    `slots` are the places for tokens.
    """

    mean_over = "values"
    distribute_strategy: Any

    def compile(self, *args, **kwargs):
        """As Keras's; the weighted metric is `accuracy`."""
        with self.distribute_strategy.scope():
            self.counts = [keras.metrics.Sum(name=name) for name in COUNTS]
        super().compile(*args, weighted_metrics=[LabelAccuracy()], **kwargs)  # type: ignore[misc]

    def update_counts(self, x, y, sample_weight):
        """See `data_parallel`."""
        is_token = tf.cast(x["padding_mask"], tf.float32)
        for metric, values in zip(self.counts, (sample_weight, is_token, tf.ones_like(is_token)), strict=True):
            metric.update_state(values)


BertMaskedLM = data_parallel(keras_hub.models.BertMaskedLM, CountsTokens)
RobertaMaskedLM = data_parallel(keras_hub.models.RobertaMaskedLM, CountsTokens)
BertTextClassifier = data_parallel(keras_hub.models.BertTextClassifier)


def masked_lm_from_size(
    size: str, vocabulary: Vocabulary, dropout: float, seq_length: int
) -> keras_hub.models.MaskedLM:
    """A masked language model with random weights: BERT for word pieces, RoBERTa for byte pairs.

    Args:
        size: of `common.sizes`.
        vocabulary: whose pieces it tells apart.
        dropout: of the model.
        seq_length: tokens in a sequence; the model has 512 positions, or more where this is.
    """
    task = BertMaskedLM if isinstance(vocabulary, WordPieces) else RobertaMaskedLM
    return _without_pooler(task(_backbone_from_size(size, vocabulary, dropout, seq_length), compile=False))


def classifier_from_size(
    size: str, vocabulary: Vocabulary, num_classes: int, dropout: float, seq_length: int
) -> keras_hub.models.BertTextClassifier:
    """A classifier of texts with random weights; see `masked_lm_from_size`."""
    backbone = _backbone_from_size(size, vocabulary, dropout, seq_length)
    return BertTextClassifier(backbone, num_classes, dropout=dropout, compile=False)


def classifier_from_preset(preset: str, num_classes: int, dropout: float) -> keras_hub.models.BertTextClassifier:
    """A classifier of texts with a BERT of `preset` under a head of random weights; see `masked_lm_from_preset`.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, or is no BERT.
    """
    if in_huggingface_form(preset):
        backbone = masked_lm_from_preset(preset, dropout).backbone
        backbone.pooled_dense.trainable = True
    else:
        plain = _from_preset(keras_hub.models.Backbone, preset)
        if not isinstance(plain, keras_hub.models.BertBackbone):
            raise UserError(f"the preset {preset} is a {type(plain).__name__}; give one of BERT")
        backbone = type(plain).from_config(plain.get_config() | {"dropout": dropout})
        backbone.set_weights(plain.get_weights())
    return BertTextClassifier(backbone, num_classes, dropout=dropout, compile=False)


def masked_lm_from_preset(preset: str, dropout: float = 0.0, dtype: str | None = None) -> keras_hub.models.MaskedLM:
    """A BERT or RoBERTa with the weights of a preset: a name, or a folder made by `save_to_preset` or `export_bert`.

    Args:
        preset: its name or folder.
        dropout: of the model.
        dtype: a Keras dtype policy; None for the current one.

    Raises:
        UserError: when there is no such preset, or it cannot be fetched.
    """
    if in_huggingface_form(preset):
        options = {"dropout": dropout, "dtype": dtype, "load_weights": False}
        model = BertMaskedLM(_from_preset(keras_hub.models.BertBackbone, preset, **options), compile=False)
        read_weights(model, preset)
        return _without_pooler(model)
    plain = _from_preset(keras_hub.models.MaskedLM, preset, dtype=dtype, compile=False)
    bert = isinstance(plain, keras_hub.models.BertMaskedLM)
    # KerasHub 0.32 keeps the dropout that a preset was saved with, whatever it is asked for.
    backbone = type(plain.backbone).from_config(plain.backbone.get_config() | {"dropout": dropout})
    model = (BertMaskedLM if bert else RobertaMaskedLM)(backbone, compile=False)
    model.set_weights(plain.get_weights())
    return _without_pooler(model)


def model_width(preset: str, size: str) -> int:
    """The width of a preset's layers, or without one of a size's.

    Raises:
        UserError: when there is no such preset, or it cannot be fetched.
    """
    if preset:
        return _from_preset(keras_hub.models.Backbone, preset, load_weights=False).hidden_dim
    return dimensions(size)["hidden_dim"]


def preset_vocabulary(preset: str) -> Vocabulary:
    """The vocabulary of a preset.

    Raises:
        UserError: when there is no such preset, or it cannot be fetched.
    """
    if in_huggingface_form(preset):
        return read_vocabulary(preset)
    tokenizer = _from_preset(keras_hub.models.Tokenizer, preset)
    if isinstance(tokenizer, keras_hub.models.RobertaTokenizer):
        pieces = sorted(tokenizer.vocabulary, key=tokenizer.vocabulary.get)
        return BytePairs(pieces, [merge for merge in tokenizer.merges if not merge.startswith("#version")])
    return WordPieces(tokenizer.get_vocabulary(), tokenizer.lowercase, tokenizer.strip_accents)


def save_preset(model: keras_hub.models.Task, vocabulary: Vocabulary, seq_length: int, folder: Path) -> None:
    """Saves a preset that KerasHub loads without this project, what turns text into its inputs included.

    Raises:
        OSError: `ENOSPC`, before anything is written, when the disk has no room (h5py would crash the process).
    """
    needed = sum(4 * math.prod(weight.shape) for weight in model.weights) + 2**20
    if shutil.disk_usage(folder.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    model.preprocessor = preprocessor(type(model), vocabulary, seq_length)
    model.save_to_preset(str(folder))


def preprocessor(
    task: type[keras_hub.models.Task], vocabulary: Vocabulary, seq_length: int
) -> keras_hub.models.Preprocessor:
    """What KerasHub users feed text for such a model through."""
    return task.preprocessor_cls(keras_tokenizer(vocabulary), sequence_length=seq_length)


def keras_tokenizer(vocabulary: Vocabulary) -> keras_hub.models.Tokenizer:
    """KerasHub's tokenizer for a vocabulary."""
    if isinstance(vocabulary, WordPieces):
        return keras_hub.models.BertTokenizer(
            vocabulary.pieces, lowercase=vocabulary.lowercase, strip_accents=vocabulary.strip_accents
        )
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    return keras_hub.models.RobertaTokenizer(ids, vocabulary.merges)


def _backbone_from_size(size: str, vocabulary: Vocabulary, dropout: float, seq_length: int):
    kind = keras_hub.models.BertBackbone if isinstance(vocabulary, WordPieces) else keras_hub.models.RobertaBackbone
    return kind(
        vocabulary_size=len(vocabulary.pieces),
        **dimensions(size),
        dropout=dropout,
        max_sequence_length=max(512, seq_length),
    )


def _without_pooler(model: keras_hub.models.MaskedLM) -> keras_hub.models.MaskedLM:
    # BERT's pooled output takes no part in masked language modelling; its weights would have no gradient.
    if isinstance(model, BertMaskedLM):
        model.backbone.pooled_dense.trainable = False
    return model


def _from_preset(kind, preset: str, **kwargs):
    try:
        return kind.from_preset(preset, **kwargs)
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(
            f"cannot load the preset {preset} ({first_line(error)}). Give a KerasHub name, "
            "which needs a network on first use, or a folder made by save_to_preset"
        ) from error
