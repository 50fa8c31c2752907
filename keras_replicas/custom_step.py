# SPDX-License-Identifier: Apache-2.0
"""A `train_step` or `test_step` of the user's own on one of several replicas.

The step is written for one device, and runs as it is written, on this replica's examples. What surrounds it:

- It sees one replica: nothing is to be divided by the number of replicas, by Keras's losses neither.
- Gradients that it gives to an optimizer are reduced over replicas first: the optimizer gets the global batch's.
- What it assigns is combined over replicas, or the same everywhere, or refused.
- Metrics count each replica's examples; a metric that is read has what all replicas have counted.
- Its random draws are a function of seed, step and replica.
- A replica without examples computes another replica's, of which nothing counts.
- The numbers that it returns are combined over replicas.

How gradients and numbers combine, as a mean or as a sum, says a `StepPlan`, which `step_probe.py` measures.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_replicas.division import count_rows, slice_rows
from keras_replicas.draws import drawn_by
from keras_replicas.empty import (
    count_examples,
    current_graph,
    examples_known,
    others_example,
    with_example,
    without_added_example,
    zeros_without_examples,
)
from keras_replicas.errors import UserError
from keras_replicas.gradients import times
from keras_replicas.noise import DRAWS_OF_TENSORFLOW, noise_seeds, seed_of_draws, use_global_seed
from keras_replicas.optimizer_calls import applied_by
from keras_replicas.optimizers import apply_summed
from keras_replicas.origins import EXAMPLES, Origins, assigned_values, compares_with_batch
from keras_replicas.private import no_stateless_scope
from keras_replicas.replicas import (
    gather_over_replicas,
    is_first_replica,
    is_shared,
    local_value,
    one_replica_seen,
    reduce_gradients,
    sum_over_replicas,
    waiting_for,
)
from keras_replicas.state import aggregation_needed, assign_copy, assign_state, part_of_state, same_everywhere

MAX_DEPTH = 3  # of objects within an attribute, where `tf.Variable`s are looked for
COMBINE_GRADIENTS = "accumulate by the optimizer's gradient_accumulation_steps=N, and call its apply in every step"


AGGREGATIONS = {tf.VariableAggregation.MEAN: "mean", tf.VariableAggregation.SUM: "sum"}


class StepPlan(NamedTuple):
    """How a custom step's results on shards combine into those on the global batch.

    Each entry is a kind of `combination.Combination`: "mean", "sum", "either" where the probe could not tell, and
    "neither" where no combination is right. What is neither a sum nor refused is averaged.

    Attributes:
        gradients: of the optimizers' calls, in their order in the step.
        assignments: of what variables get, named by `Occurrences`.
        logs: of the numbers that the step returns, by name.
        moments: of the gradients of BatchNormalization's moments, named by `Occurrences`.
        otherwise: of gradients and numbers that are not listed.
        was_measured: whether a probe made this plan.
    """

    gradients: tuple[str, ...] = ()
    assignments: dict[str, str] = {}
    logs: dict[str, str] = {}
    moments: dict[str, str] = {}
    otherwise: str = "mean"
    was_measured: bool = False


class _Thread(threading.local):
    """The custom step that this thread runs."""

    running: Any = None


_thread = _Thread()


def running() -> Any:
    """The `CustomStep` that this thread runs; None if it runs none."""
    return _thread.running


class Occurrences:
    """Names what a step does to a variable or a layer: its path, and how often it was done to that path before."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def name_next(self, path: str) -> str:
        """The name of the next one."""
        count = self._counts.get(path, 0)
        self._counts[path] = count + 1
        return f"{path} #{count}" if count else path


