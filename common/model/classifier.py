# SPDX-License-Identifier: Apache-2.0
"""Text classifiers: of any family that KerasHub has one for, from a preset, or a BERT from a size."""

import contextlib
import functools
import math
from pathlib import Path

import keras
import keras_hub
import numpy as np

from common.data.byte_pairs import Vocabulary
from common.data.text_batches import EncodedTexts
from common.files import write_json
from common.model.backbones import backbone_from_size, from_preset
from common.model.counts import counting
from common.model.huggingface import encoder_variables, in_huggingface_form, read_vocabulary, read_weights
from common.model.lora import enable_lora
from common.model.preset_files import load_json, task_class
from common.model.saving import keras_tokenizer, save_task
from keras_replicas import UserError, is_chief


@functools.cache
def classifier_class(kind: type[keras_hub.models.TextClassifier]) -> type[keras_hub.models.TextClassifier]:
    """A family's class, such as `BertTextClassifier`, for N replicas."""
    return counting(kind)


def make_preprocessor(
    preset: str, vocabulary: Vocabulary | None, seq_length: int
) -> keras_hub.models.TextClassifierPreprocessor:
    """A classifier's preprocessor, for `seq_length` tokens: a preset's own, or BERT's for a vocabulary.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, or KerasHub has no classifier of its kind.
    """
    if preset and not _is_huggingface_bert(preset):
        classifier_kind(preset)
        return from_preset(keras_hub.models.TextClassifierPreprocessor, preset, sequence_length=seq_length)
    tokenizer = keras_tokenizer(vocabulary or read_vocabulary(preset))
    return keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=seq_length)


def make_classifier(
    preset: str, size: str, data: EncodedTexts, dropout: float, lora_rank: int | None = None
) -> keras_hub.models.TextClassifier:
    """A text classifier: a randomly initialized head on a preset's encoder or, without a preset, a BERT from a size.

    Call it inside the strategy's scope.

    Args:
        preset: a KerasHub name, or a folder or `hf://` in KerasHub's or Hugging Face's format; or empty.
        size: a size of `sizes.py`, if there is no preset.
        data: the data that it is for.
        dropout: dropout of the encoder and the head.
        lora_rank: rank of adapters (Hu et al. 2021, arXiv:2106.09685) for the attention's query and value kernels. Only
            these, their layers' biases, the pooler and the head are then trained; 0 to train all weights.

    The head has an output for each class. For regression it has a single one, which begins at the mean of the training
    labels: AdamW would need many steps to get there.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, or KerasHub has no classifier of its kind.
    """
    if preset:
        backbone = _backbone_from_preset(preset, dropout)
    else:
        pieces = data.preprocessor.tokenizer.vocabulary_size()
        backbone = backbone_from_size(
            keras_hub.models.BertBackbone, size, pieces, dropout, data.preprocessor.sequence_length
        )
    length, positions = data.preprocessor.sequence_length, getattr(backbone, "max_sequence_length", math.inf)
    if length > positions:
        raise UserError(f"--seq-length {length} is more than the {positions} positions of the preset {preset}")
    if lora_rank:
        enable_lora(backbone, lora_rank)
        for layer in backbone.layers:
            if layer.name == "pooled_dense":  # a part of the head, which BERT and ALBERT have in the backbone
                layer.trainable = True
    kind = task_class(keras_hub.models.TextClassifier, type(backbone))
    model = classifier_class(kind)(backbone, len(data.texts.classes) or 1, dropout=dropout, compile=False)
    model.output_dense.dtype_policy = keras.DTypePolicy("float32")  # bfloat16 has no number between 256 and 258
    _classify_by_first_token(backbone)
    if not data.texts.classes:
        model.output_dense.bias.assign([np.mean(data.texts.splits["train"].labels or [])])
    return model


def save_classifier(model: keras_hub.models.TextClassifier, data: EncodedTexts, folder: Path) -> None:
    """As `save_task`, with the names of the classes and the number of texts that it takes in `labels.json`."""
    save_task(model, data.preprocessor, folder)
    if is_chief():
        texts = len(data.texts.splits["train"].texts[0])
        write_json(folder / "labels.json", {"classes": data.texts.classes, "texts": texts})


def classifier_kind(preset: str) -> type[keras_hub.models.TextClassifier]:
    """KerasHub's class of classifiers for a preset, such as `BertTextClassifier`.

    Raises:
        UserError: when there is no such preset, it cannot be fetched, or KerasHub has no such class, or one that does
            not tell tokens from padding.
    """
    kind = from_preset(keras_hub.models.Backbone, preset, load_weights=False)
    with contextlib.suppress(ValueError):
        if "padding_mask" in kind.input:
            return task_class(keras_hub.models.TextClassifier, type(kind))
    raise UserError(
        f"the preset {preset} is a {type(kind).__name__}, for which KerasHub has no text classifier with a padding "
        "mask. Give an encoder, such as BERT, RoBERTa, DistilBERT, ALBERT or DeBERTaV3"
    )


def _backbone_from_preset(preset: str, dropout: float) -> keras_hub.models.Backbone:
    if not _is_huggingface_bert(preset):
        return from_preset(keras_hub.models.Backbone, preset, dropout=dropout)
    # KerasHub's own converter needs a pooler, and the file vocab.txt.
    backbone = from_preset(keras_hub.models.BertBackbone, preset, dropout=dropout, load_weights=False)
    if not read_weights(encoder_variables(backbone), preset) and is_chief():
        print(f"The preset {preset} has no pooler: it begins with random weights, as the head does.", flush=True)
    return backbone


def _classify_by_first_token(backbone: keras_hub.models.Backbone) -> None:
    """Makes a backbone's last layer compute only the first token's output, which is all that a classifier reads.

    The layers of BERT, RoBERTa and DistilBERT allow that: with six of them, it saves an eighth of the work.
    """
    layers = getattr(backbone, "transformer_layers", [])
    if layers and type(layers[-1]) is keras_hub.layers.TransformerEncoder and not layers[-1].normalize_first:
        layers[-1].call = functools.partial(_first_output, layers[-1])


def _first_output(layer: keras_hub.layers.TransformerEncoder, inputs, padding_mask, training=None):
    """As `TransformerEncoder.call`, for the first token only: [batch size, 1, width]."""
    first, mask = inputs[:, :1], padding_mask[:, None, :]
    attended = layer._self_attention_layer(query=first, value=inputs, attention_mask=mask, training=training)
    x = layer._self_attention_layer_norm(first + layer._self_attention_dropout(attended, training=training))
    inner = layer._feedforward_output_dense(layer._feedforward_intermediate_dense(x))
    return layer._feedforward_layer_norm(x + layer._feedforward_dropout(inner, training=training))


def _is_huggingface_bert(preset: str) -> bool:
    return in_huggingface_form(preset) and load_json(preset)["model_type"] == "bert"
