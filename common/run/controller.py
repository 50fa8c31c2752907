# SPDX-License-Identifier: Apache-2.0
"""A custom training loop in three parts, for Keras 3: a Trainer, an Evaluator, and a Controller that drives them.

The interface follows Orbit (https://github.com/tensorflow/models/tree/master/orbit), which needs Keras 2.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_replicas import Checkpoints, exchange, is_chief, steps_in_one_call

LOOP_SECONDS = 5.0  # at most: signals are not handled while TensorFlow runs a loop
Output = dict[str, float]
Action = Callable[[int, Output], None]  # takes the step and the evaluation's results


class Trainer:
    """Trains on a distributed data set, which has a batch for every step to come, or is infinite.

    Subclass it and define `train_step`; build the optimizer, in the strategy's scope, before the first step.
    """

    def __init__(self, dataset):
        self._iterator = iter(dataset)
        self._do_steps = steps_in_one_call(lambda iterator, stop: self.train_step(iterator))

    def train_loop_begin(self) -> None:
        """Called before each loop of steps."""

    def train_step(self, iterator) -> dict[str, tf.Tensor]:
        """Does one step on `next(iterator)`, with `strategy.run`; traced into a graph.

        Returns scalars that are the same on all workers, such as the batch's loss.
        """
        raise NotImplementedError

    def train_loop_end(self, values: dict[str, np.ndarray], seconds: float) -> Output:
        """What is logged and written to TensorBoard after a loop of steps; by default, the means over them.

        Args:
            values: what `train_step` returned: for each scalar a vector with one value per step of the loop.
            seconds: duration of the loop.
        """
        return {name: float(vector.mean()) for name, vector in values.items()}

    def train(self, num_steps: int) -> Output:
        """Runs a loop of steps in one call of a `tf.function`."""
        self.train_loop_begin()
        began = time.perf_counter()
        values = self._do_steps(self._iterator, num_steps)
        return self.train_loop_end(values, time.perf_counter() - began)


class Evaluator:
    """Evaluates some steps of a distributed data set. Subclass it and define `eval_step` and `eval_end`."""

    def __init__(self, dataset, steps: int):
        self._dataset, self._steps = dataset, steps

    def eval_begin(self) -> None:
        """Called before an evaluation."""

    def eval_step(self, iterator) -> Any:
        """Evaluates `next(iterator)`, with `strategy.run`; traced into a graph."""
        raise NotImplementedError

    def eval_end(self, outputs: list[Any]) -> Output:
        """Returns what is logged, shown in TensorBoard and given to actions, from `eval_step`'s output for a batch."""
        raise NotImplementedError

    def evaluate(self) -> Output:
        """Evaluates the data set's first batches, and returns the result of `eval_end`."""
        self.eval_begin()
        iterator = iter(self._dataset)
        return self.eval_end([self._eval_step(iterator) for _ in range(self._steps)])

    @tf.function
    def _eval_step(self, iterator):
        return self.eval_step(iterator)


