# SPDX-License-Identifier: Apache-2.0
"""Labelled texts for fine-tuning: GLUE tasks, generated pairs, or your own files."""

from collections.abc import Sized
from pathlib import Path

from common.data import roles
from common.data.glue_tasks import TASKS, hub_tables
from common.data.labelled import Examples, LabelledTexts, find_classes, hold_out, to_examples
from common.data.tables import SUFFIXES, Row, read_rows
from keras_replicas import UserError

STEMS = {"train": ("train",), "validation": ("dev", "validation"), "test": ("test",)}  # of a folder's files


def open_examples(
    task: str, data: str = "", text_columns: str = "", label_column: str = "", regression: bool = False
) -> LabelledTexts:
    """Reads a data set into memory.

    Args:
        task: one of
            - `roles`: generated pairs (`common.data.roles`), which need no network;
            - a task of GLUE, see `common.data.glue_tasks`. `data` is a folder with GLUE's `train.tsv`, `dev.tsv` and,
              if there, `test.tsv`; without one, they come from the Hugging Face Hub (`nyu-mll/glue`), through the
              `datasets` library;
            - `own`: your own `data`.
        data: for `own`, a .tsv, .csv or .jsonl file (see `common.data.tables.read_rows`), of which one example in 10,
            chosen by a hash of its texts, is held out for validation; or a folder with such files named `train`, `dev`
            or `validation`, and, if there, `test`, which may lack the labels.
        text_columns: for `own`, the name of the texts' column, or two names with a comma between them.
        label_column: for `own`, the name of the labels' column. The classes are the distinct labels in `train`,
            sorted by value if all are numbers, otherwise as texts.
        regression: for `own`, whether the labels are numbers to predict, from -1e12 to 1e12, not classes.

    Raises:
        UserError: when it cannot be read, or is invalid.
    """
    if task != "own" and regression:
        raise UserError("--regression is for your own files: give --task own, or leave it out")
    if task != "own" and (text_columns or label_column):
        raise UserError("--text-columns and --label-column are for your own files: give --task own, or leave them out")
    if task == "roles":
        return _generated(data)
    if task == "own":
        return _own_files(data, text_columns, label_column, regression)
    return _from_glue(task, data)


def column_names(text_columns: str) -> tuple[str, ...]:
    """The one or two names in `--text-columns`; a `UserError` when there are more, or one is empty or repeated."""
    names = tuple(name.strip() for name in text_columns.split(","))
    if len(names) > 2 or not all(names) or len({*names}) < len(names):
        raise UserError(f"--text-columns must be one name, or two separated by a comma; got {text_columns}")
    return names


def _split_files(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    files = {}
    for split, stems in STEMS.items():
        names = [stem + suffix for stem in stems for suffix in suffixes]
        found = [folder / name for name in names if (folder / name).is_file()]
        if len(found) > 1:
            raise UserError(f"{folder} has both {found[0].name} and {found[1].name}; keep only one of them")
        if found:
            files[split] = found[0]
        elif split != "test":
            raise UserError(f"{folder} has no {' or '.join(names)}")
    return files


def _generated(data: str) -> LabelledTexts:
    if data:
        raise UserError("--task roles generates its own texts: leave out --data")
    splits = {
        split: Examples([pair[:2] for pair in pairs], [pair[2] for pair in pairs], list(map(str, range(len(pairs)))))
        for split, pairs in roles.role_pairs().items()
    }
    return LabelledTexts(roles.CLASSES, splits, "test.tsv")


def _from_glue(name: str, data: str) -> LabelledTexts:
    task = TASKS[name]
    if data:
        files = _split_files(Path(data), (".tsv",))
        tables = {split: list(read_rows(file, () if split == "test" else task.header)) for split, file in files.items()}
    else:
        tables = hub_tables(name, list(STEMS))
    splits = _all_splits(tables, task.texts, task.label, list(task.classes), "index")
    return LabelledTexts(list(task.classes), splits, task.submission, task.metrics, task.limits)


def _own_files(data: str, text_columns: str, label_column: str, regression: bool) -> LabelledTexts:
    if not data:
        raise UserError("--task own needs your own file or folder: give --data")
    if not text_columns or not label_column:
        raise UserError("--task own needs the names of the columns: give --text-columns and --label-column")
    texts = column_names(text_columns)
    if label_column in texts:
        raise UserError(f"--text-columns must be other than --label-column {label_column}; got {text_columns}")
    path = Path(data)
    files = _split_files(path, SUFFIXES) if path.is_dir() else {"train": path}
    tables = {split: list(read_rows(file)) for split, file in files.items()}
    classes = [] if regression else find_classes(tables["train"], label_column)
    splits = _all_splits(tables, texts, label_column, classes, None)
    return LabelledTexts(classes, splits, "test.tsv", ("pearson", "spearman") if regression else ("accuracy", "f1"))


def _all_splits(
    tables: dict[str, list[Row]], texts: tuple[str, ...], label: str, classes: list[str], index: str | None
) -> dict[str, Examples]:
    splits = {}
    for split, rows in tables.items():
        _require_examples(split, rows)
        unlabelled = split == "test" and not any(label in row for _, row in rows)
        splits[split] = to_examples(rows, texts, None if unlabelled else label, classes, index)
    if "validation" not in splits:
        splits = hold_out(splits["train"])
        for split, examples in splits.items():
            _require_examples(split, examples.texts)
    if len(set(splits["train"].labels or [])) < 2:
        raise UserError("all labels of the split train are the same: there is nothing to learn")
    return splits


def _require_examples(split: str, examples: Sized) -> None:
    if not examples:
        raise UserError(f"the split {split} has no examples. Give more, or a folder with a file for each split")
