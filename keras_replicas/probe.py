# SPDX-License-Identifier: Apache-2.0
"""What a custom step does with its examples: found by running it on a few of them.

The step runs eagerly three times, on five examples, on the first three and on the last two. Nothing is applied, and
whatever it assigns is put back. Its optimizers' gradients on all five are then the mean of those on the shards,
weighted by examples, or their sum; so are the numbers that it returns, and what it adds to variables. So that nothing
else differs between the three runs, every example draws the same random numbers, dropout drops nothing, and
BatchNormalization uses its moving averages.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.batches import count_rows, slice_rows
from keras_replicas.batchnorm import fixed_moments
from keras_replicas.combination import combination_of
from keras_replicas.custom_step import (
    Occurrences,
    StepPlan,
    assigned_locally,
    is_summed_on_read,
    numbers_of,
    variables_of_tensorflow,
)
from keras_replicas.draws import draw_for_each_example, drawn_by, draws_replaceable
from keras_replicas.empty import first_input
from keras_replicas.errors import UserError
from keras_replicas.noise import use_global_seed
from keras_replicas.optimizer_calls import all_optimizers, applied_by, calls_replaceable
from keras_replicas.private import strategy_seen
from keras_replicas.replicas import local_value, one_replica_seen
from keras_replicas.state import same_everywhere

SHARDS = (3, 2)  # examples of the two shards, which must differ for a mean to differ from a sum of means
TOLERANCES = {"float64": 1e-8, "float32": 2e-4, "": 3e-2}  # by the coarsest dtype that layers compute in
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
    """

    calls: list[Call]
    assigned: dict[str, tuple[np.ndarray, np.ndarray]]
    logs: dict[str, np.ndarray]
    moments: dict[str, list[np.ndarray]]


