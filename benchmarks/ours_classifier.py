# SPDX-License-Identifier: Apache-2.0
"""This project's side in whole runs of fine-tuning: `recipes/text_classifier.py`."""

import contextlib
import io
import tempfile
from collections.abc import Callable
from typing import Any

import keras

from benchmarks.ours import ONE_PART, begin
from recipes import text_classifier


def leader(batch_size: int, rate: float, **options: Any) -> Callable[..., dict[str, Any]]:
    """A function that trains for some epochs on one device, without dropout, and returns all that the peer needs.

    Args:
        batch_size: examples in a step.
        rate: learning rate of the first step, which falls to 0 by the last.
        options: of `text_classifier`.
    """

    def run(epochs: int) -> dict[str, Any]:
        page, config, strategy = begin("text_classifier", replicas=1, dropout=0.0, **options)
        data = page.make_datasets(config)
        train = data.batches("train", batch_size, config.seed)
        steps = len(train) * epochs
        with strategy.scope():
            model = page.build_model(config, data, keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0))
        model.preprocessor = None  # it gets token ids, not texts
        head = [variable.numpy().tolist() for variable in model.output_dense.weights]
        batches, losses = [], []
        for x, y, weight in train.iter_from_step(0, ONE_PART).take(steps):
            losses.append(float(model.train_on_batch(x, y, weight, return_dict=True)["loss"]))
            held = weight.numpy() > 0  # the last batch of an epoch may be smaller
            batches.append({name: values.numpy()[held].tolist() for name, values in (x | {"labels": y}).items()})
        validation = {name: values.astype("int32") for name, values in data.inputs["validation"].items()}
        outputs = model.predict(validation, verbose=0)
        given = {"head": head, "batches": batches, "validation": {n: v.tolist() for n, v in validation.items()}}
        return given | {"losses": losses, "outputs": outputs.tolist()}

    return run


def scorer(**options: Any) -> Callable[[], dict[str, Any]]:
    """A function that does one run of the recipe with some options; it returns the validation scores."""

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            config = text_classifier.Config(workdir=f"{folder}/run", **options)
            results = text_classifier.train_and_evaluate(config)
        names = [f"{whose}{name}" for whose in ("", "bag_of_words_", "majority_") for name in ("accuracy", "f1")]
        return {name: results[f"val_{name}"] for name in names if f"val_{name}" in results}  # RTE has no F1

    return run
