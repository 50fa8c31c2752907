# SPDX-License-Identifier: Apache-2.0
"""Trains 5 steps on two replicas and on one, which must give the same losses and weights. About half a minute.

Run this file with `python -m pytest` (`pip install pytest`), or with `python` alone.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import recipes.bert_mlm as recipe

BOUND = 1e-5  # relative; about ten times what float32 leaves for sums in another order
TEXT = "".join(f"Line {i} has words, and the numbers {i * i} and {i * 7 % 100}.\n\n" for i in range(400))


def train(folder: Path, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Trains a small model with a global batch of 8; returns each step's loss, and all weights, one after another."""
    workdir, corpus = folder / f"{replicas} replicas", folder / "corpus.txt"
    corpus.write_text(TEXT, encoding="utf-8")
    options: dict[str, Any] = {"workdir": str(workdir), "corpus": str(corpus), "model": "nano", "seq_length": 32}
    options |= {"replicas": replicas, "batch_size": 8 // replicas, "lr_scaling": "none", "max_steps": 5}
    options |= {"vocabulary_size": 300, "dropout": 0.0}  # whose noise depends on the replica
    options["deterministic"] = True  # on GPUs without TF32, which rounds to 10 bits
    names = {field.name for field in dataclasses.fields(recipe.Config)}
    recipe.train_and_evaluate(recipe.Config(**{name: options[name] for name in names & options.keys()}))
    lines = (workdir / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    found: list[np.ndarray] = []
    for path in sorted((workdir / "preset").glob("*.weights.h5")):
        with h5py.File(path) as file:
            file.visititems(lambda _, item: found.append(np.ravel(item)) if isinstance(item, h5py.Dataset) else None)
    return np.array([json.loads(line)["loss"] for line in lines]), np.concatenate(found)


def test_two_replicas_compute_what_one_does(tmp_path):
    """Both take the same batches of 8, in the same order."""
    losses_of_two, weights_of_two = train(tmp_path, 2)  # first: a device cannot be split once it is in use
    losses, weights = train(tmp_path, 1)
    assert len(losses) == 5
    np.testing.assert_allclose(losses_of_two, losses, rtol=BOUND)
    assert np.linalg.norm(weights_of_two - weights) <= BOUND * np.linalg.norm(weights)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        test_two_replicas_compute_what_one_does(Path(name))
    print("passed: two replicas compute what one does")
