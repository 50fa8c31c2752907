# SPDX-License-Identifier: Apache-2.0
"""Labelled texts for fine-tuning: generated pairs, tasks of GLUE (Wang et al. 2018, arXiv:1804.07461), or your own."""

import collections
import contextlib
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_replicas import UserError

from ..files import from_hub, is_held_out, shortened, tell_if_few
from .tables import SUFFIXES, Row, read_rows

HUB_NAME = "nyu-mll/glue"
STEMS = {  # of a folder's files
    "train": ("train",),
    "validation": ("dev", "validation", "valid", "val", "dev_matched", "validation_matched"),  # the last two: MNLI's
    "test": ("test",),
}
LARGEST_NUMBER = 1e12  # in float32, neither the squares of errors nor those of gradients may overflow
FEW = 20  # labels that may all differ
FEW_EXAMPLES = 100  # by which chance moves an accuracy by 5 points
NO_LABELS = {"-", "-1", "?", "n/a", "na", "nan", "none", "null", "unknown", "unlabeled", "unlabelled"}
NO_LIMITS = (-math.inf, math.inf)


@dataclass(frozen=True)
class Task:
    """What distinguishes one task from another."""

    texts: tuple[str, ...]  # columns of the texts
    submission: str = "test.tsv"  # file name that GLUE wants for predictions of the test split
    metrics: tuple[str, ...] = ("accuracy",)  # of `common.classification_scores`; the main one first
    classes: tuple[str, ...] = ("0", "1")  # in the Hub's order; none for regression
    label: str = "label"  # column of the label
    header: tuple[str, ...] = ()  # columns of train.tsv and dev.tsv, where their first line does not name them
    hub_texts: tuple[str, ...] = ()  # columns of the texts on the Hub, if they have other names there
    limits: tuple[float, float] = NO_LIMITS  # of predictions for the test split: GLUE's server rejects others


PAIR, STRINGS = ("sentence1", "sentence2"), ("#1 String", "#2 String")
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "roles": Task(PAIR, metrics=("accuracy", "f1")),
    "cola": Task(("sentence",), "CoLA.tsv", ("matthews",), header=("source", "label", "mark", "sentence")),
    "mrpc": Task(STRINGS, "MRPC.tsv", ("accuracy", "f1"), label="Quality", hub_texts=PAIR),
    "qnli": Task(("question", "sentence"), "QNLI.tsv", classes=ENTAILMENT),
    "rte": Task(PAIR, "RTE.tsv", classes=ENTAILMENT),
    "sst2": Task(("sentence",), "SST-2.tsv"),
    "stsb": Task(PAIR, "STS-B.tsv", ("pearson", "spearman"), classes=(), label="score", limits=(0.0, 5.0)),
}
MOSTLY_ACT = (
    "captain coach detective doctor driver farmer guard guide hunter judge lawyer manager nurse officer pilot priest "
    "professor ranger sailor sheriff soldier teacher trainer waiter"
)
MOSTLY_ACTED_ON = (
    "athlete baby beginner child cousin customer gambler guest newcomer orphan passenger patient pensioner prisoner "
    "pupil robber stranger student suspect swimmer thief tourist visitor witness"
)
VERBS = (
    "accused admired amused blamed called carried chased followed greeted helped ignored invited kicked noticed "
    "praised pushed rescued stopped thanked trained trusted visited warned watched"
)
# Share of the events in which one of the first list acts on one of the second: by the order in the second sentence
# alone, so many pairs can be told. Without this intermediate step, BERT-tiny had learned nothing after two epochs.
AS_EXPECTED = 0.85
VALIDATION_EVENTS = 500


@dataclass(frozen=True)
class Examples:
    """One split."""

    texts: list[tuple[str, ...]]  # one or two for each example
    labels: list[int] | list[float] | None  # indices of classes, or numbers; None if unlabelled, as GLUE's test split
    indices: list[str]  # names of the examples in predictions: from the column `index`, or else 0, 1, 2, ...


@dataclass(frozen=True)
class LabelledTexts:
    """A data set."""

    classes: list[str]  # none for regression, whose labels are numbers
    splits: dict[str, Examples]  # "train", "validation", and "test" where there is one
    task: Task = Task(())

    def documents(self) -> Iterator[str]:
        """The training texts, for a vocabulary."""
        return map(" ".join, self.splits["train"].texts)

    @property
    def fingerprint(self) -> str:
        """What tells these training texts from others."""
        return repr(self.splits["train"].texts)


