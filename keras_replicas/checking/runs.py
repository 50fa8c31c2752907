# SPDX-License-Identifier: Apache-2.0
"""The runs of a check: the model on replicas, and the plain one on one device, several times.

1. Plain Keras trains the plain model on one device, in float64 if it can.
2. The model trains on replicas, from the same start on the same batches.
3. Plain Keras trains again, with the examples of each batch in other orders: what that changes is rounding.
4. What differs by more than that is found by `comparison.py`.
"""

import contextlib
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.checking.comparison import (
    ROUNDING,
    Key,
    Verdict,
    compare,
    distances,
    is_finite,
    largest_distances,
    norm_of,
)
from keras_replicas.checking.examples import Batch, Examples, examples_of, reordered
from keras_replicas.checking.repeatable import (
    Observed,
    default_dtype,
    fixed_draws,
    replica_reads_observed,
    variable_scope_kept,
)
from keras_replicas.checking.traces import METHODS, GradientSizes, Record, Runner, Trace, plain_optimizer_calls
from keras_replicas.errors import UserError
from keras_replicas.fit_state import optimizers_of
from keras_replicas.model import data_parallel
from keras_replicas.private import layer_names_kept, reset_layer_names
from keras_replicas.trainer import Trainer

LIBRARY = Path(__file__).parent.parent
ORDERS = 3  # in which plain Keras gets the examples of each batch, beside the given one
# By how much plain Keras may differ from itself, relative to the norm. Adam makes large steps of float32's rounding.
STEADY_LIMITS = {"float64": 1e-4, "float32": 0.1}
# A gradient is rounding alone if it is that small, relative to the largest: the sum of numbers that cancel.
CANCELLED = {"float64": 1e-12, "float32": 1e-5}
STATE_KINDS = ("layer state", "optimizer state", "weight")  # some of it is nothing but rounding
# Float64 first, if the model can; full batches only, if it cannot have short ones.
ATTEMPTS = (("float64", True), (None, True), ("float64", False), (None, False))


class Settings(NamedTuple):
    """What is checked.

    Attributes:
        build: makes the model, or a tuple of the model and its data.
        data: (x, y, sample_weight); None where `build` returns them.
        batch_size: of arrays.
        steps: the number of batches.
        seed: of the weights.
        strategy: the replicas.
        made: the models that `build` has made so far.
    """

    build: Callable[[], Any]
    data: tuple | None
    batch_size: int
    steps: int
    seed: int
    strategy: tf.distribute.Strategy
    made: weakref.WeakSet


class Refusal(NamedTuple):
    """Why runs cannot be compared.

    Attributes:
        what: "REFUSED", where this library refuses the model; "FAILED", where training on replicas raised another
            error; or "NOT CHECKED".
        why: the reason, in a line.
    """

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}\nwhy: {self.why}"


class SameModelError(UserError):
    """The function that makes the model does not make a new one."""


class ReplicaRun(NamedTuple):
    """The run on replicas.

    Attributes:
        model: of `data_parallel`; None where it could not be made.
        trace: what it recorded; None where it failed.
        error: with which training, or a method after it, failed; None where nothing did.
        warnings: the library's.
        observed: what the user's code did.
    """

    model: Any
    trace: Trace | None
    error: Exception | None
    warnings: list[str]
    observed: Observed


class PlainRuns:
    """Plain Keras's runs of a model.

    Args:
        model: compiled, of a plain class.
        examples: to train on.
    """

    def __init__(self, model: Any, examples: Examples):
        self.model = model
        self.examples = examples
        self._optimizers: list[Any] = []
        self._sizes = GradientSizes()
        self._runner = Runner(model, examples, self._known_optimizers)

    def first_run(self) -> tuple[Trace, bool]:
        """A run from the values that the model has, and whether it made no variables."""
        with self._calls_of_plain_keras():
            trace = self._runner.run()
        return trace, trace.start.keys() == self.state().keys()

    def run_from(self, start: dict[str, np.ndarray], **options: Any) -> Trace:
        """Runs as `Runner.run_from` does, with its options."""
        with self._calls_of_plain_keras():
            return self._runner.run_from(start, **options)

    def state(self) -> dict[str, np.ndarray]:
        """The values of all variables, by name."""
        return self._runner.state()

    def weights_with_cancelled_gradients(self) -> set[str]:
        """The names of the weights whose gradient is rounding alone: the sum of numbers that cancel."""
        names = {id(each.variable): each.name for each in self._runner.variables()}
        found = set()
        for variable, size in self._sizes.relative():
            if id(variable) in names and size <= CANCELLED.get(variable.dtype, 0.0):
                found.add(names[id(variable)])
        return found

    def dtype(self) -> str:
        """The coarser of the dtypes in which the model computes."""
        dtypes = {layer.compute_dtype for layer in self.model._flatten_layers()} | {keras.config.floatx()}
        return "float64" if dtypes == {"float64"} else "float32"

    @contextlib.contextmanager
    def _calls_of_plain_keras(self) -> Iterator[None]:
        with fixed_draws(Observed()), plain_optimizer_calls(self._sizes, self._optimizers):
            yield

    def _known_optimizers(self) -> list[Any]:
        optimizers = [self.model.optimizer, *self._optimizers]
        return list({id(each): each for each in optimizers if each is not None}.values())