class Findings(NamedTuple):
    """What the probe found.

    Attributes:
        plan: how the step's results combine over replicas.
        optimizers: that the step calls, in the order of their first calls.
        warnings: what cannot be the same on several replicas, and what to do.
    """

    plan: StepPlan
    optimizers: list[keras.Optimizer]
    warnings: list[str]


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
    examples = few_examples(batch, sum(SHARDS))
    where = f"{type(model).__name__}.{name}"
    build_by_running(model, step, examples)
    if custom_step is not None:
        runs = needs_optimizers or not all(optimizer.built for optimizer in all_optimizers())
        calls = _calls_of(model, step, examples, where) if runs else []
        return Findings(StepPlan(otherwise=custom_step), _called(calls), [])
    replicas = model.distribute_strategy.extended._num_replicas_in_sync
    try:
        records = _run_on_shards(model, step, examples, where)
        if _count_rows(batch) < sum(SHARDS):  # `examples` repeats some, and a replica gets fewer
            _run(model, step, slice_of(_without_optionals(batch), 0, -(-_count_rows(batch) // replicas)), where)
    except UserError:
        raise
    except Exception as error:
        _refuse_constant_batch_size(model, step, batch, where)
        text = " ".join(str(error).split())[:200]
        warning = f"it could not be run on a few examples ({type(error).__name__}: {text})"
        return Findings(StepPlan(), _called(_calls_of(model, step, batch, where)), [warning])
    _build_optimizers(model, records[0].calls)
    return _findings(model, where, *records)


def probe_again(model: Any, name: str, step: Callable, examples: Any) -> list[str]:
    """What `probe_step` would warn of now: a step may do other things later than in its first run.

    Args:
        model, name, step: as of `probe_step`.
        examples: as `few_examples` gives them.
    """
    where = f"{type(model).__name__}.{name}"
    try:
        return _findings(model, where, *_run_on_shards(model, step, examples, where)).warnings
    except Exception:  # the step itself will say what is wrong
        return []


def _run_on_shards(model: Any, step: Callable, examples: Any, where: str) -> list[Record]:
    """Runs a step on all examples, and on the two shards of them."""
    shards = (slice_of(examples, 0, SHARDS[0]), slice_of(examples, SHARDS[0], sum(SHARDS)))
    return [_run(model, step, each, where) for each in (examples, *shards)]


def _findings(model: Any, where: str, whole: Record, first: Record, second: Record) -> Findings:
    tolerance, warnings, gradients = _tolerance(model), [], []
    for number, call in enumerate(whole.calls):
        others = [record.calls[number].gradients if number < len(record.calls) else [] for record in (first, second)]
        if any(len(each) != len(call.gradients) for each in others):
            warnings.append(f"it does not call the optimizer {call.optimizer.name} for all numbers of examples alike")
            gradients.append("mean")
            continue
        found = combination_of(call.gradients, others, SHARDS, tolerance)
        if found.kind == "neither":
            warnings.append(
                f"gradients that the optimizer {call.optimizer.name} gets of a batch are neither the mean nor the sum "
                f"of those of its shards (they differ by {found.difference:.1g}); their mean is taken"
            )
        gradients.append("sum" if found.kind == "sum" else "mean")
    assignments: dict[str, str] = {}
    for name, (before, after) in whole.assigned.items():
        if name in first.assigned and name in second.assigned:
            added = [[each.assigned[name][1] - each.assigned[name][0]] for each in (first, second)]
            rounding = tolerance + tolerance * ROUNDING * _relative_size(after, after - before)
            assignments[name] = combination_of([after - before], added, SHARDS, rounding).kind
        else:
            assignments[name] = "neither"
    logs: dict[str, str] = {}
    for name, value in whole.logs.items():
        shards = [[record.logs.get(name, np.array(np.nan))] for record in (first, second)]
        logs[name] = combination_of([value], shards, SHARDS, tolerance).kind
    moments: dict[str, str] = {}
    for name, arrays in whole.moments.items():
        of_shards = [record.moments.get(name, []) for record in (first, second)]
        if all(len(each) == len(arrays) for each in of_shards):
            moments[name] = combination_of(arrays, of_shards, SHARDS, tolerance).kind
    plan = StepPlan(tuple(gradients), assignments, logs, moments, was_measured=True)
    return Findings(plan, _called(whole.calls), warnings)


def _relative_size(value: np.ndarray, change: np.ndarray) -> float:
    """How much larger a variable is than what was added to it: the addition is rounded to a part of the variable."""
    largest = float(np.max(np.abs(change), initial=0.0))
    return float(np.max(np.abs(value), initial=0.0)) / largest if largest else 0.0


def _called(calls: list[Call]) -> list[keras.Optimizer]:
    return list({id(call.optimizer): call.optimizer for call in calls}.values())


def _tolerance(model: Any) -> float:
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()} | {keras.config.floatx()}
    coarsest = next((dtype for dtype in ("float32", "float64") if dtype in dtypes), "float64")
    return TOLERANCES[""] if dtypes & {"float16", "bfloat16"} else TOLERANCES[coarsest]


# Examples.


def few_examples(batch: Any, count: int) -> Any:
    """The first examples of a batch, repeated if it has fewer."""

    def few(leaf):
        if leaf is None:
            return None
        rows = int(count_rows(leaf))
        if rows >= count or isinstance(leaf, tf.SparseTensor):
            return slice_rows(leaf, 0, count)
        return tf.concat([leaf] * -(-count // rows), axis=0)[:count]

    return keras.tree.map_structure(few, _without_optionals(batch))


def slice_of(examples: Any, start: int, end: int) -> Any:
    """The examples from `start` to `end`, without it."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else slice_rows(leaf, start, end), examples)


def local_batch(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """The examples of all replicas of this worker, of a batch of a distributed data set."""

    def joined(leaf):
        leaves = [each for each in strategy.experimental_local_results(leaf) if each is not None]
        if not leaves or isinstance(leaves[0], tf.experimental.Optional):
            return None
        if len(leaves) == 1:
            return leaves[0]
        concatenate = tf.sparse.concat if isinstance(leaves[0], tf.SparseTensor) else None
        return concatenate(0, leaves) if concatenate else tf.concat([tf.identity(each) for each in leaves], axis=0)

    return keras.tree.map_structure(joined, batch)


# Running the step without a trace.


class _Recording(keras.StatelessScope):
    """Records what a step assigns; `put_back` undoes it."""

    def __init__(self, model):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.assigned: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.moments: dict[str, list[np.ndarray]] = {}
        self._model, self._before, self._assignments = model, {}, Occurrences()
        self._moments = Occurrences()
        self._same_everywhere = same_everywhere(model)

    def note_moments(self, layer):
        """For a layer that takes moments, a function that records the gradients of its backward passes."""
        forward, backward = self._moments.name_next(layer.path), Occurrences()

        def note(order, gradients):
            if order == "second":  # [examples, ...]
                gradients = [tf.reduce_sum(each, axis=0) for each in gradients]
            self.moments[backward.name_next(f"{forward} {order}")] = [_as_numbers(each) for each in gradients]

        return note

    def get_current_value(self, variable):
        return variable._value

    def add_update(self, update):
        variable, value = update
        if variable._value is None:
            super().add_update(update)
            return
        copy = local_value(variable)
        old = tf.identity(copy)
        self._before.setdefault(id(variable), (copy, old))
        copy.assign(value)
        is_plain = variable.name == "seed_generator_state" or id(variable) in self._same_everywhere
        if not is_plain and (is_summed_on_read(variable) or variable.aggregation == "none"):
            name = self._assignments.name_next(variable.path)
            self.assigned[name] = (_as_numbers(old), _as_numbers(value))
        elif not is_plain:
            self._assignments.name_next(variable.path)

    def put_back(self):
        for copy, old in self._before.values():
            copy.assign(old)


def _as_numbers(tensor) -> np.ndarray:
    return np.asarray(tf.cast(tensor, tf.float64))


def _run(model: Any, step: Callable, examples: Any, where: str) -> Record:
    """Runs a step eagerly, as on one replica, and undoes what it did."""
    calls: list[Call] = []

    def note(optimizer, gradients, variables):
        dense = [np.asarray(tf.convert_to_tensor(each)) for each in gradients if each is not None]
        calls.append(Call(optimizer, variables, dense))

    variables = variables_of_tensorflow(model)
    with _undone(model) as scope, _as_one_replica(model), calls_replaceable(all_optimizers()):
        before = {name: tf.identity(variable._get()) for name, variable in variables.items()}
        try:
            with assigned_locally(variables.values()), fixed_moments(scope.note_moments), scope, applied_by(note):
                logs = numbers_of(step(examples), where)
        finally:
            for name, variable in variables.items():
                scope.assigned[name] = (_as_numbers(before[name]), _as_numbers(variable._get()))
                variable._get().assign(before[name])
    _make_new_variables(model)
    numbers = {name: np.asarray(value) for name, value in logs.items()}
    return Record(calls, scope.assigned, numbers, scope.moments)


@contextlib.contextmanager
def _as_one_replica(model: Any) -> Iterator[None]:
    """Context of a step on the first replica of this worker, without the others, with fixed draws and moments."""
    strategy = model._distribute_strategy
    use_global_seed(model)
    with contextlib.ExitStack() as stack:
        if strategy is not None:
            number = 0
            if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
                resolver = strategy.cluster_resolver
                number = int(getattr(resolver, "task_id", 0) or 0) * len(strategy.extended.worker_devices)
            context = tf.distribute.ReplicaContext(strategy, replica_id_in_sync_group=number)
            stack.enter_context(tf.device(strategy.extended.worker_devices[0]))
            stack.enter_context(strategy_seen(strategy, context))
        stack.enter_context(one_replica_seen())
        stack.enter_context(tf.summary.record_if(False))
        stack.enter_context(draws_replaceable())
        stack.enter_context(drawn_by(draw_for_each_example, draw_for_each_example, without_dropout=True))
        yield


@contextlib.contextmanager
def _undone(model: Any) -> Iterator[_Recording]:
    """Context after which variables, Python attributes and random states are as before."""
    attributes = [(vars(layer), dict(vars(layer))) for layer in model._flatten_layers()]
    containers = [(each, _contents(each)) for _, old in attributes for each in old.values() if _is_container(each)]
    states = random.getstate(), np.random.get_state()
    scope = _Recording(model)
    vars(model)["is_probed"] = True
    try:
        yield scope
    finally:
        scope.put_back()
        random.setstate(states[0])
        np.random.set_state(states[1])
        for current, old in attributes:
            current.clear()
            current.update(old)
        for container, contents in containers:
            _put_back_contents(container, contents)


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | set)


def _contents(container: Any) -> list:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _put_back_contents(container: Any, old: list) -> None:
    """Undoes what was added or removed, if anything was: Keras and TensorFlow track their own kinds of containers."""
    now = _contents(container)
    is_unchanged = len(now) == len(old) and all(_is_same(one, other) for one, other in zip(now, old, strict=True))
    if is_unchanged:
        return
    container.clear()
    if isinstance(container, dict):
        container.update(dict(old))
    elif isinstance(container, list):
        container.extend(old)
    else:
        container.update(old)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(a is b for a, b in zip(one, other, strict=True))
    return one is other


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
            _as_one_replica(model),
            calls_replaceable(all_optimizers()),
            scope,
            applied_by(lambda *_: None),
        ):
            step(examples)
        _make_new_variables(model)
        if _count_unbuilt(model) >= waiting:
            return


def _make_new_variables(model: Any) -> None:
    """Makes the variables of what was built within a stateless scope."""
    with model.distribute_strategy.scope(), keras.StatelessScope():
        pass  # at its end, Keras makes them


def _count_unbuilt(model: Any) -> int:
    parts = list(model._flatten_layers(include_self=False))
    parts += [each for each in (model._compile_metrics, model._compile_loss) if each is not None]
    return sum(not part.built for part in parts)


def _calls_of(model: Any, step: Callable, examples: Any, where: str) -> list[Call]:
    """The calls of optimizers in a run of the step, each built."""
    with contextlib.suppress(Exception):
        calls = _run(model, step, examples, where).calls
        _build_optimizers(model, calls)
        return calls
    return []


def _build_optimizers(model: Any, calls: list[Call]) -> None:
    with model.distribute_strategy.scope():
        for call in calls:
            if not call.optimizer.built:
                call.optimizer.build(call.variables)


def _refuse_constant_batch_size(model: Any, step: Callable, batch: Any, where: str) -> None:
    """Raises a `UserError` if the step runs on a whole batch, but not on a few of its examples."""
    try:
        _run(model, step, _without_optionals(batch), where)
    except Exception:  # the step itself is wrong, or cannot run eagerly
        return
    raise UserError(
        f"{where} runs on the batch of {_count_rows(batch)} rows, but not on a part of it, as a replica gets one: it "
        "takes the batch size from a constant, or the examples are not along the first axis. Take the size from the "
        "data, as by tf.shape(x)[0], or use one replica"
    )


def _count_rows(batch: Any) -> int:
    return int(count_rows(first_input(_without_optionals(batch))))


def _without_optionals(batch: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)