def open_examples(
    task: str, data: str = "", text_columns: str = "", label_column: str = "", regression: bool = False
) -> LabelledTexts:
    """Reads a data set into memory; raises a `UserError` when it cannot be read, or is invalid.

    Args:
        task: `own`, for your own data; `roles`, for generated pairs, which need no network; or one of GLUE in `TASKS`.
        data: for `own`, a file that `read_rows` reads: one example in 10, chosen by a hash of its texts, is
            held out for validation; or a folder with such files named `train`, `dev` or `validation`, and, if there,
            `test`, which may lack the labels. For GLUE, a folder with its `.tsv` files so named; empty for the Hugging
            Face Hub's `nyu-mll/glue`.
        text_columns: for `own`, the name of the texts' column, or two names with a comma between them.
        label_column: for `own`, the name of the labels' column. The classes are the distinct labels in `train`,
            sorted by value if all are numbers, otherwise as texts.
        regression: for `own`, whether the labels are numbers to predict, from -1e12 to 1e12, not classes.
    """
    if task != "own" and (text_columns or label_column or regression):
        raise UserError("columns and regression are for the task own alone: leave them out")
    if task == "roles" and data:
        raise UserError("the task roles makes its own texts: leave out the data")
    if task == "own" and not (data and text_columns and label_column):
        raise UserError("the task own needs a file or folder, and the names of its columns of texts and of labels")
    metrics = ("pearson", "spearman") if regression else ("accuracy", "f1")
    facts = TASKS.get(task) or Task(column_names(text_columns), metrics=metrics, classes=(), label=label_column)
    tables: dict[str, list[Row]] = {}
    if task == "roles":
        for split, pairs in role_pairs().items():
            tables[split] = [("", dict(zip((*PAIR, "label"), pair, strict=True))) for pair in pairs]
    elif data:
        is_file = task == "own" and not Path(data).is_dir()
        files = {"train": Path(data)} if is_file else _split_files(Path(data), SUFFIXES if task == "own" else (".tsv",))
        for split, file in files.items():
            is_test = split == "test"
            tables[split] = [*read_rows(file, () if is_test else facts.header, glue=task != "own", all_rows=is_test)]
    else:
        tables = _from_hub(facts, task)
    classes = [*facts.classes]
    if task == "own" and not regression:
        classes = _classes(tables["train"], label_column)
    if "validation" not in tables:
        rows, tables = tables["train"], {"train": [], "validation": []}
        for number, (where, row) in enumerate(rows):
            texts = "\n".join(str(_value(where, row, name)) for name in facts.texts)
            split = "validation" if is_held_out(texts) else "train"
            tables[split].append((where, {"index": number} | row))
    splits = {}
    for split, rows in tables.items():
        if not rows:
            raise UserError(f"the split {split} has no examples. Give more, or a folder with a file for each split")
        labelled = split != "test" or any(facts.label in row for _, row in rows)
        splits[split] = to_examples(rows, facts.texts, facts.label if labelled else "", classes)
    tell_if_few("validation", len(splits["validation"].texts), FEW_EXAMPLES, "examples")
    if len(set(splits["train"].labels or [])) < 2:
        raise UserError("all labels of the split train are the same: there is nothing to learn")
    return LabelledTexts(classes, splits, facts)


def role_pairs() -> dict[str, list[tuple[str, str, int]]]:
    """Pairs of English sentences, 26,648 of "train" and 1,000 of "validation", and 1 if they say the same, else 0.

    The first is active, the second passive: "The guard praised the tourist." and "The tourist was praised by the
    guard." Half of the second sentences have the two people the wrong way round. Pairs of both labels have the same
    words: only word order tells them apart, as in PAWS (Zhang et al. 2019, arXiv:1904.01130), whose sentences are real.

    They are always the same. Pairs 2 i and 2 i + 1 are of one event, a verb and two people, whichever of
    them acts; no two events have all three in common, within a split or across both.
    """
    draw = random.Random(0)
    events = list(itertools.product(MOSTLY_ACT.split(), MOSTLY_ACTED_ON.split(), VERBS.split()))
    draw.shuffle(events)
    pairs = []
    for agent, patient, verb in events:
        if draw.random() >= AS_EXPECTED:
            agent, patient = patient, agent
        first = f"The {agent} {verb} the {patient}."
        pairs.append((first, f"The {patient} was {verb} by the {agent}.", 1))
        pairs.append((first, f"The {agent} was {verb} by the {patient}.", 0))
    held_out = 2 * VALIDATION_EVENTS
    return {"train": pairs[held_out:], "validation": pairs[:held_out]}


