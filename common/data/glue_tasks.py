# SPDX-License-Identifier: Apache-2.0
"""Tasks of GLUE (Wang et al. 2018, arXiv:1804.07461): their columns, classes and metrics.

| task | what is asked | source |
| --- | --- | --- |
| CoLA | is a sentence grammatical | Warstadt et al. 2019, arXiv:1805.12471 |
| MRPC | do two sentences say the same | Dolan and Brockett 2005, "Automatically Constructing a Corpus of Sentential Paraphrases" |
| QNLI | does a sentence answer a question | Rajpurkar et al. 2016, arXiv:1606.05250 |
| RTE | does one sentence entail another | Dagan et al. 2006, "The PASCAL Recognising Textual Entailment Challenge" |
| SST-2 | is a film review positive | Socher et al. 2013, "Recursive Deep Models for Semantic Compositionality over a Sentiment Treebank" |
| STS-B | how similar two sentences are, from 0 to 5 | Cer et al. 2017, arXiv:1708.00055 |
"""  # noqa: E501

import math
from dataclasses import dataclass

from common.data.sources import from_hub
from common.data.tables import Row

HUB_NAME = "nyu-mll/glue"
ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Task:
    """What distinguishes one task from another."""

    texts: tuple[str, ...]  # columns of the texts
    submission: str  # file name that GLUE wants for predictions of the test split
    metrics: tuple[str, ...] = ("accuracy",)  # the main one first
    classes: tuple[str, ...] = ("0", "1")  # in the Hub's order; none for regression
    label: str = "label"  # column of the label
    header: tuple[str, ...] = ()  # columns of train.tsv and dev.tsv, where their first line does not name them
    hub_texts: tuple[str, ...] = ()  # columns of the texts on the Hub, if they have other names there
    limits: tuple[float, float] = (-math.inf, math.inf)  # of predictions: GLUE's server rejects others


TASKS = {
    "cola": Task(("sentence",), "CoLA.tsv", ("matthews",), header=("source", "label", "mark", "sentence")),
    "mrpc": Task(
        ("#1 String", "#2 String"),
        "MRPC.tsv",
        ("accuracy", "f1"),
        label="Quality",
        hub_texts=("sentence1", "sentence2"),
    ),
    "qnli": Task(("question", "sentence"), "QNLI.tsv", classes=ENTAILMENT),
    "rte": Task(("sentence1", "sentence2"), "RTE.tsv", classes=ENTAILMENT),
    "sst2": Task(("sentence",), "SST-2.tsv"),
    "stsb": Task(
        ("sentence1", "sentence2"),
        "STS-B.tsv",
        ("pearson", "spearman"),
        classes=(),
        label="score",
        limits=(0.0, 5.0),
    ),
}


def hub_tables(name: str, splits: list[str]) -> dict[str, list[Row]]:
    """The rows of a task's splits on the Hub, with the columns that GLUE's files have.

    Raises:
        UserError: when they cannot be fetched.
    """
    task, tables = TASKS[name], from_hub("load_dataset", HUB_NAME, name, option="--data")
    rows: dict[str, list[Row]] = {}
    for split in splits:
        rows[split] = []
        unlabelled = all(label == -1 for label in tables[split]["label"])  # how the Hub's copy marks missing labels
        for number, row in enumerate(tables[split]):
            values = {
                column: row[there] for column, there in zip(task.texts, task.hub_texts or task.texts, strict=True)
            }
            if not unlabelled:
                label = row["label"]
                values[task.label] = task.classes[label] if label in range(len(task.classes)) else label
            rows[split].append((f"{name} of {HUB_NAME}, {split}, row {number}", values | {"index": row["idx"]}))
    return rows
