# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes classify`: labels and probabilities of texts, by a classifier that a recipe has saved."""

import json
import os
import sys
from pathlib import Path
from typing import TextIO

import keras_hub
import numpy as np
import tensorflow as tf
from common.model.backbones import from_preset
from common.model.preset_files import get_file

from common.data.glue import column_names
from common.data.labelled import LabelledTexts, to_examples
from common.data.tables import Row, read_rows
from common.data.text_batches import EncodedTexts
from common.model.huggingface import one_line
from common.scores.classification import predict_outputs
from common.training.scaling import Scaled
from keras_replicas import UserError

BATCH_SIZE = 32


def classify(preset: str, texts: list[str], data: str, text_columns: str, output: str) -> None:
    """Prints the prediction for an example, or for each one in a file, with the probability of each class.

    Args:
        preset: a folder that a recipe has saved.
        texts: the one or two texts of an example; none with `data`.
        data: a .tsv, .csv or .jsonl file of examples.
        text_columns: names of its one or two columns of texts, separated by a comma.
        output: a new file for the table, tab-separated; empty for the screen.

    Raises:
        UserError: when the preset is not such a classifier, or the texts are missing, too many or unreadable.
    """
    if bool(texts) == bool(data):
        raise UserError("give one text, or two of a pair; or a file of them with --data")
    if bool(data) != bool(text_columns):
        raise UserError("--data and --text-columns, the names of its columns of texts, go together")
    if Path(output or os.devnull).is_file():
        raise UserError(f"{output} already exists; give a new file")
    names = column_names(text_columns) if data else tuple(f"text {number}" for number, _ in enumerate(texts, start=1))
    rows: list[Row] = list(read_rows(Path(data))) if data else [("the example", dict(zip(names, texts, strict=True)))]
    if not rows:
        raise UserError(f"{data} has no examples")
    examples = to_examples(rows, names, None, [], None)

    model, classes = load_classifier(preset, len(names))
    split = EncodedTexts.of(LabelledTexts(classes, {"texts": examples}, ""), model.preprocessor)
    outputs = predict_outputs(tf.distribute.get_strategy(), model, split, "texts", Scaled(BATCH_SIZE, BATCH_SIZE))
    if not output:
        write(sys.stdout, classes, outputs)
        return
    with one_line(f"cannot write {output}"), Path(output).open("w", encoding="utf-8") as file:
        write(file, classes, outputs)
    print(f"{output}: {len(outputs)} predictions")


def write(file: TextIO, classes: list[str], outputs: np.ndarray) -> None:
    """Writes a table: each example's number, from 0, its prediction, and the probabilities of the classes.

    The outputs are logits, [examples, classes], or for regression numbers, [examples, 1].
    """
    print("index", "prediction", *classes, sep="\t", file=file)
    for index, row in enumerate(outputs):
        prediction = classes[row.argmax()] if classes else row[0]
        probabilities = np.asarray(tf.nn.softmax(row))[: len(classes)]
        print(index, prediction, *(f"{probability:.4f}" for probability in probabilities), sep="\t", file=file)


def load_classifier(preset: str, texts: int) -> tuple[keras_hub.models.TextClassifier, list[str]]:
    """The model of a preset, and the names of its classes, none for regression.

    Raises:
        UserError: when there is no such preset, it is not a classifier that a recipe has saved, or its examples have
            another number of texts.
    """
    with one_line(f"{preset} is no classifier that a recipe has saved"):
        labels = json.loads((Path(preset) / "labels.json").read_text(encoding="utf-8"))
        if not isinstance(labels, dict) or not isinstance(labels.get("classes"), list):
            raise ValueError("labels.json has no list of classes")
        classes, wanted = labels["classes"], labels["texts"]
        get_file(preset, "task.weights.h5")  # without it, the head would be random
    if wanted != texts:
        raise UserError(f"the classifier {preset} takes {wanted} text(s) of an example, not {texts}")
    model = from_preset(keras_hub.models.TextClassifier, preset, dtype="float32", compile=False)
    if model.num_classes != (len(classes) or 1):
        raise UserError(f"{preset}/labels.json has {len(classes)} classes, the model {model.num_classes}")
    return model, classes
