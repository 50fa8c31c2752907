# SPDX-License-Identifier: Apache-2.0
"""Trains 5 steps on one replica and on two, which must give the same losses and weights. About half a minute.

Run this file with `python -m pytest` (`pip install pytest`), or with `python` alone.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

import recipes.bert_mlm as recipe

BOUND = 1e-5  # relative; about ten times what float32 leaves for sums in another order
TEXT = "".join(f"Line {i} has words, and the numbers {i * i} and {i * 7 % 100}.\n\n" for i in range(400))


def train(folder: Path, replicas: int) -> Path:
    """Trains a small model with a global batch of 8, and returns the work directory."""
    options: dict[str, Any] = {
        "workdir": str(folder / f"{replicas} replicas"),
        "corpus": str(folder / "corpus.txt"),
        "model": "nano",
        "vocabulary_size": 300,
        "seq_length": 32,
        "replicas": replicas,
        "batch_size": 8 // replicas,
        "lr_scaling": "none",
        "max_steps": 5,
        "dropout": 0.0,  # its noise depends on the replica
        "precision": "float32",
        "deterministic": bool(tf.config.list_physical_devices("GPU")),  # without TF32, which rounds to 10 bits
    }
    Path(options["corpus"]).write_text(TEXT, encoding="utf-8")
    names = {field.name for field in dataclasses.fields(recipe.Config)}
    recipe.train_and_evaluate(recipe.Config(**{name: value for name, value in options.items() if name in names}))
    return Path(options["workdir"])


def losses_of(workdir: Path) -> np.ndarray:
    """The loss of each step."""
    lines = (workdir / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


def weights_of(workdir: Path) -> np.ndarray:
    """All weights, one after another."""
    found: list[np.ndarray] = []
    for path in sorted((workdir / "preset").glob("*.weights.h5")):
        with h5py.File(path) as file:
            file.visititems(lambda _, item: found.append(np.ravel(item)) if isinstance(item, h5py.Dataset) else None)
    return np.concatenate(found)


def test_two_replicas_compute_what_one_does(tmp_path):
    """Both take the same batches of 8, in the same order."""
    two, one = train(tmp_path, 2), train(tmp_path, 1)  # in this order: a device cannot be split once it is in use
    assert len(losses_of(one)) == 5
    np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=BOUND)
    apart = weights_of(two) - weights_of(one)
    assert np.linalg.norm(apart) <= BOUND * np.linalg.norm(weights_of(one))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        test_two_replicas_compute_what_one_does(Path(folder))
    print("passed: two replicas compute what one does")