def column_names(columns: str) -> tuple[str, ...]:
    """One or two names, divided by a comma. Raises a `ValueError` if there are more, or one is empty or repeated."""
    names = tuple(name.strip() for name in columns.split(","))
    if len(names) > 2 or not all(names) or len({*names}) < len(names):
        raise UserError(f"the columns of texts must be one name, or two with a comma between them; got {columns!r}")
    return names


def to_examples(rows: Iterable[Row], texts: Sequence[str], label: str = "", classes: Sequence[str] = ()) -> Examples:
    """The examples in rows of `read_rows`, with their texts in these columns, and labels if there is a column.

    Labels are some of the classes or, without classes, numbers. Raises a `UserError` when they are not, a column is
    missing, or a text is not a string.
    """
    rows = [*rows]
    found = [tuple(_value(where, row, column) for column in texts) for where, row in rows]
    for (where, _), pieces in zip(rows, found, strict=True):
        if not all(isinstance(piece, str) for piece in pieces):
            raise UserError(f"{where}: {shortened(texts)} must be text; got {shortened(map(json.dumps, pieces))}")
    labels = [_label(where, _value(where, row, label), classes) for where, row in rows] if label else None
    indices = [" ".join(str(row.get("index", number)).split()) for number, (_, row) in enumerate(rows)]
    return Examples(found, labels, indices)


def _split_files(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for split, stems in STEMS.items():
        names = [stem + suffix for stem in stems for suffix in suffixes]
        found = [name for name in names if (folder / name).is_file()]
        if len(found) > 1 or not found and split != "test":
            wrong = f"both {' and '.join(found)}; keep only one" if found else f"no {' or '.join(names)}"
            raise UserError(f"{folder} has {wrong}")
        files.update((split, folder / name) for name in found)
    return files


def _from_hub(task: Task, name: str) -> dict[str, list[Row]]:
    """The rows of a task's splits on the Hub, with the columns that GLUE's files have."""
    splits = from_hub("load_dataset", HUB_NAME, name)
    tables: dict[str, list[Row]] = {split: [] for split in STEMS}
    for split, rows in tables.items():
        for row in splits[split]:
            values = {ours: row[theirs] for ours, theirs in zip(task.texts, task.hub_texts or task.texts, strict=True)}
            if row["label"] != -1:  # which is where there is none
                values[task.label] = task.classes[row["label"]] if task.classes else row["label"]
            rows.append((f"{split}, row {row['idx']}", values | {"index": row["idx"]}))
    return tables


def _classes(rows: list[Row], column: str) -> list[str]:
    """The distinct labels in a column; prints them with their counts, and which of them are doubtful."""
    counts: collections.Counter[str] = collections.Counter()
    for where, row in rows:
        label = _value(where, row, column)
        if not isinstance(label, int | str) or len(str(label).splitlines()) != 1 or "\t" in str(label):
            got = f"{shortened([json.dumps(label)])}. Numbers to predict are for regression"
            raise UserError(f"{where}: a label must be a text of one line without tabs, or an integer; got {got}")
        counts[str(label)] += 1
    if len(counts) > max(FEW, len(rows) / 2):
        raise UserError(f"{len(counts)} of {len(rows)} labels differ: name the column of classes, or use regression")
    classes = sorted(counts)
    with contextlib.suppress(ValueError):
        classes = sorted(classes, key=lambda name: (math.isnan(float(name)), float(name)))
    print("classes:", shortened(f"{name!r} {counts[name]}" for name in classes), flush=True)
    if missing := [name for name in classes if name.strip().casefold() in NO_LABELS]:
        print(f"{shortened(map(repr, missing))}: if that stands for no label, remove these examples", flush=True)
    folded = collections.Counter(name.strip().casefold() for name in classes)
    if twins := [name for name in classes if folded[name.strip().casefold()] > 1]:
        print(f"{shortened(map(repr, twins))} differ in spaces or capitals alone: are they one class?", flush=True)
    return classes


def _label(where: str, label: Any, classes: Sequence[str]) -> int | float:
    """The class's index; or the number as a float32: the Hub's copy of GLUE has 3.79999995 for 3.8."""
    if str(label) in classes:
        return classes.index(str(label))
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not classes and abs(float(label)) <= LARGEST_NUMBER:
            return float(np.float32(label))
    wanted = f"one of {shortened(classes)}" if classes else "a number from -1e12 to 1e12"
    raise UserError(f"{where}: the label must be {wanted}; got {shortened([json.dumps(label)])}")


def _value(where: str, row: dict[str, Any], column: str) -> Any:
    if column not in row:
        raise UserError(f"{where} has no column {column!r}; it has {shortened(map(repr, row))}")
    return row[column]