class Runs(NamedTuple):
    """What was run, and what came out.

    Attributes:
        plain: plain Keras's runs.
        on_replicas: the run on replicas.
        strategy: the replicas'.
        floatx: Keras's, while the models were built and trained; None for the user's setting.
        failed_methods: of plain Keras, by name, with the error: they are not compared.
        left_out: the weights that are not compared, as their gradient is rounding alone.
        outcome: the verdict, or why there is none.
    """

    plain: PlainRuns
    on_replicas: ReplicaRun
    strategy: tf.distribute.Strategy
    floatx: str | None
    failed_methods: dict[str, Exception]
    left_out: set[str]
    outcome: Verdict | Refusal


def compared_runs(settings: Settings) -> Runs:
    """Trains a model on replicas and in plain Keras, and compares what they record.

    Raises:
        UserError: when there is nothing that can be compared.
        Exception: what plain Keras raises.
    """
    error: Exception | None = None
    for floatx, with_short_batches in ATTEMPTS:
        with (
            default_dtype(floatx),
            variable_scope_kept(),
            layer_names_kept(),
            warnings.catch_warnings(action="ignore"),
        ):
            try:
                made = _plain_model(settings, settings.seed)
                has_short = with_short_batches and not made.divides_batches
                examples = examples_of(made.data, settings.batch_size, settings.steps, has_short)
                plain = PlainRuns(made.model, examples)
                first, is_built = plain.first_run()
            except UserError:
                raise
            except Exception as failure:
                error = failure
                continue
            start = first.start if is_built else _start_of_built(first, plain.state())
            on_replicas = _run_on_replicas(settings, examples, start, METHODS - first.failed_methods.keys())
            if floatx is not None and _may_come_of_dtype(on_replicas.error):
                continue
            base = first if is_built else plain.run_from(start)
            outcome = _outcome(settings, plain, base, on_replicas)
            left_out = plain.weights_with_cancelled_gradients()
            return Runs(plain, on_replicas, settings.strategy, floatx, first.failed_methods, left_out, outcome)
    assert error is not None
    raise error