class CustomStep(keras.StatelessScope):
    """One replica's run of a custom step: the Keras scope that its reads and assignments go through.

    Args:
        model: of `data_parallel`.
        name: of the step, "train_step" or "test_step".
        plan: how results combine.
        data: this replica's examples, or another replica's example if there are none.
        examples: the number of this replica's examples, a float.
        total: that of all replicas.
        may_be_empty: whether a replica may have none.
    """

    def __init__(self, model, name: str, plan: StepPlan, data, examples, total, may_be_empty: bool):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.model, self.name, self.plan = model, name, plan
        self.examples, self.total = examples, total
        self.share = tf.cast(examples, tf.float64) / tf.cast(total, tf.float64)
        self.has_examples = examples > 0 if may_be_empty else None
        self.warnings: list[str] = []
        self.is_scalar_update = False
        self.graph = current_graph()
        leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
        self._rows = leaves[0].shape[0] if leaves[0].shape.rank else None
        self._origins = Origins(leaves) if self.graph is not None else None
        if self._origins is not None:
            self._origins.follow_variables(each._get().handle for each in variables_of_tensorflow(model).values())
        self._assignments = Occurrences()
        self._moments = Occurrences()
        self._same_everywhere = same_everywhere(model)
        self._calls = 0
        self._totals: dict[int, tf.Tensor] = {}  # of variables that are sums over replicas, what the step has read

    # What surrounds the step.

    @contextlib.contextmanager
    def surrounding(self, number: tf.Tensor) -> Iterator[None]:
        """Context in which the step runs; `number` is another one for each step."""
        before, _thread.running = _thread.running, self
        draw = functools.partial(self._draw, number, itertools.count(DRAWS_OF_TENSORFLOW))
        try:
            with (
                examples_known(self.has_examples),
                one_replica_seen(),
                self,
                applied_by(self.apply_gradients),
                drawn_by(draw),
            ):
                yield
        finally:
            _thread.running = before

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context, within the step, in which Keras and this library see all replicas again."""
        before, _thread.running = _thread.running, None
        try:
            with (
                examples_known(None),
                one_replica_seen(False),
                no_stateless_scope(),
                applied_by(None),
                drawn_by(None),
            ):
                yield
        finally:
            _thread.running = before

    def _draw(self, number, numbers_of_draws, stateless, shape, seed, **options):
        is_shared = not self._is_drawn_for_examples(shape)
        drawn = seed_of_draws(self.model, number, next(numbers_of_draws), seed, is_shared)
        return stateless(shape=shape, seed=drawn, **options)

    def _is_drawn_for_examples(self, shape) -> bool:
        """Whether random numbers of this shape are drawn for the examples of a shard: it has as many rows.

        Others, as noise for a weight, are the same on all replicas, as on one device: their mean over replicas would be
        smaller.
        """
        sizes = tf.get_static_value(shape)
        if sizes is None:
            return True
        return len(sizes) > 0 and (self.graph is None or sizes[0] == self._rows)

    # Gradients.

    def apply_gradients(self, optimizer, gradients: list, variables: list) -> None:
        """Updates variables by the gradients of the global batch, in place of the optimizer's `apply`."""
        if not gradients:
            return
        self._refuse_nested(f"calls {optimizer.name}.apply", f"; to update every N steps, {COMBINE_GRADIENTS}")
        kind = self._kind_of_call(optimizer)
        given = {index: each for index, each in enumerate(gradients) if each is not None}
        if self.has_examples is not None:
            given = zeros_without_examples(self.examples, given)
        if kind != "sum":
            given = {
                index: each if variables[index].overwrite_with_gradient else times(each, self.share)
                for index, each in given.items()
            }
        with self.suspended():
            total = reduce_gradients(given, variables)
            apply_summed(optimizer, [total.get(index) for index in range(len(variables))], variables)

    def _kind_of_call(self, optimizer) -> str:
        """How the gradients of the next call of an optimizer combine."""
        number, self._calls = self._calls, self._calls + 1
        kinds = self.plan.gradients
        plans = self.model.step_plans
        plans.note_optimizer(optimizer)
        if self.plan.was_measured and not plans.is_measured(optimizer):
            self.warnings.append(
                f"it calls the optimizer {optimizer.name}, but did not when it was measured; the mean of its gradients "
                "is taken"
            )
            return self.plan.otherwise
        return kinds[number] if number < len(kinds) else self.plan.otherwise

    def weight_of_moments(self, path: str) -> Callable[[str], tf.Tensor | None]:
        """The weight of gradients of a layer's moments, as in `batchnorm.moments_of_global_batch`."""
        forward, backward = self._moments.name_next(path), Occurrences()

        def weight(order):
            kind = self.plan.moments.get(backward.name_next(f"{forward} {order}"), self.plan.otherwise)
            return None if kind == "sum" else self.share

        return weight

    # Variables.

    @tf.autograph.experimental.do_not_convert
    def get_current_value(self, variable):
        """The variable's value: of a metric's, the sum over replicas; of any other, as without this scope."""
        if id(variable) in self.state_mapping:
            return self.state_mapping[id(variable)]
        return self._total(variable) if is_summed_on_read(variable) else variable._value

    @tf.autograph.experimental.do_not_convert
    def add_update(self, update):
        """Assigns a variable what it gets on all replicas."""
        variable, value = update
        if id(variable) in self.state_mapping:
            self.state_mapping[id(variable)] = value
        elif variable._value is None:
            super().add_update(update)
        elif variable.name == "seed_generator_state":
            local_value(variable).assign(value)
        else:
            name = self._assignments.name_next(variable.path)
            if is_summed_on_read(variable):
                self._add_to_metric(variable, value, name)
            else:
                self._assign(variable, value, name)

    def _assign(self, variable, value, name):
        copy = local_value(variable)
        is_learning_rate = variable.name == "learning_rate"  # of which Keras declares the aggregation, not the user
        declared = "none" if is_learning_rate else variable.aggregation
        kind = self.plan.assignments.get(name)
        is_same = declared == "none" and not self.differs(value) and not self._counts_rows(value, kind)
        if id(variable) in self._same_everywhere or is_same:
            copy.assign(value)
            return
        self._refuse_nested(f"assigns {variable.path} from one replica's examples")
        if is_learning_rate:
            aggregation = "mean"
            self.warnings.append(f"it sets {variable.path} from a shard's examples; the mean over replicas is taken")
        else:
            aggregation = self._aggregation(variable, value, name) if declared == "none" else declared
        old = tf.convert_to_tensor(copy)
        part = part_of_state(aggregation, self._selected(value, old), old, self.examples, is_first_replica())
        assign_state(aggregation, variable, sum_over_replicas(part), self.total)

    def combine_variables_of_tensorflow(self, before: dict[str, tf.Tensor]) -> None:
        """Combines what the step has assigned to each `tf.Variable`, which is not told when it is assigned.

        Args:
            before: the values before the step, by the names of `variables_of_tensorflow`.
        """
        for name, variable in variables_of_tensorflow(self.model).items():
            copy, old = variable._get(), before[name]
            new = tf.convert_to_tensor(copy)
            if not self._is_assigned(copy, old, new):
                continue
            declared = AGGREGATIONS.get(copy.aggregation)  # not the variable's, see `assigned_locally`
            kind = declared or self.plan.assignments.get(name)
            if kind not in ("mean", "sum", "either"):
                raise self.refused(
                    f"{self.where} assigns {name} from one replica's examples, and replicas do not know how to combine "
                    "it: make it with tf.Variable(..., aggregation=tf.VariableAggregation.MEAN), or SUM for a counter"
                )
            if kind == "either" and declared is None:
                self.warnings.append(
                    f"what {name} gets of the examples could not be measured; it becomes the mean over replicas"
                )
            aggregation = "sum" if kind == "sum" else "mean"
            part = part_of_state(aggregation, self._selected(new, old), old, self.examples, is_first_replica())
            copy.assign(old)
            assign_copy(aggregation, copy, sum_over_replicas(part), self.total)

    def _is_assigned(self, copy, old, new) -> bool:
        """Whether replicas may have assigned different values to a variable."""
        if self._origins is None:
            return self.differs(new - old if new.dtype.is_floating else new)
        return any(self._origins.of(value) for value in assigned_values(self.graph, copy.handle))

    def _aggregation(self, variable, value, name) -> str:
        """How a variable that says nothing combines: as measured.

        Raises:
            UserError: when no combination is right, or nothing was measured.
        """
        kind = self.plan.assignments.get(name)
        depends_on_examples = kind == "sum" or self._origins is None or EXAMPLES in self._origins.of(value)
        if kind in ("mean", "sum") and depends_on_examples:
            return kind
        if kind == "either" and depends_on_examples:
            self.warnings.append(
                f"{variable.path} depends on the examples in a way that could not be measured; it becomes the mean "
                "over replicas: say so by add_weight(..., aggregation='mean')"
            )
            return "mean"
        raise self.refused(aggregation_needed(_name_in(self.model, variable)))

    def _add_to_metric(self, variable, value, name):
        copy, before = local_value(variable), self._total(variable)
        if self._is_reset(value, before):
            keeps = is_first_replica() | is_shared(variable)
            copy.assign(tf.where(keeps, value, tf.zeros_like(value)))
        else:
            added = value - tf.cast(before, value.dtype)
            added = self._selected(added, tf.zeros_like(added))
            kind = self.plan.assignments.get(name, "either")
            is_mean = kind == "mean" or (kind != "sum" and self._is_mean(added))
            if kind == "neither":
                how = "averaged" if is_mean else "summed"
                self.warnings.append(f"what {variable.path} gets is no sum over examples, but is {how} over replicas")
            if is_mean:
                added = self._times_share(added)
            if is_shared(variable):
                self._refuse_nested(f"updates {variable.path}")
                copy.assign(before + sum_over_replicas(added))
            else:
                copy.assign_add(added)
        del self._totals[id(variable)]

    def _is_reset(self, value, before) -> bool:
        """Whether a metric gets a value of its own, and none that is added to what it has.

        Eagerly, only zeros that all replicas assign are known to be one.
        """
        if self._origins is not None:
            return not self._origins.of(value, also=[before])
        return not self.differs(value) and not tf.reduce_any(tf.cast(value, tf.bool))

    def _is_mean(self, added) -> bool:
        """Whether what a metric gets, which was not measured, is a mean over examples: of a scalar, as the step is."""
        if not self.is_scalar_update:
            return False
        return self.plan.otherwise == "mean" or not self.differs(added)

    def _times_share(self, added):
        if added.dtype.is_floating:
            return added * tf.cast(self.share, added.dtype)
        return tf.where(is_first_replica(), added, tf.zeros_like(added))

    def _total(self, variable):
        """What all replicas hold of a variable together; for all metrics of the model at once."""
        if id(variable) not in self._totals:
            self._refuse_nested("updates or reads a metric")
            metrics = [each for each in self.model._metric_variables() if is_summed_on_read(each)]
            stale = {id(each): each for each in (*metrics, variable) if id(each) not in self._totals}
            values = [tf.convert_to_tensor(local_value(each)) for each in stale.values()]
            # In the variables' order: their identities are others on another worker.
            for (key, each), value, total in zip(stale.items(), values, sum_over_replicas(values), strict=True):
                self._totals[key] = value if is_shared(each) else total
        return self._totals[id(variable)]

    def differs(self, value) -> bool:
        """Whether a tensor may differ between replicas: where it depends on examples or on random draws.

        Eagerly, the replicas' values are compared, so every replica must call it.
        """
        if self._origins is not None:
            return bool(self._origins.of(value)) if hasattr(value, "graph") else False
        values = gather_over_replicas(tf.convert_to_tensor(value)[None])
        return bool(tf.reduce_any(values != values[:1]))

    def _counts_rows(self, value, kind: str | None) -> bool:
        """Whether what was measured as a sum over examples is a constant here, as a known number of rows is."""
        return kind == "sum" and self._origins is not None and not self._origins.is_reduced(value)

    def _selected(self, value, otherwise):
        """The value; `otherwise` on a replica without examples."""
        return value if self.has_examples is None else tf.where(self.has_examples, value, otherwise)

    def _refuse_nested(self, what: str, advice: str = "") -> None:
        """Refuses what needs the other replicas where operations go to another graph than the step's.

        Raises:
            UserError: in a branch of a `tf.cond`, a loop, or a `tf.function` that the step calls.
        """
        if self.graph is not None and tf.compat.v1.get_default_graph() is not self.graph:
            raise self.refused(
                f"{self.where} {what} inside a tf.cond, a loop or another tf.function, where no replica can wait for "
                f"the others: do it in the step itself{advice}"
            )

    def refused(self, message: str) -> UserError:
        """An error to raise; see `StepLoop.refused`."""
        return self.model.refused(message)

    @property
    def where(self) -> str:
        """The step, for messages."""
        return f"{type(self.model).__name__}.{self.name}"

    def note_comparisons(self) -> None:
        """Warns of a comparison of examples with a statistic of the batch."""
        if self._origins is not None and compares_with_batch(self._origins, self.graph, self._rows):
            self.warnings.append(
                "it compares a mean, sum or extreme over the batch with examples or a threshold, and on a replica that "
                "is one over its shard"
            )

    # What the step returns.

    def combined_logs(self, logs: Any) -> dict[str, tf.Tensor]:
        """The numbers that the step returned, combined over replicas."""
        numbers = numbers_of(logs, self.where)
        kinds = self.plan.logs
        differing = {
            name: value
            for name, value in numbers.items()
            if self.differs(value) or self._counts_rows(value, kinds.get(name))
        }
        parts = {}
        for name, value in differing.items():
            kind = self.plan.logs.get(name, self.plan.otherwise)
            if kind == "neither":
                self.warnings.append(f"it returns {name!r}, of which replicas' values are averaged")
            value = self._selected(value, tf.zeros_like(value))
            parts[name] = value if kind == "sum" else value * tf.cast(self.share, value.dtype)
        return numbers | sum_over_replicas(parts)


