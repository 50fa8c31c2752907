# SPDX-License-Identifier: Apache-2.0
"""This project's side in fine-tuning: `recipes/text_classifier.py`."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import common.data.by_length
import keras
import tensorflow as tf
from common.data.text_batches import EncodedTexts

from benchmarks.clock import WARM, Clock
from benchmarks.ours import fit
from benchmarks.text import temporary_folder
from common.training import Scaled
from keras_replicas import make_strategy
from recipes.text_classifier import Config, build_model, make_datasets, train_and_evaluate


def trainer(batch_size: int, rate: float = 5e-5, **options: Any) -> Callable[..., dict[str, Any]]:
    """A function that trains some steps and times them; see `benchmarks.workers`.

    Args:
        batch_size: examples in a step, over all replicas.
        rate: learning rate of every step.
        options: of `text_classifier`.
    """
    config = Config(**options)
    strategy, data, model = _begin(config, rate)
    scaled = Scaled(batch_size // strategy.num_replicas_in_sync, batch_size)

    def run(steps: int) -> dict[str, Any]:
        counts = {"labels": 0, "tokens": 0, "slots": 0}

        def count(step: int) -> int:
            for name in counts:
                counts[name] += int(model.step_values[name].sum())
            return int(model.step_values["tokens"].sum())

        clock = Clock(count)
        fit(model, strategy, data.stream("train", scaled, config.seed), WARM + steps, [clock])
        padding = 1 - counts["tokens"] / counts["slots"]
        return {"steps": steps, "seconds": clock.seconds, "examples": counts["labels"], "padding": padding}

    return run


def leader(batch_size: int, rate: float, **options: Any) -> Callable[..., dict[str, Any]]:
    """A function that trains for some epochs on one device, without dropout, and returns all that the peer needs.

    Args:
        batch_size: examples in a step.
        rate: learning rate of the first step, which falls to 0 by the last.
        options: of `text_classifier`.
    """

    def run(epochs: int) -> dict[str, Any]:
        config = Config(replicas=1, precision="float32", dropout=0.0, **options)
        _, data, model = _begin(config, rate)
        scaled = Scaled(batch_size, batch_size)
        steps = data.steps("train", scaled) * epochs
        model.optimizer.learning_rate = keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0)
        head = [variable.numpy().tolist() for variable in model.output_dense.weights]
        batches, losses = [], []
        for x, y, weight in data.labelled_batches("train", scaled, range(steps), config.seed):
            losses.append(float(model.train_on_batch(x, y, weight, return_dict=True)["loss"]))
            held = keras.ops.convert_to_numpy(weight) > 0  # the last batch of an epoch may be smaller
            batches.append({name: values.numpy()[held].tolist() for name, values in (x | {"labels": y}).items()})
        validation = {name: values.astype("int32") for name, values in data.inputs["validation"].items()}
        outputs = model.predict(validation, verbose=0)
        given = {"head": head, "batches": batches, "validation": {n: v.tolist() for n, v in validation.items()}}
        return given | {"losses": losses, "outputs": outputs.tolist()}

    return run


def _begin(config: Config, rate) -> tuple[tf.distribute.Strategy, EncodedTexts, keras.Model]:
    """The strategy, the data and the model, with a learning rate or its schedule."""
    strategy = make_strategy(config.replicas)
    keras.utils.set_random_seed(config.seed)
    keras.config.set_dtype_policy(config.precision)
    data = make_datasets(config)
    with strategy.scope():
        return strategy, data, build_model(config, data, rate)


def scorer(by_length: bool = True, **options: Any) -> Callable[[], dict[str, Any]]:
    """A function that does one run of the recipe; it returns the validation scores and the seconds of training.

    Args:
        by_length: whether examples of similar length share a batch; if not, they are drawn at random.
        options: of `text_classifier`.
    """
    if not by_length:
        common.data.by_length.MEGABATCH = 1

    def run() -> dict[str, Any]:
        with temporary_folder() as folder, contextlib.redirect_stdout(io.StringIO()):
            results = train_and_evaluate(Config(workdir=folder, **options))
        names = [f"{whose}{name}" for whose in ("", "bag_of_words_", "majority_") for name in ("accuracy", "f1")]
        scores = {name: results[f"val_{name}"] for name in names if f"val_{name}" in results}  # RTE has no F1
        return scores | {"padding": results["padding_fraction"], "seconds": results["seconds"]}

    return run
