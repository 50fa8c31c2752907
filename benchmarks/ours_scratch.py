# SPDX-License-Identifier: Apache-2.0
"""This project's side in training from shards: `recipes/bert_from_scratch.py`."""

from collections.abc import Callable
from typing import Any

import keras
from common.run.run_folder import open_run

from benchmarks.clock import WARM, Clock
from benchmarks.ours import AS_OTHERS, FOR_EVER, fit
from common.training import Scaled
from keras_replicas import make_strategy
from recipes.bert_from_scratch import Config, build_model, make_datasets, masked_batches


def trainer(batch_size: int, **options: Any) -> Callable[..., dict[str, Any]]:
    """A function that trains some steps and times them; see `benchmarks.workers`.

    Args:
        batch_size: sequences in a step, over all replicas.
        options: of `bert_from_scratch`, including `workdir` and `data`, where shards are or will be.
    """
    config = Config(**AS_OTHERS | {"epochs": FOR_EVER} | options)
    strategy = make_strategy(config.replicas)
    keras.utils.set_random_seed(config.seed)
    keras.config.set_dtype_policy(config.precision)
    shards = make_datasets(config, open_run(None, {}))
    scaled = Scaled(batch_size // strategy.num_replicas_in_sync, batch_size)
    with strategy.scope():
        model = build_model(config, shards.vocabulary, 1e-4)
    train = masked_batches(config, shards, "train", scaled)

    def run(steps: int) -> dict[str, Any]:
        clock = Clock(lambda step: int(model.step_values["tokens"].sum()))
        fit(model, strategy, train, WARM + steps, [clock])
        return {"steps": steps, "seconds": clock.seconds, "tokens": clock.tokens}

    return run