def variables_of_tensorflow(model: Any) -> dict[str, Any]:
    """Each `tf.Variable` that an attribute of the model or of a layer holds, within containers and objects, too.

    Those that were made in the strategy's scope; Keras's own variables are none of them.
    """
    found: dict[int, tuple[str, Any]] = {}
    for layer in model._flatten_layers():
        own = {name: value for name, value in vars(layer).items() if not name.startswith("_self_")}
        for attribute in sorted(own, key=lambda name: name.startswith("_")):  # Keras keeps some again, in private ones
            for each in _variables_within(own[attribute], depth=0):
                found.setdefault(id(each), (f"{layer.name}.{attribute}", each))
    names = Occurrences()
    return {names.name_next(name): each for name, each in found.values()}


def _variables_within(value: Any, depth: int) -> Iterator[Any]:
    if _is_variable_of_tensorflow(value):
        yield value
        return
    for part in _parts_of(value) if depth < MAX_DEPTH else ():
        yield from _variables_within(part, depth + 1)


def _parts_of(value: Any) -> Iterable[Any]:
    """What a container holds, or an object of a class of the user's own."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    is_of_library = type(value).__module__.split(".")[0] in (
        "keras",
        "tensorflow",
        "numpy",
        "keras_replicas",
        "builtins",
    )
    if is_of_library or isinstance(value, keras.Layer | keras.Optimizer | keras.metrics.Metric | keras.Variable):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def _is_variable_of_tensorflow(value: Any) -> bool:
    is_variable = isinstance(value, tf.distribute.DistributedValues) and hasattr(value, "assign")
    return is_variable and value.synchronization != tf.VariableSynchronization.ON_READ


@contextlib.contextmanager
def scalars_noted(metrics: Iterable[keras.metrics.Metric]) -> Iterator[None]:
    """Context in which a running `CustomStep` knows whether a metric is given a scalar, without a weight."""
    metrics = [each for each in metrics if "update_state" not in vars(each)]
    for metric in metrics:  # assigned as usual, it would be tracked
        vars(metric)["update_state"] = functools.partial(_update_state, metric)
    try:
        yield
    finally:
        for metric in metrics:
            del vars(metric)["update_state"]


@tf.autograph.experimental.do_not_convert
def _update_state(metric, *positional, **options):
    step, update = running(), functools.partial(type(metric).update_state, metric)
    if step is None or not (positional or options):
        return update(*positional, **options)
    values = (*positional, *options.values())
    shape = tf.TensorShape(getattr(values[0], "shape", ()))
    is_scalar = len(values) == 1 and shape.rank == 0
    before, step.is_scalar_update = step.is_scalar_update, is_scalar
    try:
        return update(*positional, **options)
    finally:
        step.is_scalar_update = before


@contextlib.contextmanager
def assigned_locally(variables: Iterable[Any]) -> Iterator[None]:
    """Context in which replicas assign their own copies of each `tf.Variable`, whatever its aggregation says."""
    before = [(variable, variable._aggregation) for variable in variables]
    for variable, _ in before:
        variable._aggregation = tf.VariableAggregation.NONE
    try:
        yield
    finally:
        for variable, aggregation in before:
            variable._aggregation = aggregation


def is_summed_on_read(variable: keras.Variable) -> bool:
    """Whether it is a metric's: replicas hold parts of it that add up, unless it was made outside the scope."""
    return variable.synchronization == "on_read"


