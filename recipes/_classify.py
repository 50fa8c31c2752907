# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes classify`: labels and probabilities of texts, by a classifier that a recipe has saved."""

import contextlib
import os
import sys
from pathlib import Path
from typing import TextIO

import keras_hub
import numpy as np
import scipy.special

from common.data.examples import EncodedTexts
from common.data.labelled import LabelledTexts, column_names, to_examples
from common.data.tables import read_rows
from common.files import FAILED, MALFORMED, one_line, plain
from common.model.masked_lm import get_file, load_json
from common.model.presets import from_preset
from keras_replicas import UserError, data_parallel

BATCH_SIZE = 32


def classify(preset: str, texts: list[str], data: str, text_columns: str, output: str) -> None:
    """Prints the prediction for an example, or for each one in a file, with the probability of each class.

    The arguments are those of the command line. Raises a `UserError` when the preset is not such a classifier, or the
    texts are missing, too many or unreadable.
    """
    if bool(texts) == bool(data):
        raise UserError("give one text, or two of a pair; or a file of them with --data")
    if bool(data) != bool(text_columns):
        raise UserError("--data and --text-columns, the names of its columns of texts, go together")
    if not os.path.isdir(parent := os.path.dirname(output) or "."):  # of `no/`, this is `no`
        raise UserError(f"there is no folder {parent}: make it, or give another file")
    unfinished = Path(output).parent / f".{os.getpid()}.unfinished"
    with one_line(f"cannot write {output}", ": give a new file"):  # now, not when all is done
        if output and (Path(output).exists() or Path(output).is_symlink()):
            raise UserError("it already exists")
        if output:
            unfinished.touch()
            unfinished.unlink()
    classes, number = saved_labels(preset)
    columns = column_names(text_columns) if data else tuple(f"text {i}" for i, _ in enumerate(texts, start=1))
    if len(columns) != number:
        raise UserError(f"the classifier {preset} takes {number} text(s) for an example, not {len(columns)}")
    rows = read_rows(Path(data), all_rows=True) if data else [("the example", dict(zip(columns, texts, strict=True)))]
    with contextlib.redirect_stdout(sys.stderr):  # what is told of rows and texts: the table alone is standard output
        examples = to_examples(rows, columns)
        if not examples.texts:
            raise UserError(f"{data} has no examples")
        model = data_parallel(from_preset(keras_hub.models.TextClassifier, preset, dtype="float32", compile=False))
        encoded = EncodedTexts(LabelledTexts(classes, {"texts": examples}), model.preprocessor)
    if len(classes or [0]) != model.num_classes:
        raise UserError(f"labels.json of {preset} is not that of its model, which has {model.num_classes} outputs")
    outputs = model.predict(encoded.batches("texts", BATCH_SIZE), verbose=0)
    if not output:
        write(sys.stdout, classes, outputs)
        return
    with one_line(f"cannot write {output}"), contextlib.ExitStack() as at_end:
        at_end.callback(unfinished.unlink, missing_ok=True)
        with unfinished.open("w", encoding="utf-8") as file:
            write(file, classes, outputs)
        unfinished.rename(output)
    print(f"{output}: {len(outputs)} predictions")


def saved_labels(preset: str) -> tuple[list[str], int]:
    """The classes of a classifier, none for regression, and how many texts make an example.

    Raises a UserError when no recipe has saved it.
    """
    with one_line(f"{preset} is no classifier that a recipe has saved", errors=(*FAILED, *MALFORMED)):
        labels = load_json(preset, "labels.json")
        get_file(preset, "task.weights.h5")  # without it, the head would be random
        return [plain(name) for name in labels["classes"]], labels["texts"]


def write(file: TextIO, classes: list[str], outputs: np.ndarray) -> None:
    """Writes a table: each example's number, from 0, its prediction, and the probabilities of the classes."""
    print("index", "prediction", *classes, sep="\t", file=file)
    for index, row in enumerate(outputs):
        prediction, probabilities = (classes[row.argmax()], scipy.special.softmax(row)) if classes else (row[0], [])
        print(index, prediction, *(f"{probability:.4f}" for probability in probabilities), sep="\t", file=file)
