# SPDX-License-Identifier: Apache-2.0
"""Trains a model in plain Keras and in ours, and compares what came out, for `doctor.py`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.doctor_models import BATCH, EPOCHS, Case
from keras_replicas.model import data_parallel

# Relative differences that float32 may leave; of arrays, by the Euclidean norm, of all weights and of each tensor.
BOUNDS = {"loss of every step": 1e-6, "weights": 1e-6, "every tensor": 1e-5, "evaluate": 1e-6, "predict": 1e-6}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adam": lambda: keras.optimizers.Adam(1e-3),
}


class Trained(NamedTuple):
    """What is compared: the running loss by epoch and step, weights by path; after Adam, metrics and predictions."""

    losses: dict[tuple[int, int], float]
    weights: dict[str, np.ndarray]
    evaluated: dict[str, float]
    predicted: np.ndarray


def train(
    case: Case, optimizer: str, strategy: tf.distribute.Strategy | None = None, accumulate: int = 1, **options: Any
) -> Trained:
    """Trains a model from the weights of a fixed seed: by ours with a strategy, by plain Keras on one device without.

    Args:
        case: the model and its data.
        optimizer: a name in `OPTIMIZERS`.
        strategy: ours.
        accumulate: see `data_parallel`.
        **options: of `compile`.
    """
    keras.utils.set_random_seed(0)
    model = case.build()
    if strategy:
        weights = model.get_weights()
        with strategy.scope():
            model = data_parallel(case.build(), accumulate=accumulate)
        model.set_weights(weights)
    with model.distribute_strategy.scope():
        model.compile(
            OPTIMIZERS[optimizer](), case.loss, weighted_metrics=["accuracy"], **{"jit_compile": False} | options
        )
    losses: dict[tuple[int, int], float] = {}
    history = Losses(losses)
    model.fit(**case.data, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[history])
    evaluated, predicted = {}, np.zeros(0)
    if optimizer == "adam":
        evaluated = model.evaluate(**case.data, batch_size=BATCH, verbose=0, return_dict=True)
        predicted = model.predict(case.data["x"], batch_size=BATCH, verbose=0)
    paths = [f"{i} {weight.path}" for i, weight in enumerate(model.weights)]
    return Trained(losses, dict(zip(paths, model.get_weights(), strict=True)), evaluated, predicted)


class Losses(keras.callbacks.Callback):
    """Notes the running mean of the loss after each step: that of every step follows from it."""

    def __init__(self, losses: dict[tuple[int, int], float]):
        super().__init__()
        self.losses = losses

    def on_epoch_begin(self, epoch, logs=None):
        """See Keras."""
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        """See Keras."""
        # A call of several steps may number its last one beyond the epoch.
        self.losses[self.epoch, min(batch, self.params["steps"] - 1)] = float(logs["loss"])


def compared(ours: Trained, theirs: Trained) -> dict[str, tuple[float, float]]:
    """Relative differences by what is compared, each with its bound."""
    # In theory the biases of attention's keys have no gradient: their values are rounding noise.
    names = [name for name, weight in theirs.weights.items() if not name.endswith("key/bias") and weight.any()]
    pairs = dict(zip(theirs.weights, ours.weights.values(), strict=True))
    away = [float(np.linalg.norm(pairs[name] - theirs.weights[name])) for name in names]
    size = [float(np.linalg.norm(theirs.weights[name])) for name in names]
    measured = {
        "loss of every step": max(relative(loss, theirs.losses[step]) for step, loss in ours.losses.items()),
        "weights": math.hypot(*away) / math.hypot(*size),
        "every tensor": max(a / b for a, b in zip(away, size, strict=True)),
    }
    if theirs.evaluated:
        measured["evaluate"] = max(relative(ours.evaluated[name], value) for name, value in theirs.evaluated.items())
        apart = np.linalg.norm(ours.predicted - theirs.predicted)
        measured["predict"] = float(apart / np.linalg.norm(theirs.predicted))
    return {name: (value if math.isfinite(value) else math.inf, BOUNDS[name]) for name, value in measured.items()}


def relative(a: float, b: float) -> float:
    """The difference of two numbers, relative to the second."""
    return abs(a - b) / abs(b) if b else abs(a)