def numbers_of(logs: Any, where: str) -> dict[str, tf.Tensor]:
    """What a step returned, as tensors of floats by name; dicts in it are flattened.

    Raises:
        UserError: when it is no dict, or an entry is no number.
    """
    if not isinstance(logs, dict):
        raise UserError(f"{where} must return a dict of numbers, not {type(logs).__name__}")
    numbers: dict[str, tf.Tensor] = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            numbers |= numbers_of(value, where)
            continue
        try:
            numbers[name] = tf.cast(value, tf.float64 if keras.config.floatx() == "float64" else tf.float32)
        except (TypeError, ValueError, tf.errors.UnimplementedError):
            found = "None" if value is None else f"a {type(value).__name__}"
            raise UserError(f"{where} returns {found} as {name!r}: return a number, or leave it out") from None
    return numbers


def run_custom_step(model: Any, name: str, step: Callable, data: Any, stop: tf.Tensor) -> dict[str, tf.Tensor]:
    """Runs a custom step on this replica's examples: a dict of the numbers that it returns, and `stop`.

    All are the same on every replica.
    """
    training = name == "train_step"
    example = others_example(data, model._rows_known)
    with waiting_for(data):
        examples = count_examples(_inputs(data))
        total, stop = sum_over_replicas((examples, stop))
        filled = with_example(data, example)
        plan = model.step_plans.plan_of(name)
        run = CustomStep(model, name, plan, filled, examples, total, may_be_empty=example is not None)
        counter = model.step_counter
        number = counter.training_step() if training else counter.evaluation_step()
        before = {key: tf.convert_to_tensor(each._get()) for key, each in variables_of_tensorflow(model).items()}
        with _random_draws(model, run, number), run.surrounding(number):
            logs = step(filled)
            run.combine_variables_of_tensorflow(before)
            if training and plan.was_measured:
                run.note_comparisons()
            logs = run.combined_logs(logs)
        if training:
            counter.end_training_step()
        else:
            counter.end_evaluation_step()
    model.step_plans.note_warnings(name, run.warnings)
    return logs | {"stop": stop}


