# SPDX-License-Identifier: Apache-2.0
"""The text of a benchmark: one vocabulary for all contenders, and packed sequences for those without TensorFlow."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.workers import once


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark's text."""
    parser.add_argument("--corpus", default="docstrings", help="as in bert_mlm: a name, a file or a folder")
    parser.add_argument("--vocabulary", default="", help="WordPiece file; else one is trained on the corpus")
    parser.add_argument("--vocabulary-size", type=int, default=30_522, help="word pieces in a trained vocabulary")


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark of one model's steps, and of its text."""
    add_text_arguments(parser)
    parser.add_argument("--model", default="tiny", help="size")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences of 128 in a step, over all replicas")
    parser.add_argument("--rounds", type=int, default=5, help="times that everything is timed")
    parser.add_argument("--seconds", type=float, default=5.0, help="of steps in a round, about")


def prepare_text(arguments: argparse.Namespace, seq_length: int, folder: str) -> dict[str, Any]:
    """Writes a benchmark's text to a folder: `vocab.txt`, and `sequences.npy` [sequences, seq_length].

    Returns:
        `corpus` and `vocabulary`, options of `bert_mlm`; and `pieces`, `sequences` and `tokens`, their numbers.
    """
    corpus = str(Path(arguments.corpus).resolve()) if Path(arguments.corpus).exists() else arguments.corpus
    options = {"corpus": corpus, "vocabulary_size": arguments.vocabulary_size, "seq_length": seq_length}
    options["vocabulary"] = str(Path(arguments.vocabulary).resolve()) if arguments.vocabulary else ""
    vocabulary = str(Path(folder, "vocab.txt"))
    return {"corpus": corpus, "vocabulary": vocabulary} | once("benchmarks.text:writer", {"folder": folder} | options)


def writer(folder: str, **options: Any) -> Callable[[], dict[str, int]]:
    """The work of `prepare_text`, in a process that has TensorFlow."""
    import numpy as np
    from common.data.packing import count_tokens

    from recipes.bert_mlm import Config, make_datasets

    def write() -> dict[str, int]:
        vocabulary, sequences = make_datasets(Config(**options))
        Path(folder, "vocab.txt").write_text("".join(f"{piece}\n" for piece in vocabulary.pieces), encoding="utf-8")
        np.save(Path(folder, "sequences.npy"), sequences["train"].numpy())
        number, tokens = count_tokens(sequences, vocabulary)["train"]
        return {"pieces": len(vocabulary.pieces), "sequences": number, "tokens": tokens}

    return write


def temporary_folder() -> tempfile.TemporaryDirectory:
    """A folder for what contenders share, gone at the end."""
    return tempfile.TemporaryDirectory(prefix="benchmark-")
