# SPDX-License-Identifier: Apache-2.0
"""What a custom step does with its examples: found by running it on a few of them.

The step runs eagerly three times: on five examples, the three shortest and the two longest of the batch, on those three
and on those two. Nothing is applied, and
whatever it assigns is put back. Its optimizers' gradients on all five are then the mean of those on the shards,
weighted by examples, or their sum; so are the numbers that it returns, and what it adds to variables. Where all of them
are 0, as of a loss that only rare examples have, the step runs on the whole batch and two shards of it. So that nothing
else differs between the three runs, every example draws the same random numbers, dropout drops nothing, and
BatchNormalization uses its moving averages.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.batchnorm import fixed_moments
from keras_replicas.combination import combination_of, relative_difference
from keras_replicas.custom_step import StepPlan, assigned_locally, numbers_of, variables_of_tensorflow
from keras_replicas.errors import UserError
from keras_replicas.optimizer_calls import all_optimizers, applied_by, calls_replaceable
from keras_replicas.optimizers import refuse_made_outside_scope
from keras_replicas.trial_run import (
    SHARDS,
    as_numbers,
    as_one_replica,
    constant_batch_size,
    make_new_variables,
    rows_of,
    sizes_of_shards,
    slice_of,
    tolerance_of,
    undone,
    unlike_examples,
    without_optionals,
)

FLOAT32 = 1e-6  # the rounding of a loss in float32, though the model may be in float64
ROUNDING = 1e-2  # of a tolerance, what one addition is rounded by
BUILD_ATTEMPTS = 8


class Call(NamedTuple):
    """A call of an optimizer's `apply`."""

    optimizer: keras.Optimizer
    variables: list
    gradients: list[np.ndarray]


class Record(NamedTuple):
    """What one run of a step did.

    Attributes:
        calls: of optimizers, in their order.
        assigned: by the assignment's name, the values before and after it.
        logs: the numbers that the step returned.
        moments: the gradients of BatchNormalization's moments.
        passed: what it gave to Keras's own step, in each call of it.
    """

    calls: list[Call]
    assigned: dict[str, tuple[np.ndarray, np.ndarray]]
    logs: dict[str, np.ndarray]
    moments: dict[str, list[np.ndarray]]
    passed: list[list[np.ndarray]]


class Trial(NamedTuple):
    """Examples that a step runs on, together and as two shards.

    Attributes:
        examples: a batch, as the step gets it.
        sizes: the number of examples of each shard. They must differ, for a mean to differ from a mean of means.
    """

    examples: Any
    sizes: tuple[int, int]


class Findings(NamedTuple):
    """What the probe found.

    Attributes:
        plan: how the step's results combine over replicas.
        optimizers: that the step calls, in the order of their first calls.
        warnings: what cannot be the same on several replicas, and what to do.
        trial: what the step ran on, if it was measured.
        gradient_kinds: for each call of an optimizer, its name and what its gradients are over the examples.
    """

    plan: StepPlan
    optimizers: list[keras.Optimizer]
    warnings: list[str]
    trial: Trial | None = None
    gradient_kinds: tuple[tuple[str, str], ...] = ()