def run_custom_prediction(model: Any, step: Callable, data: Any, has_rows_unknown: bool) -> Any:
    """Runs a custom `predict_step` on this replica's examples, and returns its outputs for them."""
    example = others_example(data, rows_known=False) if has_rows_unknown else None
    examples = count_examples(_inputs(data))
    filled = with_example(data, example)
    total = sum_over_replicas(examples)
    plan = StepPlan()
    run = CustomStep(model, "predict_step", plan, filled, examples, total, may_be_empty=example is not None)
    number = model.step_counter.evaluation_step()
    model.step_counter.end_evaluation_step()
    with _random_draws(model, run, number), run.surrounding(number):
        outputs = step(filled)
    return outputs if example is None else without_added_example(outputs, run.has_examples)


def _name_in(model: Any, variable: keras.Variable) -> str:
    """The variable's path, or the attribute that holds it, where the path tells nothing."""
    if "/" in variable.path:
        return variable.path
    for layer in model._flatten_layers():
        for attribute, value in vars(layer).items():
            if value is variable:
                return f"{layer.name}.{attribute}"
    return variable.path


def _inputs(data: Any) -> Any:
    return data[0] if isinstance(data, tuple) else data


@contextlib.contextmanager
def _random_draws(model, run, number) -> Iterator[None]:
    """Context in which Keras's seeds are those of this step and replica; afterwards they are as before."""
    use_global_seed(model)
    before = []
    for variable, seed in noise_seeds(model, number):
        if is_shared(variable):
            run.state_mapping[id(variable)] = seed
        else:
            copy = local_value(variable)
            before.append((copy, tf.convert_to_tensor(copy)))
            copy.assign(seed)
    yield
    for copy, value in before:
        copy.assign(value)


def without_borrowed_example(step: CustomStep, data: Any) -> Any:
    """The data that a custom step passes on to Keras's own: no rows, if they are another replica's."""
    if step.has_examples is None:
        return data

    def own(leaf):
        rows = count_rows(leaf)
        return slice_rows(leaf, 0, tf.where(step.has_examples, rows, tf.zeros_like(rows)))

    return keras.tree.map_structure(lambda leaf: None if leaf is None else own(leaf), data)
