# SPDX-License-Identifier: Apache-2.0
"""Text classifiers, uncompiled: of any family that KerasHub has one for, from a preset, or a BERT from a size."""

from pathlib import Path

import keras
import keras_hub

from keras_replicas import UserError, is_chief

from ..data.examples import EncodedTexts
from ..data.labelled import LabelledTexts
from ..files import write_json
from .masked_lm import huggingface_type, preset_tokenizer, read_weights
from .presets import backbone_from_size, check_positions, enable_lora, from_preset, save_task


def make_preprocessor(
    preset: str, tokenizer: keras_hub.models.Tokenizer | None, seq_length: int
) -> keras_hub.models.TextClassifierPreprocessor:
    """A classifier's preprocessor, for `seq_length` tokens: a preset's own, or BERT's for a tokenizer of word pieces.

    Raises a UserError when there is no such preset, it cannot be fetched, or KerasHub has no classifier of its kind.
    """
    if preset and huggingface_type(preset) != "bert":
        return from_preset(keras_hub.models.TextClassifierPreprocessor, preset, sequence_length=seq_length)
    tokenizer = preset_tokenizer(preset) if preset else tokenizer
    return keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=seq_length)


def make_classifier(
    preset: str, size: str, data: EncodedTexts, dropout: float = 0.1, lora_rank: int | None = None
) -> keras_hub.models.TextClassifier:
    """A text classifier: a randomly initialized head on a preset's encoder or, without a preset, a BERT from a size.

    The preset is a KerasHub name, or a folder or `hf://` in KerasHub's or Hugging Face's form. The model gets the
    preprocessor of `data`, and an output for each of its classes. For regression there is one, which begins at the mean
    of the training labels: AdamW would need many steps to get there. The dropout is of the encoder and the head. With a
    `lora_rank`, only adapters of the attention's query and value kernels, the pooler and the head are trained.

    Call it inside the strategy's scope. Raises a UserError when there is no such preset, it cannot be fetched, it has
    too few positions, or KerasHub has no classifier of its kind, or one that does not tell tokens from padding.
    """
    models, preprocessor, bert = keras_hub.models, data.preprocessor, preset and huggingface_type(preset) == "bert"
    length, outputs = preprocessor.sequence_length, len(data.texts.classes) or 1
    if bert:
        backbone = from_preset(models.BertBackbone, preset, dropout=dropout, load_weights=False)
        if not read_weights(backbone, preset) and is_chief():
            print(f"The preset {preset} has no pooler: it begins with random weights, as the head does.", flush=True)
    elif preset:
        backbone = from_preset(models.Backbone, preset, dropout=dropout)
    else:
        tokens = preprocessor.tokenizer.vocabulary_size()
        backbone = backbone_from_size(models.BertBackbone, size, tokens, dropout, length)
    if "padding_mask" not in backbone.input:
        raise UserError(f"the preset {preset} is a {type(backbone).__name__}, which has no padding mask; give a BERT")
    check_positions(backbone, length, preset)
    if lora_rank:
        enable_lora(backbone, lora_rank)
        for layer in backbone.layers:
            if layer.name == "pooled_dense":  # a part of the head, which BERT and ALBERT have in the backbone
                layer.trainable = True
    options = {"backbone": backbone, "preprocessor": preprocessor, "num_classes": outputs, "dropout": dropout}
    if preset and not bert:
        loaded = {"load_weights": False, "activation": None, "compile": False}
        model = from_preset(models.TextClassifier, preset, **loaded, **options)
    else:
        model = models.BertTextClassifier(**options, compile=False)
    model.output_dense.dtype_policy = keras.DTypePolicy("float32")  # bfloat16 has no number between 256 and 258
    if not data.texts.classes:
        labels = data.texts.splits["train"].labels or []
        model.output_dense.bias.assign([sum(labels) / len(labels)])
    return model


def save_classifier(model: keras_hub.models.TextClassifier, texts: LabelledTexts, folder: Path) -> None:
    """Saves a classifier as `save_task` does, and what it takes and gives in `labels.json`.

    That is the names of the classes, in the order of its outputs, none for regression; and how many texts make an
    example, 1 or 2.
    """
    save_task(model, model.preprocessor, folder)
    if is_chief():
        write_json(folder / "labels.json", {"classes": texts.classes, "texts": len(texts.splits["train"].texts[0])})
