# SPDX-License-Identifier: Apache-2.0
"""A custom training loop in three parts, for Keras 3: a Trainer, an Evaluator, and a Controller that drives them.

The interface follows Orbit (https://github.com/tensorflow/models/tree/master/orbit), which needs Keras 2.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_replicas import Checkpoints, distribute, exchange, first_replica, is_chief, steps_in_one_call

from .files import read_json, write_json
from .log import RunLog

LOOP_SECONDS = 5.0  # at most: signals are not handled while TensorFlow runs a loop
Output = dict[str, float]
Action = Callable[[int, Output], None]  # takes the step and the evaluation's results


class Trainer:
    """Trains on data that begins at any step. Subclass it, define `train_step`, and build the optimizer beforehand.

    `train(iterator, num_steps)` does steps in one call of a `tf.function`; it returns a vector for each value.
    """

    def __init__(self, strategy: tf.distribute.Strategy, data: Any):
        self.strategy, self.data = strategy, data
        self.train = steps_in_one_call(lambda iterator, stop: _run(strategy, self.train_step, iterator))

    def train_step(self, *batch) -> dict[str, tf.Tensor]:
        """A step of one replica, on its part of a batch, in a graph; returns scalars that are the same on all."""
        raise NotImplementedError


class Evaluator:
    """Evaluates an epoch of data. Subclass it and define `eval_step` and `eval_end`."""

    def __init__(self, strategy: tf.distribute.Strategy, data: Any):
        self.strategy, self.data = strategy, data
        self._eval_step = tf.function(lambda batches: _run(strategy, self.eval_step, batches), reduce_retracing=True)

    def eval_step(self, *batch) -> Any:
        """An evaluation of one replica, of its part of a batch, in a graph; returns what is the same on all."""
        raise NotImplementedError

    def eval_end(self, outputs: list[Any]) -> Output:
        """What is shown, and given to actions, of what `eval_step` returned for each batch."""
        raise NotImplementedError

    def evaluate(self) -> Output:
        """Evaluates the data, and returns what `eval_end` does."""
        iterator = iter(distribute(self.strategy, self.data))
        return self.eval_end([self._eval_step(iterator) for _ in range(len(self.data))])


def _run(strategy: tf.distribute.Strategy, step: Callable, iterator) -> Any:
    return first_replica(strategy, strategy.run(step, args=next(iterator)))


@dataclasses.dataclass
class Controller:
    """Alternates training and evaluation, logs, saves checkpoints, and resumes an interrupted run.

    On SIGTERM, all workers finish the current loop, save a checkpoint and exit with status 143. To keep this short, a
    loop has no more steps than the slowest worker does in 5 seconds, judging by the loop before; the first has one.
    """

    trainer: Trainer
    evaluator: Evaluator
    checkpoints: Checkpoints  # from which it resumes; saved after loops and evaluations when one is due, and at the end
    log: RunLog  # gets each step's values; the evaluations are under `validation/` in its TensorBoard
    # Maximum steps per call. Loops end at its multiples, when an evaluation is due, at the last step, and after some
    # seconds; results do not depend on it.
    steps_per_loop: int = 1
    eval_actions: Sequence[Action] = ()  # called after evaluations; `tf.summary` then writes to the log's TensorBoard
    init_fn: Callable[[], None] = lambda: None  # called where there is no checkpoint, to load weights for example

    def __post_init__(self):
        self._steps_in_time = 1
        self.global_step = self.checkpoints.restore(self.init_fn)  # steps done
        self._iterator = iter(distribute(self.trainer.strategy, self.trainer.data, self.global_step))
        self.log.begin(self.global_step)

    def train_and_evaluate(self, train_steps: int, eval_interval: int) -> Output:
        """Trains until `train_steps` are done, evaluates every `eval_interval` steps and at the end; returns the last.

        A resumed run evaluates after the same steps.
        """
        output = None
        with self.checkpoints:
            while self.global_step < train_steps:
                before = self.global_step
                ends = ((before // every + 1) * every for every in (self.steps_per_loop, eval_interval))
                num_steps = min(train_steps, before + self._steps_in_time, *ends) - before
                self.log.start_clock()
                began = time.perf_counter()
                values = self.trainer.train(self._iterator, num_steps)
                seconds = (time.perf_counter() - began) / num_steps
                self.global_step += num_steps
                self.log.write(values)
                means = {name: float(vector.mean()) for name, vector in values.items()}
                self._print("train", f"{1 / seconds:6.1f} steps/s", means)
                if self.global_step % eval_interval == 0 or self.global_step == train_steps:
                    output = self.evaluate()
                self.log.board.flush()  # a kill takes nothing of saved steps, which are not done again
                # After the evaluation: a run resumed from a checkpoint saved before it would skip it.
                workers = exchange({"stop": self.checkpoints.told_to_stop, "seconds": seconds})
                self._steps_in_time = max(int(LOOP_SECONDS / max(theirs["seconds"] for theirs in workers)), 1)
                if any(theirs["stop"] for theirs in workers):
                    self.checkpoints.save_and_leave(self.global_step)
                self.checkpoints.save_if_due(self.global_step, num_steps)
            self.checkpoints.save(self.global_step)
        return self.evaluate() if output is None else output

    def evaluate(self) -> Output:
        """Evaluates once, shows the results, and calls the actions."""
        began = time.perf_counter()
        output = self.evaluator.evaluate()
        self._print("validation", f"{time.perf_counter() - began:6.1f} s", output)
        with self.log.board.as_default(step=self.global_step):
            for name, value in output.items():
                tf.summary.scalar(f"validation/{name}", value)
            for action in self.eval_actions:
                action(self.global_step, output)
        self.log.board.flush()
        return output

    def _print(self, part: str, speed: str, output: Output) -> None:
        values = ", ".join(f"{name} {value:.4g}" for name, value in output.items())
        print(f"{part:10} | step {self.global_step:6,} | {speed:14} | {values}", flush=True)


def when_best(metric: str, action: Action, folder: Path) -> Action:
    """An action that calls another one, on the chief, when a metric is higher than ever before; a loss, lower.

    `best.json` in the folder holds the best value, for a resumed run.
    """
    record, sign = folder / "best.json", -1 if metric.endswith("loss") else 1

    def act(step: int, metrics: Output) -> None:
        best = (read_json(record) or {}).get(metric, -sign * math.inf)
        if is_chief() and sign * metrics[metric] > sign * best:
            action(step, metrics)
            write_json(record, {metric: metrics[metric]})

    return act
