# SPDX-License-Identifier: Apache-2.0
"""A custom training loop in three parts, for Keras 3: a Trainer, an Evaluator, and a Controller that drives them.

The interface follows Orbit (https://github.com/tensorflow/models/tree/master/orbit), which needs Keras 2.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_replicas import Checkpoints, distribute, exchange, is_chief, steps_in_one_call

from .files import read_json, write_json

LOOP_SECONDS = 5.0  # at most: signals are not handled while TensorFlow runs a loop
Output = dict[str, float]
Action = Callable[[int, Output], None]  # takes the step and the evaluation's results


class Trainer:
    """Trains on data that begins at any step. Subclass it and define `train_step`.

    Build the optimizer, in the strategy's scope, before the first step.
    """

    def __init__(self, strategy: tf.distribute.Strategy, data: Any):
        self.strategy, self.data = strategy, data
        self._do_steps = steps_in_one_call(lambda iterator, stop: self.train_step(iterator))

    def begin(self, step: int) -> None:
        """Called once, with the steps done before."""
        self._iterator = iter(distribute(self.strategy, self.data, step))

    def train_step(self, iterator) -> dict[str, tf.Tensor]:
        """Does one step on `next(iterator)`, with `strategy.run`; traced into a graph.

        Returns scalars that are the same on all workers, such as the batch's loss.
        """
        raise NotImplementedError

    def train_loop_end(self, values: dict[str, np.ndarray]) -> Output:
        """What is shown after a loop of steps, of what `train_step` returned for each; by default, the means."""
        return {name: float(vector.mean()) for name, vector in values.items()}

    def train(self, num_steps: int) -> Output:
        """Runs a loop of steps in one call of a `tf.function`."""
        return self.train_loop_end(self._do_steps(self._iterator, num_steps))


class Evaluator:
    """Evaluates an epoch of data. Subclass it and define `eval_step` and `eval_end`."""

    def __init__(self, strategy: tf.distribute.Strategy, data: Any):
        self.strategy, self.data = strategy, data

    def eval_step(self, iterator) -> Any:
        """Evaluates `next(iterator)`, with `strategy.run`; traced into a graph."""
        raise NotImplementedError

    def eval_end(self, outputs: list[Any]) -> Output:
        """What is shown, and given to actions, of what `eval_step` returned for each batch."""
        raise NotImplementedError

    def evaluate(self) -> Output:
        """Evaluates the data, and returns what `eval_end` does."""
        iterator = iter(distribute(self.strategy, self.data))
        return self.eval_end([self._eval_step(iterator) for _ in range(len(self.data))])

    @tf.function(reduce_retracing=True)
    def _eval_step(self, iterator):
        return self.eval_step(iterator)


class Controller:
    """Alternates training and evaluation, logs, saves checkpoints, and resumes an interrupted run.

    On SIGTERM, it finishes the current loop, saves a checkpoint and exits with status 143, on all workers. To keep this
    short, a loop has no more steps than the slowest worker does in 5 seconds, judging by the loop before; the first has
    one step. Only the chief saves and writes summaries.

    Args:
        trainer: see `Trainer`.
        evaluator: see `Evaluator`.
        checkpoints: from which it resumes; it saves after loops and evaluations when one is due, and at the end.
        steps_per_loop: maximum steps per call. Loops end at its multiples, when an evaluation is due, at the last step,
            and after some seconds; results do not depend on it.
        init_fn: called where there is no checkpoint, to load weights for example.
        summary_dir: TensorBoard's folder; the trainer's results go to `train/`, the evaluator's to `validation/`.
        eval_actions: called after each evaluation, with the step and the evaluator's results; `tf.summary` then writes
            to `summary_dir`.

    Attributes:
        global_step: steps done; at first those of the checkpoint.
    """

    def __init__(
        self,
        trainer: Trainer,
        evaluator: Evaluator,
        checkpoints: Checkpoints,
        *,
        steps_per_loop: int = 1,
        init_fn: Callable[[], None] = lambda: None,
        summary_dir: Path | None = None,
        eval_actions: Sequence[Action] = (),
    ):
        self.trainer, self.evaluator, self.checkpoints = trainer, evaluator, checkpoints
        self.steps_per_loop, self.eval_actions, self._steps_in_time = steps_per_loop, eval_actions, 1
        writes = summary_dir and is_chief()
        self._board = tf.summary.create_file_writer(str(summary_dir)) if writes else tf.summary.create_noop_writer()
        self.global_step = checkpoints.restore(init_fn)
        trainer.begin(self.global_step)

    def train_and_evaluate(self, train_steps: int, eval_interval: int) -> Output:
        """Trains until `global_step` is `train_steps`, and evaluates every `eval_interval` steps, and at the end.

        A resumed run evaluates after the same steps. Returns the results of the last evaluation.
        """
        output = None
        with self.checkpoints:
            while self.global_step < train_steps:
                before = self.global_step
                ends = ((before // every + 1) * every for every in (self.steps_per_loop, eval_interval))
                seconds = self._train_loop(min(train_steps, before + self._steps_in_time, *ends) - before)
                if self.global_step % eval_interval == 0 or self.global_step == train_steps:
                    output = self.evaluate()
                # After the evaluation: a run resumed from a checkpoint saved before it would skip it.
                told = {"stop": self.checkpoints.told_to_stop, "seconds": seconds / (self.global_step - before)}
                workers = exchange(told)
                self._steps_in_time = max(int(LOOP_SECONDS / max(theirs["seconds"] for theirs in workers)), 1)
                if any(theirs["stop"] for theirs in workers):
                    self.checkpoints.save_and_leave(self.global_step)
                self.checkpoints.save_if_due(self.global_step, self.global_step - before)
            self.checkpoints.save(self.global_step)
        return self.evaluate() if output is None else output

    def evaluate(self) -> Output:
        """Evaluates once, and calls the actions."""
        began = time.perf_counter()
        with self._board.as_default(step=self.global_step):
            output = self.evaluator.evaluate()
            self._show("validation", output, f"{time.perf_counter() - began:6.1f} s")
            for action in self.eval_actions:
                action(self.global_step, output)
        return output

    def _train_loop(self, num_steps: int) -> float:
        began = time.perf_counter()
        output = self.trainer.train(num_steps)
        seconds = time.perf_counter() - began
        self.global_step += num_steps
        self._show("train", output, f"{num_steps / seconds:6.1f} steps/s")
        return seconds

    def _show(self, part: str, output: Output, speed: str) -> None:
        values = ", ".join(f"{name} {value:.4g}" for name, value in output.items())
        print(f"{part:10} | step {self.global_step:6,} | {speed:14} | {values}", flush=True)
        with self._board.as_default(step=self.global_step):
            for name, value in output.items():
                tf.summary.scalar(f"{part}/{name}", value)
        self._board.flush()


def when_best(metric: str, action: Action, folder: Path) -> Action:
    """An action that calls another one, on the chief, when a metric is better than ever before.

    Higher is better; of a loss, lower. `best.json` in the folder holds the best value, for a resumed run.
    """
    record, sign = folder / "best.json", -1 if metric.endswith("loss") else 1

    def act(step: int, metrics: Output) -> None:
        best = (read_json(record) or {}).get(metric, -sign * math.inf)
        if is_chief() and sign * metrics[metric] > sign * best:
            action(step, metrics)
            write_json(record, {metric: metrics[metric]})

    return act
