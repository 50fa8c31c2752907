# SPDX-License-Identifier: Apache-2.0
"""Actions for when a metric is better than ever before."""

import math
from collections.abc import Callable
from pathlib import Path

from common.files import read_json, write_json
from keras_replicas import is_chief


def when_best(metric: str, action: Callable, folder: Path) -> Callable[[int, dict[str, float]], None]:
    """A function that calls `action` when a metric is better than ever before: higher or, for a loss, lower.

    Only the chief acts. Use it as an action of a `Controller`, which passes the step and the evaluation's metrics, or
    as the `on_epoch_end` of Keras's `LambdaCallback`, which passes the epoch and the logs.

    Args:
        metric: its name.
        action: takes the same two arguments.
        folder: its `best.json` holds the best value, for a resumed run.
    """
    record = folder / "best.json"
    sign = -1 if metric.endswith("loss") else 1

    def act(step: int, metrics: dict[str, float]) -> None:
        best = (read_json(record) or {}).get(metric, -sign * math.inf)
        if is_chief() and sign * metrics[metric] > sign * best:
            action(step, metrics)
            write_json(record, {metric: metrics[metric]})

    return act