class Controller:
    """Alternates training and evaluation, logs, saves checkpoints, and resumes an interrupted run.

    On SIGTERM, it finishes the current loop, saves a checkpoint and exits with status 143, on all workers. To keep this
    short, a loop has no more steps than the slowest worker does in 5 seconds, judging by the loop before; the first has
    one step. Only the chief saves and writes summaries.

    Args:
        trainer: None to evaluate only.
        evaluator: None to train only.
        steps_per_loop: maximum steps per call. Loops end at its multiples, when an evaluation is due, at the last step,
            and after some seconds; results do not depend on it.
        global_step: steps done before, as returned by `Checkpoints.restore`.
        checkpoint_manager: saves after loops and evaluations when a checkpoint is due, and at the end.
        summary_dir: TensorBoard's folder; the trainer's results go to `train/`, the evaluator's to `validation/`.
        summary_interval: steps between two training summaries; a loop writes at most one.
        eval_actions: called after each evaluation, with the step and the evaluator's results; `tf.summary` then writes
            to `summary_dir`.

    The attribute `global_step` is the number of steps done.
    """

    def __init__(
        self,
        *,
        trainer: Trainer | None = None,
        evaluator: Evaluator | None = None,
        steps_per_loop: int = 1,
        global_step: int = 0,
        checkpoint_manager: Checkpoints | None = None,
        summary_dir: Path | None = None,
        summary_interval: int | None = None,
        eval_actions: Sequence[Action] = (),
    ):
        self.trainer, self.evaluator = trainer, evaluator
        self.steps_per_loop, self.global_step = steps_per_loop, global_step
        self.checkpoint_manager, self.eval_actions = checkpoint_manager, eval_actions
        self.summary_interval = summary_interval or 1
        writes = summary_dir and is_chief()
        self._board = tf.summary.create_file_writer(str(summary_dir)) if writes else tf.summary.create_noop_writer()
        self._steps_in_time = 1

    def train(self, steps: int) -> None:
        """Trains until `global_step` is `steps`."""
        self._run(steps, None)

    def train_and_evaluate(self, train_steps: int, eval_interval: int) -> Output:
        """Trains until `global_step` is `train_steps`, and evaluates every `eval_interval` steps, and at the end.

        A resumed run evaluates after the same steps. Returns the results of the last evaluation.
        """
        return self._run(train_steps, eval_interval)

    def evaluate(self) -> Output:
        """Evaluates once, and calls the actions."""
        assert self.evaluator, "the Controller was given no evaluator"
        began = time.perf_counter()
        with self._board.as_default(step=self.global_step):
            output = self.evaluator.evaluate()
        seconds = time.perf_counter() - began
        print(f"eval  | step {self.global_step:6,} | {seconds:6.1f} s       | {_shown(output)}", flush=True)
        self._summarise("validation", output)
        with self._board.as_default():
            for action in self.eval_actions:
                action(self.global_step, output)
        return output

    def _run(self, steps: int, eval_interval: int | None) -> Output:
        output = None
        with self.checkpoint_manager or contextlib.nullcontext():
            while self.global_step < steps:
                before = self.global_step
                ends = ((before // every + 1) * every for every in (self.steps_per_loop, eval_interval or steps))
                seconds = self._train_loop(min(steps, before + self._steps_in_time, *ends) - before)
                if eval_interval and (self.global_step % eval_interval == 0 or self.global_step == steps):
                    output = self.evaluate()
                # After the evaluation: a run resumed from a checkpoint saved before it would skip it.
                self._end_loop(before, steps, seconds)
        if eval_interval and output is None:
            output = self.evaluate()
        return output or {}

    def _train_loop(self, num_steps: int) -> float:
        assert self.trainer, "the Controller was given no trainer"
        began = time.perf_counter()
        output = self.trainer.train(num_steps)
        seconds = time.perf_counter() - began
        rate = num_steps / seconds
        before, self.global_step = self.global_step, self.global_step + num_steps
        print(f"train | step {self.global_step:6,} | {rate:6.1f} steps/s | {_shown(output)}", flush=True)
        if self.global_step // self.summary_interval > before // self.summary_interval:
            self._summarise("train", output | {"steps_per_second": rate})
        return seconds

    def _end_loop(self, before: int, last: int, seconds: float) -> None:
        checkpoints = self.checkpoint_manager
        told = bool(checkpoints and checkpoints.told_to_stop)
        workers = exchange({"stop": told, "seconds": seconds / (self.global_step - before)})
        self._steps_in_time = max(int(LOOP_SECONDS / max(theirs["seconds"] for theirs in workers)), 1)
        if checkpoints is None:
            return
        if any(theirs["stop"] for theirs in workers):
            checkpoints.save_and_leave(self.global_step)
        checkpoints.save_if_due(self.global_step, self.global_step - before)
        if self.global_step == last:
            checkpoints.save(last)

    def _summarise(self, part: str, output: Output) -> None:
        with self._board.as_default(step=self.global_step):
            for name, value in output.items():
                tf.summary.scalar(f"{part}/{name}", value)
        self._board.flush()


def _shown(output: Output) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in output.items())
