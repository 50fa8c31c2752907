# SPDX-License-Identifier: Apache-2.0
"""Scores of a fine-tuned model and of simple baselines, by scikit-learn and SciPy; predictions in GLUE's form.

A model's outputs are logits, [examples, classes], or, for regression, numbers, [examples, 1].
"""

from pathlib import Path
from typing import Any

import numpy as np
import scipy.special
import scipy.stats
from sklearn import metrics
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline

from keras_replicas import is_chief

from .data.examples import EncodedTexts
from .data.labelled import NO_LIMITS, LabelledTexts
from .log import Scores, Told

# Names of metrics in reports. The first that a task has is its main metric: accuracy for MRPC, Pearson correlation for
# STS-B, as in Liu et al. 2019, arXiv:1907.11692. Higher is better.
METRICS = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "Spearman",
}
BASELINES = {"majority": "majority-class", "bag_of_words": "bag-of-words"}
MANY, FEATURES = 50, 10_000
# By which the main metric must exceed that of a baseline. On some thousand examples, chance moves an accuracy by more
# than one example in a hundred (2 standard errors: 0.03), and a correlation by twice as much.
MARGIN = 0.01


def scores_of(texts: LabelledTexts, split: str, outputs: np.ndarray) -> dict[str, float]:
    """Entries such as `val_loss` and `val_accuracy`, for the split `validation`; none if it has no labels.

    The loss is the mean cross-entropy in nats, or the mean squared error. `f1` is of class 1 if there are two, as in
    GLUE, and else the mean over the classes; a correlation with a constant, which is not defined, is 0.
    """
    labels = texts.splits[split].labels
    if labels is None:
        return {}
    if texts.classes:
        logs = scipy.special.log_softmax(np.asarray(outputs, np.float64), axis=1)
        loss, predictions = -logs[np.arange(len(labels)), labels].mean(), outputs.argmax(axis=1)
    else:
        predictions = np.asarray(outputs, np.float64)[:, 0]
        loss = np.mean((predictions - labels) ** 2)
    return {_entry(split, "loss"): float(loss)} | _metrics(texts, split, predictions)


def classifier_results(data: EncodedTexts, outputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """`scores_of` for each labelled split of `outputs`, and the same metrics of baselines: `val_majority_f1`, say.

    They are `majority`, the most frequent class; and `bag_of_words`, a linear model of the tokens of each text and of
    those that they share, without order, all of what the model sees of the texts. For regression the first one is the
    mean, which correlates with nothing, and has a `val_mean_loss` instead. 70,000 sentences take 10 seconds. For more
    than `MANY` classes it is naive Bayes, of the `FEATURES` most frequent tokens: time and memory are bounded.
    """
    texts = data.texts
    labels = {split: np.array(part.labels) for split, part in texts.splits.items() if part.labels is not None}
    ids = {split: data.seen(split) for split in labels}
    few = len(texts.classes) <= MANY
    of_classes = OneVsRestClassifier(LogisticRegression(solver="liblinear")) if few else MultinomialNB()
    words = CountVectorizer(analyzer=_words, max_features=None if few else FEATURES)
    linear = make_pipeline(words, of_classes if texts.classes else Ridge())
    linear.fit(ids["train"], labels["train"])
    results: dict[str, Any] = {}
    for split in (split for split in outputs if split in labels):
        results |= scores_of(texts, split, outputs[split])
        if texts.classes:
            majority = np.full(len(ids[split]), np.bincount(labels["train"]).argmax())
            results |= _metrics(texts, split, majority, "majority_")
        else:
            results[_entry(split, "mean_loss")] = float(np.mean((labels[split] - labels["train"].mean()) ** 2))
        results |= _metrics(texts, split, linear.predict(ids[split]), "bag_of_words_")
    return results


def write_predictions(folder: Path, texts: LabelledTexts, outputs: dict[str, np.ndarray]) -> None:
    """Writes, on the chief, each split's predictions in GLUE's format: classes' names, or numbers.

    Those of the test split have GLUE's file name, and are clipped to the task's limits.
    """
    if not is_chief():
        return
    folder.mkdir(exist_ok=True)
    for split, rows in outputs.items():
        limits, name = (texts.task.limits, texts.task.submission) if split == "test" else (NO_LIMITS, f"{split}.tsv")
        values = [texts.classes[best] for best in rows.argmax(axis=1)] if texts.classes else rows[:, 0].clip(*limits)
        lines = [f"{index}\t{value!s}\n" for index, value in zip(texts.splits[split].indices, values, strict=True)]
        (folder / name).write_text("".join(["index\tprediction\n", *lines]), encoding="utf-8")


def _entry(split: str, name: str) -> str:
    return f"{'val' if split == 'validation' else split}_{name}"


def _metrics(texts: LabelledTexts, split: str, predictions: np.ndarray, prefix: str = "") -> dict[str, float]:
    labels, classes = np.array(texts.splits[split].labels), range(len(texts.classes))
    varied = np.ptp(labels) and np.ptp(predictions)
    f1 = {"labels": classes, "average": "binary" if len(classes) == 2 else "macro", "zero_division": 0}
    functions = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda *of: metrics.f1_score(*of, **f1),
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda *of: scipy.stats.pearsonr(*of)[0] if varied else 0,
        "spearman": lambda *of: scipy.stats.spearmanr(*of)[0] if varied else 0,
    }
    return {_entry(split, prefix + name): float(functions[name](labels, predictions)) for name in texts.task.metrics}


def _words(ids: list[list[int]]) -> list[tuple[int, int]]:
    shared = {*ids[0]} & {*ids[-1]} if len(ids) == 2 else ()
    return [(which, token) for which, text in enumerate((*ids, shared)) for token in text]


def told_of(split: str, of: Scores) -> Told:
    """For `report`: a split's metrics, and those of its baselines.

    It warns of a model that does not beat, by its main metric, those that ignore word order, unless both are perfect;
    and in regression, by its loss, the mean of the training labels.
    """
    metric, title = next((metric, title) for metric, title in METRICS.items() if metric in of)

    def shown(prefix: str = "") -> str:
        """The metrics that begin so, such as `68.4%, F1 0.812`."""
        found = {each: of[prefix + each] for each in METRICS if prefix + each in of}
        texts = [f"{METRICS[each]} {value:{'.1%' if each == 'accuracy' else '.3f'}}" for each, value in found.items()]
        return ", ".join(texts).removeprefix(f"{title} ")

    means = [("  mean baseline", f"{of['mean_loss']:.3f}")] if "mean_loss" in of else []
    baselines = [each for each in BASELINES if f"{each}_{metric}" in of]
    simple = [(f"  {BASELINES[each]} baseline", shown(f"{each}_")) for each in baselines]
    best = max((of[f"{each}_{metric}"] for each in baselines), default=-np.inf)
    learned = of["loss"] < of.get("mean_loss", np.inf) and of[metric] > min(best, 1 - 2 * MARGIN) + MARGIN
    return [(f"{split} loss", f"{of['loss']:.3f}"), *means, (f"{split} {title}", shown()), *simple], learned
