# SPDX-License-Identifier: Apache-2.0
"""The text of a benchmark: one vocabulary for all contenders, and packed sequences for those without TensorFlow."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.workers import once


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark's text."""
    parser.add_argument("--corpus", default="docstrings", help="as in bert_mlm: a name, a file or a folder")
    parser.add_argument("--vocabulary", default="", help="WordPiece file; else one is trained on the corpus")


def prepare_text(arguments: argparse.Namespace, seq_length: int, folder: str) -> dict[str, Any]:
    """Writes a benchmark's text to a folder: `vocab.txt`, and `sequences.npy` [sequences, seq_length].

    Returns:
        `corpus` and `vocabulary`, options of `bert_mlm`; and `pieces`, the size of the vocabulary.
    """
    options = {"corpus": absolute(arguments.corpus), "vocabulary": absolute(arguments.vocabulary)}
    most = 500 if arguments.quick else 30_522  # word pieces, of a vocabulary that is trained
    given = options | {"vocabulary_size": most, "seq_length": seq_length, "folder": folder}
    return options | {"vocabulary": str(Path(folder, "vocab.txt"))} | once("benchmarks.text:bert_writer", given)


def absolute(name: str) -> str:
    """The absolute path of a file or folder; any other name as it is."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def bert_writer(folder: str, **options: Any) -> Callable[[], dict[str, int]]:
    """The work of `prepare_text`, in a process that has TensorFlow."""
    import numpy as np

    from recipes.bert_mlm import Config, make_datasets

    def write() -> dict[str, int]:
        tokenizer, batches = make_datasets(Config(**options), 1)
        pieces = tokenizer.get_vocabulary()
        Path(folder, "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
        ids = np.pad(_whole_rows(batches["train"].rows), [(0, 0), (1, 1)])
        ids[:, 0], ids[:, -1] = tokenizer.start_token_id, tokenizer.end_token_id
        np.save(Path(folder, "sequences.npy"), ids)
        return {"pieces": len(pieces)}

    return write


def gpt2_writer(folder: str, **options: Any) -> Callable[[], dict]:
    """A function that writes `preset/`, random weights of a size, and `sequences.npy` [sequences, seq_length + 1]."""
    import keras
    import numpy as np

    from common.model.presets import save_task
    from recipes.causal_lm import Config, build_model, make_datasets

    def write() -> dict:
        config = Config(**options)
        keras.utils.set_random_seed(config.seed)
        preprocessor, batches = make_datasets(config, 1)
        np.save(Path(folder, "sequences.npy"), _whole_rows(batches["train"].rows))
        save_task(build_model(config, preprocessor), preprocessor, Path(folder, "preset"))
        return {}

    return write


def _whole_rows(rows: Any) -> Any:
    """The token ids of all rows but those with padding, which the last one may have."""
    import tensorflow as tf

    ids, is_token, _ = rows.read(tf.range(len(rows), dtype=tf.int64))
    return ids.numpy()[is_token.numpy().all(axis=1)]
