# SPDX-License-Identifier: Apache-2.0
"""What a classifier's logits are worth: scores, what it must beat, its mistakes in TensorBoard, and predictions."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from common.data.byte_pairs import Vocabulary
from common.data.glue import write_predictions
from common.data.labelled import Examples, LabelledTexts
from common.scores.baselines import baseline_accuracies
from common.scores.metrics import classification_scores, confusion_matrix, entry


def scores_of(split: str, examples: Examples, logits: np.ndarray) -> dict[str, float]:
    """Entries `val_loss` (for the split `validation`), `val_accuracy`, `val_f1` of `metrics.classification_scores`.

    Args:
        split: its name.
        examples: with labels.
        logits: [examples, classes].
    """
    scores = classification_scores(logits, np.array(examples.labels))
    return {entry(split, name): value for name, value in scores.items()}


def classifier_results(texts: LabelledTexts, logits: dict[str, np.ndarray], vocabulary: Vocabulary) -> dict[str, Any]:
    """The part of `results.json` that classifiers have: scores of each split that has labels, and what they must beat.

    Args:
        texts: all splits.
        logits: of each split but `train`, [examples, classes].
        vocabulary: whose pieces are a bag's words.
    """
    results: dict[str, Any] = {}
    train = texts.splits["train"]
    learned = _text_ids(train, vocabulary), train.labels or []
    sizes = len(vocabulary.pieces), len(texts.classes)
    for split in logits:
        examples = texts.splits[split]
        if examples.labels is not None:
            results |= scores_of(split, examples, logits[split])
            simple = baseline_accuracies(*learned, _text_ids(examples, vocabulary), examples.labels, *sizes)
            results |= {entry(split, f"{name}_accuracy"): accuracy for name, accuracy in simple.items()}
    return results


def draw_confusion(texts: LabelledTexts, split: str, logits: np.ndarray, step: int) -> None:
    """Writes to TensorBoard, as text `validation/confusion` for that split, how often each class was taken for which.

    Args:
        texts: all splits.
        split: with labels.
        logits: of its examples, [examples, classes].
        step: of training.
    """
    counts = confusion_matrix(np.array(texts.splits[split].labels), logits.argmax(axis=1), len(texts.classes))
    rows = [["true \\ predicted", *texts.classes], ["---"] * (len(texts.classes) + 1)]
    rows += [[name, *map(str, row)] for name, row in zip(texts.classes, counts, strict=True)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    tf.summary.text(f"{split}/confusion", table, step=step)


def write_all_predictions(folder: Path, texts: LabelledTexts, logits: dict[str, np.ndarray]) -> None:
    """Writes the predictions of each split in GLUE's form, those of the test split by the name that GLUE wants.

    Args:
        folder: is made.
        texts: all splits.
        logits: of each split but `train`, [examples, classes].
    """
    folder.mkdir(exist_ok=True)
    for split, rows in logits.items():
        name = texts.submission if split == "test" else f"{split}.tsv"
        classes = [texts.classes[place] for place in rows.argmax(axis=1)]
        write_predictions(folder / name, texts.splits[split].indices, classes)


def _text_ids(examples: Examples, vocabulary: Vocabulary) -> list[tuple[list[int], ...]]:
    tokenizer = vocabulary.tokenizer()
    columns = zip(*examples.texts, strict=True)
    encoded = [tokenizer.encode_batch_fast(column, add_special_tokens=False) for column in columns]
    return [tuple(part.ids for part in parts) for parts in zip(*encoded, strict=True)]