def probe_step(
    model: Any, name: str, step: Callable, batch: Any, custom_step: str | None, needs_optimizers: bool = False
) -> Findings:
    """Finds how a custom step's results combine, and builds what the step would build first.

    Args:
        model: of `data_parallel`.
        name: of the step, "train_step" or "test_step".
        step: what runs.
        batch: some examples, as the step gets them.
        custom_step: "mean" or "sum" where the user has decided; the step then runs once, if something is to be built.
        needs_optimizers: whether it then runs in any case, to find which optimizers it calls.

    Raises:
        UserError: when the step runs on the batch, but not on a few of its examples, or returns what is no number.
    """
    examples = unlike_examples(batch)
    trial = Trial(examples, SHARDS)
    where = f"{type(model).__name__}.{name}"
    build_by_running(model, step, examples)
    if custom_step is not None:
        runs = needs_optimizers or not all(optimizer.built for optimizer in all_optimizers())
        calls = _calls_of(model, step, examples, where) if runs else []
        return Findings(StepPlan(otherwise=custom_step), _called(calls), [])
    replicas = model.distribute_strategy.extended._num_replicas_in_sync
    try:
        records = _run_on_shards(model, step, trial, where)
        if rows_of(batch) < sum(SHARDS):  # `examples` repeats some, and a replica gets fewer
            _run(model, step, slice_of(without_optionals(batch), 0, -(-rows_of(batch) // replicas)), where)
    except UserError:
        raise
    except Exception as error:
        _refuse_constant_batch_size(model, step, batch, where)
        text = " ".join(str(error).split())[:200]
        warning = f"it could not be run on a few examples ({type(error).__name__}: {text})"
        return Findings(StepPlan(), _called(_calls_of(model, step, batch, where)), [warning])
    _build_optimizers(model, records[0].calls)
    found = _findings(model, where, trial, *records)
    if _has_zeros(model, found.plan) and rows_of(batch) > sum(SHARDS):
        found = probe_again(model, name, step, _of_whole_batch(batch)) or found
    is_all_zero = all(kind == "either" for kind in found.plan.logs.values())  # not what the user has multiplied by 0
    if "either" in found.plan.gradients and is_all_zero:
        found.warnings.append(
            "gradients are 0 on the first batch, which does not tell whether they are a mean or a sum over examples; "
            "their mean is taken"
        )
    return found


def probe_again(model: Any, name: str, step: Callable, trial: Trial) -> Findings | None:
    """Runs a built step once more: it may do other things later than in its first run.

    Args:
        model, name, step: as of `probe_step`.
        trial: what it runs on.

    Returns:
        What was found; None if the step fails, which will then say itself what is wrong.
    """
    where = f"{type(model).__name__}.{name}"
    try:
        return _findings(model, where, trial, *_run_on_shards(model, step, trial, where))
    except Exception:
        return None


def changes_since(before: StepPlan, found: StepPlan) -> list[str]:
    """Warnings of gradients and numbers that are combined in another way than the probe finds now.

    Args:
        before: the plan by which the step runs.
        found: what the probe finds now.
    """
    messages = []
    for number, (old, now) in enumerate(zip(before.gradients, found.gradients, strict=False), start=1):
        if now in ("mean", "sum") and (old == "sum") != (now == "sum"):
            used = "sum" if old == "sum" else "mean"
            messages.append(
                f"the gradients of call {number} of an optimizer are a {now} over examples now, but combined as a "
                f"{used}, as measured when training began"
            )
    for name, old in before.logs.items():
        if old == "either" and found.logs.get(name) == "sum":
            messages.append(f"{name!r} is a sum over examples, but averaged over replicas, as it was 0 at first")
    return messages


def _has_zeros(model: Any, plan: StepPlan) -> bool:
    """Whether gradients, or a returned number that is no metric's result, may be a mean or a sum."""
    metrics = {metric.name for metric in model.metrics}
    return "either" in plan.gradients or "either" in {kind for name, kind in plan.logs.items() if name not in metrics}


def _of_whole_batch(batch: Any) -> Trial:
    return Trial(without_optionals(batch), sizes_of_shards(rows_of(batch)))


def _run_on_shards(model: Any, step: Callable, trial: Trial, where: str) -> list[Record]:
    """Runs a step on all examples, and on the two shards of them."""
    examples, (first, second) = trial
    shards = (slice_of(examples, 0, first), slice_of(examples, first, first + second))
    return [_run(model, step, each, where) for each in (examples, *shards)]


def _findings(model: Any, where: str, trial: Trial, whole: Record, first: Record, second: Record) -> Findings:
    tolerance = max(tolerance_of(model), FLOAT32)
    warnings: list[str] = []
    gradients: list[str] = []
    gradient_kinds: list[tuple[str, str]] = []
    for number, call in enumerate(whole.calls):
        others = [record.calls[number].gradients if number < len(record.calls) else [] for record in (first, second)]
        if any(len(each) != len(call.gradients) for each in others):
            warnings.append(f"it does not call the optimizer {call.optimizer.name} for all numbers of examples alike")
            gradients.append("mean")
            gradient_kinds.append((call.optimizer.name, "neither"))
            continue
        found = combination_of(call.gradients, others, trial.sizes, tolerance)
        if found.kind == "neither":
            warnings.append(
                f"gradients that the optimizer {call.optimizer.name} gets of a batch are neither the mean nor the sum "
                f"of those of its shards (they differ by {found.difference:.1g}); their mean is taken"
            )
        gradients.append("mean" if found.kind == "neither" or not call.gradients else found.kind)
        gradient_kinds.append((call.optimizer.name, found.kind))
    assignments: dict[str, str] = {}
    for name, (before, after) in whole.assigned.items():
        if name in first.assigned and name in second.assigned:
            added = [[each.assigned[name][1] - each.assigned[name][0]] for each in (first, second)]
            rounding = tolerance + tolerance * ROUNDING * _relative_size(after, after - before)
            assignments[name] = combination_of([after - before], added, trial.sizes, rounding).kind
        else:
            assignments[name] = "neither"
    logs: dict[str, str] = {}
    for name, value in whole.logs.items():
        if name in first.logs and name in second.logs:
            shards = [[first.logs[name]], [second.logs[name]]]
            logs[name] = combination_of([value], shards, trial.sizes, tolerance).kind
        else:
            logs[name] = "neither"
    moments: dict[str, str] = {}
    for name, arrays in whole.moments.items():
        of_shards = [record.moments.get(name, []) for record in (first, second)]
        if all(len(each) == len(arrays) for each in of_shards):
            moments[name] = combination_of(arrays, of_shards, trial.sizes, tolerance).kind
    if _passes_other_examples(tolerance, whole, first, second):
        warnings.append("what it gives to Keras's own step for an example depends on the other examples of the batch")
    plan = StepPlan(tuple(gradients), assignments, logs, moments, was_measured=True)
    return Findings(plan, _called(whole.calls), list(dict.fromkeys(warnings)), trial, tuple(gradient_kinds))


def _passes_other_examples(tolerance: float, whole: Record, *shards: Record) -> bool:
    """Whether Keras's own step gets other rows for an example of the whole than for the same example of a shard."""
    expected = [array for call in whole.passed for array in call]
    found = [[array for call in shard.passed for array in call] for shard in shards]
    for rows, *parts in zip(expected, *found, strict=False):
        together = np.concatenate(parts) if rows.ndim else rows
        if together.shape == rows.shape and relative_difference([rows], [together]) > tolerance:
            return True
    return False


def _relative_size(value: np.ndarray, change: np.ndarray) -> float:
    """How much larger a variable is than what was added to it: the addition is rounded to a part of the variable."""
    largest = float(np.max(np.abs(change), initial=0.0))
    return float(np.max(np.abs(value), initial=0.0)) / largest if largest else 0.0


def _called(calls: list[Call]) -> list[keras.Optimizer]:
    return list({id(call.optimizer): call.optimizer for call in calls}.values())


def _run(model: Any, step: Callable, examples: Any, where: str) -> Record:
    """Runs a step eagerly, as on one replica, and undoes what it did."""
    calls: list[Call] = []

    def note(optimizer, gradients, variables):
        dense = [np.asarray(tf.convert_to_tensor(each)) for each in gradients if each is not None]
        calls.append(Call(optimizer, variables, dense))

    variables = variables_of_tensorflow(model)
    with undone(model) as scope, as_one_replica(model), calls_replaceable(all_optimizers()):
        before = {name: tf.identity(variable._get()) for name, variable in variables.items()}
        try:
            with assigned_locally(variables.values()), fixed_moments(scope.note_moments), scope, applied_by(note):
                logs = numbers_of(step(examples), where)
        finally:
            for name, variable in variables.items():
                scope.assigned[name] = (as_numbers(before[name]), as_numbers(variable._get()))
                variable._get().assign(before[name])
    make_new_variables(model)
    numbers = {name: np.asarray(value) for name, value in logs.items()}
    return Record(calls, scope.assigned, numbers, scope.moments, scope.passed)


# Building.


def build_by_running(model: Any, step: Callable, examples: Any) -> None:
    """Builds layers that only the step builds, by running it until no more are built.

    The runs fail where the step needs a gradient by a variable that has just been made; the next run comes further.
    """
    for _ in range(BUILD_ATTEMPTS):
        waiting = _count_unbuilt(model)
        if not waiting:
            return
        scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
        with (
            contextlib.suppress(Exception),
            as_one_replica(model),
            calls_replaceable(all_optimizers()),
            scope,
            applied_by(lambda *_: None),
        ):
            step(examples)
        make_new_variables(model)
        if _count_unbuilt(model) >= waiting:
            return


def _count_unbuilt(model: Any) -> int:
    parts = list(model._flatten_layers(include_self=False))
    parts += [each for each in (model._compile_metrics, model._compile_loss) if each is not None]
    return sum(not part.built for part in parts)


def _calls_of(model: Any, step: Callable, examples: Any, where: str) -> list[Call]:
    """The calls of optimizers in a run of the step, each built; none if the step fails.

    Raises:
        UserError: when an optimizer was made outside of the strategy's scope.
    """
    try:
        calls = _run(model, step, examples, where).calls
    except Exception:
        return []
    _build_optimizers(model, calls)
    return calls


def _build_optimizers(model: Any, calls: list[Call]) -> None:
    with model.distribute_strategy.scope():
        for call in calls:
            refuse_made_outside_scope(call.optimizer)
            if not call.optimizer.built:
                call.optimizer.build(call.variables)


def _refuse_constant_batch_size(model: Any, step: Callable, batch: Any, where: str) -> None:
    """Raises a `UserError` if the step runs on a whole batch, but not on a few of its examples."""
    try:
        _run(model, step, without_optionals(batch), where)
    except Exception:  # the step itself is wrong, or cannot run eagerly
        return
    raise constant_batch_size(where, rows_of(batch))