def _start_of_built(first: Trace, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Values for all variables, of which the first run has made some: those that it has ended with.

    Where something was not finite, it is begun again: with zeros for what it has made, but for the learning rate.
    """
    values = [*state.values(), *(record.value for record in first.records)]
    if all(map(is_finite, values)):
        return state
    return {
        name: first.start.get(name, value if name.endswith("/learning_rate") else np.zeros_like(value))
        for name, value in state.items()
    }


def _may_come_of_dtype(error: Exception | None) -> bool:
    """Whether an error on replicas may come of the dtype: any but this library's sentences."""
    return error is not None and not isinstance(error, UserError)


def _outcome(settings: Settings, plain: PlainRuns, base: Trace, on_replicas: ReplicaRun) -> Verdict | Refusal:
    """Compares the run on replicas with plain Keras's from the same start."""
    if on_replicas.trace is None or on_replicas.error is not None:
        what = "REFUSED" if isinstance(on_replicas.error, UserError) else "FAILED"
        return Refusal(what, line_of(on_replicas.error))
    rounding = _rounding(settings, plain, base)
    steady = _steady_part(base, rounding, plain.dtype())
    if not any(record.kind not in STATE_KINDS for record in steady.records):
        return Refusal("NOT CHECKED", _why_not_steady(base.records[0]))
    return compare(steady, on_replicas.trace, rounding, plain.weights_with_cancelled_gradients())


def _why_not_steady(record: Record) -> str:
    if not is_finite(record.value):
        return f"plain Keras's own {record} is not finite"
    return (
        f"plain Keras's own {record} differs from run to run: something has a state that is none of the model's, such "
        "as a loss, a Python object or a random generator of NumPy"
    )


def _rounding(settings: Settings, plain: PlainRuns, base: Trace) -> dict[Key, float]:
    """For each record, by how much plain Keras differs from itself with the examples in other orders.

    What depends on the order by more than rounding, such as a queue, is compared with a model built with another seed:
    it may still be the same in every run.
    """
    orders = [_random_order(settings.seed + number) for number in range(ORDERS)]
    rounding = largest_distances(base, [plain.run_from(base.start, reorder=order) for order in orders])
    irreproducible = _irreproducible_records(base, rounding, plain.dtype())
    if irreproducible:
        other = _plain_model(settings, settings.seed + 1).model
        of_other_seed = distances(base, PlainRuns(other, plain.examples).run_from(base.start))
        rounding |= {record.key: of_other_seed[record.key] for record in irreproducible}
    return rounding


def _random_order(seed: int) -> Callable[[Batch], Batch]:
    random = np.random.default_rng(seed)
    return lambda batch: reordered(batch, random)


def _irreproducible_records(base: Trace, rounding: dict[Key, float], dtype: str) -> list[Record]:
    """The records, but of state, in which plain Keras's runs differ by more than rounding, or are not finite."""
    found = []
    for record in base.records:
        is_close = rounding[record.key] <= STEADY_LIMITS[dtype] * norm_of(record.value) + ROUNDING
        if record.kind not in STATE_KINDS and not (is_close and is_finite(record.value)):
            found.append(record)
    return found


def _steady_part(base: Trace, rounding: dict[Key, float], dtype: str) -> Trace:
    """The records before the first step that plain Keras does not reproduce."""
    irreproducible = _irreproducible_records(base, rounding, dtype)
    if not irreproducible:
        return base
    first = irreproducible[0]
    if first.kind != "training":  # of evaluate or predict, after all steps
        left_out = {record.key for record in irreproducible}
        return base._replace(records=[record for record in base.records if record.key not in left_out])
    return base._replace(records=[record for record in base.records if record.step < first.step])


def line_of(error: Exception | None) -> str:
    """An error in one line: its sentence alone, if it is this library's."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error  # whose str is a repr
    text = re.sub(r"\x1b\[\d*m", "", " ".join(str(message).split()))[:400]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


# Models.


class PlainModel(NamedTuple):
    """A model with Keras's own trainer.

    Attributes:
        model: compiled.
        data: (x, y, sample_weight), as for `fit`.
        divides_batches: whether on replicas it computes a batch in several equal parts, by `accumulate`.
    """

    model: Any
    data: tuple
    divides_batches: bool


def _plain_model(settings: Settings, seed: int) -> PlainModel:
    """Makes a model with Keras's own trainer, and its data.

    Raises:
        UserError: when the function does not return a compiled model that can be checked.
    """
    model, data = _model_and_data(settings, seed)
    if {layer.compute_dtype for layer in model._flatten_layers()} & {"float16", "bfloat16"}:
        raise UserError("float16 and bfloat16 are too coarse to compare: build the model in float32 for check")
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise UserError("the function that makes the model must not use a strategy: check makes its own")
    divides_batches = getattr(model, "accumulate", 1) > 1
    model.__class__ = getattr(type(model), "plain_class", type(model))
    for layer in model._flatten_layers():
        vars(layer).pop("_moments", None)  # of this library
    return PlainModel(model, data, divides_batches)


def _model_and_data(settings: Settings, seed: int) -> tuple[Any, tuple]:
    keras.utils.set_random_seed(seed)
    reset_layer_names()  # so that layers have the same names in each model
    made = settings.build()
    model, *data = made if isinstance(made, tuple) else (made,)
    if isinstance(model, keras.Model) and not model.compiled:
        raise UserError("the model is not compiled: call its compile in the function that makes it")
    if not isinstance(model, keras.Model) or len(data) > 3:
        returned = ", ".join(type(each).__name__ for each in (model, *data))
        raise UserError(
            f"the function must return a compiled model, or (model, x, y[, sample_weight]), not ({returned})"
        )
    if model in settings.made:
        raise SameModelError("the function must make a new model each time: it returned the same one again")
    settings.made.add(model)
    model.steps_per_execution = 1
    return model, tuple(data) if settings.data is None else settings.data


def _run_on_replicas(
    settings: Settings, examples: Examples, start: dict[str, np.ndarray], methods: Iterable[str]
) -> ReplicaRun:
    """Trains the model on replicas, from the given start."""
    observed = Observed()
    model = None
    trace = None
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            with settings.strategy.scope():
                model, _ = _model_and_data(settings, settings.seed)
                if not isinstance(model, Trainer):
                    data_parallel(model)
            runner = Runner(model, examples, lambda: optimizers_of(model))
            with fixed_draws(observed), replica_reads_observed(observed):
                trace = runner.run_from(start, methods=methods)
            error = next(iter(trace.failed_methods.values()), None)
        except SameModelError:
            raise
        except Exception as raised:
            error = raised
    messages = [str(each.message) for each in caught if Path(each.filename).is_relative_to(LIBRARY)]
    return ReplicaRun(model, trace, error, messages, observed)
