# SPDX-License-Identifier: Apache-2.0
"""The plans of a model's custom steps, each made before the step first runs on several replicas."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.cluster import num_workers
from keras_replicas.custom_step import StepPlan, assigned_locally, scalars_noted, variables_of_tensorflow
from keras_replicas.division import count_rows
from keras_replicas.draws import draws_replaceable
from keras_replicas.optimizer_calls import all_optimizers, calls_replaceable, optimizers_listed_once
from keras_replicas.replicas import hide_replicas
from keras_replicas.step_probe import Findings, Trial, changes_since, probe_again, probe_step
from keras_replicas.trial_run import without_optionals
from keras_replicas.workers import exchange

log = logging.getLogger("keras_replicas")
_noticed: set[str] = set()


class StepPlans:
    """How the custom steps of a model combine over replicas, and which optimizers they call.

    Args:
        model: of `data_parallel`, compiled.
        custom_step: "mean" or "sum" where the user has decided, else None.

    Attributes:
        optimizers: that the steps call, as far as they have run.
        gradient_kinds: by the name of the step, for each call of an optimizer, its name and what the probe found that
            its gradients are over the examples: "mean", "sum", "either" where they are 0, or "neither".
    """

    def __init__(self, model: Any, custom_step: str | None):
        self._model, self._custom_step = model, custom_step
        self._plans: dict[str, StepPlan] = {}
        self._measured: dict[str, tuple[Callable, Trial]] = {}  # by name, the step and what it is run on
        self._measured_at_step = 0
        self._warnings: dict[str, list[str]] = {}
        self._warned: set[str] = set()
        self.optimizers: list[keras.Optimizer] = []
        self.gradient_kinds: dict[str, tuple[tuple[str, str], ...]] = {}
        self._measured_optimizers: list[keras.Optimizer] = []
        if model.distribute_strategy.num_replicas_in_sync > 1:
            hide_replicas(model.distribute_strategy)

    def prepare(self, name: str, step: Callable, batch: Any, needs_optimizers: bool = False) -> None:
        """Makes the plan of a step, once, from some examples as the step gets them.

        Args:
            name: of the step.
            step: what runs.
            batch: the examples.
            needs_optimizers: whether the step is run to find its optimizers, even if nothing is to be measured.
        """
        if name in self._plans:
            return
        with optimizers_listed_once():
            found = self._probe(name, step, batch, needs_optimizers)
        self._plans[name] = found.plan
        self.gradient_kinds[name] = found.gradient_kinds
        self._measured_optimizers += found.optimizers
        for optimizer in found.optimizers:
            self.note_optimizer(optimizer)
        self.note_warnings(name, (*found.warnings, *self._unlike_shares(batch)))
        self._notice(name)
        if found.trial is not None:
            self._measured[name] = (step, found.trial)

    def _unlike_shares(self, batch: Any) -> list[str]:
        """A warning if a replica may get another share of one tensor's rows than of another's."""
        replicas = self._model.distribute_strategy.num_replicas_in_sync
        leaves = [leaf for leaf in keras.tree.flatten(without_optionals(batch)) if leaf is not None and len(leaf.shape)]
        rows = sorted({int(count_rows(leaf)) for leaf in leaves})
        if len(rows) == 1 or all(each % replicas == 0 for each in rows):
            return []
        return [
            f"its inputs have {' and '.join(map(str, rows))} rows, of which {replicas} replicas get unlike shares, and "
            "a loss can have one only: use numbers of rows that are multiples of the number of replicas"
        ]

    def _probe(self, name: str, step: Callable, batch: Any, needs_optimizers: bool) -> Findings:
        """What the probe finds; on several workers, with the chief's plan."""
        is_alone = self._model.distribute_strategy.num_replicas_in_sync == 1
        custom_step = "mean" if is_alone else self._custom_step
        if num_workers() == 1:
            return probe_step(self._model, name, step, batch, custom_step, needs_optimizers)
        try:
            found = probe_step(self._model, name, step, batch, custom_step, needs_optimizers)
        except ValueError as refusal:
            exchange({"error": str(refusal)})  # raises it on all workers
            raise
        chiefs = exchange({"plan": found.plan._asdict()})[0]["plan"]
        plan = StepPlan(**chiefs | {"gradients": tuple(chiefs["gradients"])})
        return found._replace(plan=plan)

    def measure_again(self) -> None:
        """Measures the steps again if twice as many steps were done as the last time, and warns of what is new.

        A loss may begin with a weight of 0. Call it where metrics are reset: as an epoch or an evaluation begins.
        """
        if not self._measured:
            return
        steps = int(self._model.step_counter.training_step())
        if steps < max(1, 2 * self._measured_at_step):
            return
        self._measured_at_step = steps
        for name, (step, trial) in self._measured.items():
            if name in self._warned:
                continue
            with optimizers_listed_once():
                found = probe_again(self._model, name, step, trial)
            if found is not None:
                self.note_warnings(name, (*found.warnings, *changes_since(self._plans[name], found.plan)))
                self.warn(name)

    def note_optimizer(self, optimizer: keras.Optimizer) -> None:
        """Keeps an optimizer that a step calls, once."""
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)

    def is_measured(self, optimizer: keras.Optimizer) -> bool:
        """Whether a step called the optimizer when it was measured."""
        return any(optimizer is measured for measured in self._measured_optimizers)

    def is_prepared(self, name: str) -> bool:
        """Whether the step has a plan."""
        return name in self._plans

    def plan_of(self, name: str) -> StepPlan:
        """The plan of a step, "train_step" or "test_step"."""
        return self._plans.get(name) or StepPlan(otherwise=self._custom_step or "mean")

    @contextlib.contextmanager
    def surrounding(self, name: str) -> Iterator[None]:
        """Context of all replicas' runs of a step, in which `CustomStep` can take the place of what the step calls."""
        variables = variables_of_tensorflow(self._model).values()
        metrics = self._model.metrics
        with (
            draws_replaceable(),
            calls_replaceable(all_optimizers()),
            assigned_locally(variables),
            scalars_noted(metrics),
        ):
            yield

    def note_warnings(self, name: str, texts: Iterable[str]) -> None:
        """Keeps warnings for `warn`."""
        known = self._warnings.setdefault(name, [])
        for text in texts:
            if text not in known:
                known.append(text)

    def warn(self, name: str) -> None:
        """Gives one warning with all that was kept of a step, once."""
        texts = self._warnings.get(name)
        if not texts:
            return
        self._warnings[name] = []
        self._warned.add(name)
        warnings.warn(
            f"{type(self._model).__name__}.{name} is not the same on several replicas as on one device: "
            f"{'; '.join(texts)}. For exact results, leave the step to Keras: compute the loss in compute_loss, which "
            "gets the global batch, and clip gradients by the optimizer's clipnorm; to accept it without this warning, "
            "data_parallel(model, custom_step='mean') or 'sum'",
            stacklevel=2,
        )

    def _notice(self, name: str) -> None:
        where = f"{type(self._model).__name__}.{name}"
        if self._model.distribute_strategy.num_replicas_in_sync == 1:
            return
        if self._model.jit_compile and len(self._plans) == 1:
            warnings.warn(
                f"jit_compile has no effect on {where}: on several replicas, a custom step runs without XLA",
                stacklevel=2,
            )
        if where not in _noticed:
            _noticed.add(where)
            log.warning("%s runs as on one device: nothing in it is to be divided by the number of replicas.", where)


def first_rows(batches: Any) -> Any:
    """The first batch of data that begins at any step; None where reading it would lose it."""
    if getattr(batches, "is_read_once", False):
        return None
    return next(iter(batches.iter_from_step(0, tf.distribute.InputContext())))
