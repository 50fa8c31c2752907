# SPDX-License-Identifier: Apache-2.0
"""The runs of a check: the model on replicas, and the plain one on one device, several times."""

import contextlib
import re
import warnings
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
    largest_distances,
    norm_of,
)
from keras_replicas.checking.examples import Batch, Examples, examples_of, shuffled
from keras_replicas.checking.repeatable import (
    Observed,
    default_dtype,
    fixed_draws,
    replica_reads_observed,
    variable_scope_kept,
)
from keras_replicas.checking.traces import (
    METHODS,
    GradientSizes,
    Record,
    Runner,
    Trace,
    names_of_variables,
    plain_optimizer_calls,
)
from keras_replicas.errors import UserError
from keras_replicas.model import data_parallel
from keras_replicas.private import layer_names_kept, reset_layer_names
from keras_replicas.trainer import Trainer

LIBRARY = Path(__file__).parent.parent
ORDERS = 3  # in which plain Keras gets the examples of each batch, beside the given one
# By how much plain Keras may differ from itself, relative to the norm. Adam makes large steps of float32's rounding.
STEADY_LIMITS = {"float64": 1e-4, None: 0.1}
# A gradient is rounding alone if it is that small, relative to the largest: the sum of numbers that cancel.
CANCELLED = {"float64": 1e-12, "float32": 1e-5}
STATE = ("layer state", "optimizer state", "weight")  # some of it is nothing but rounding
# Float64 first, if the model can; full batches only, if it cannot have short ones.
ATTEMPTS = (("float64", True), (None, True), ("float64", False), (None, False))


class Refusal(NamedTuple):
    """Why runs cannot be compared.

    Attributes:
        what: "REFUSED", where the model cannot train on replicas, or "NOT CHECKED".
        why: the reason, in a line.
    """

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}\nwhy: {self.why}"


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

    def first_run(self) -> Trace:
        """A run from the values that the model has, which may make variables."""
        with self._plain():
            return self._runner.run()

    def run_from(self, start: dict[str, np.ndarray], **options: Any) -> Trace:
        """Runs as `Runner.run_from` does, with its options."""
        with self._plain():
            return self._runner.run_from(start, **options)

    def state(self) -> dict[str, np.ndarray]:
        """The values of all variables, by name."""
        return self._runner.state()

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        with fixed_draws(Observed()), plain_optimizer_calls(self._sizes, self._optimizers):
            yield

    def _known_optimizers(self) -> list[Any]:
        return _each_once([self.model.optimizer, *self._optimizers])

    def cancelled(self) -> list[str]:
        """The names of the weights whose gradient is rounding alone: the sum of numbers that cancel."""
        names = {id(each): name for name, each in names_of_variables(self._runner.variables_by_kind()).items()}
        return [
            names[id(variable)]
            for variable, size in self._sizes.relative()
            if id(variable) in names and size <= CANCELLED.get(variable.dtype, 0.0)
        ]


class ReplicaRun(NamedTuple):
    """The run on replicas.

    Attributes:
        model: of `data_parallel`; None where it could not be made.
        trace: what it recorded; None where it failed.
        error: with which it failed; None where it did not.
        warnings: the library's.
        observed: what the user's code did.
    """

    model: Any
    trace: Trace | None
    error: Exception | None
    warnings: list[str]
    observed: Observed


class Runs(NamedTuple):
    """What was run, and what came out.

    Attributes:
        plain: plain Keras's runs.
        on_replicas: the run on replicas.
        strategy: the replicas'.
        dtype: that both were built in; None for Keras's own setting.
        failed_methods: of plain Keras, by name, with the error: they are not compared.
        outcome: the verdict, or why there is none.
    """

    plain: PlainRuns
    on_replicas: ReplicaRun
    strategy: tf.distribute.Strategy
    dtype: str | None
    failed_methods: dict[str, Exception]
    outcome: Verdict | Refusal


class Setup(NamedTuple):
    """What is checked.

    Attributes:
        build: makes the model, or a tuple of the model and its data.
        data: (x, y, sample_weight); None where `build` returns them.
        batch_size: of arrays.
        steps: the number of batches.
        seed: of the weights.
        strategy: the replicas.
    """

    build: Callable[[], Any]
    data: tuple | None
    batch_size: int
    steps: int
    seed: int
    strategy: tf.distribute.Strategy


def compared_runs(setup: Setup) -> Runs:
    """Trains a model on replicas and in plain Keras, and compares what they record.

    Raises:
        UserError: when there is nothing that can be compared.
        Exception: what plain Keras raises.
    """
    errors: list[Exception] = []
    for dtype, with_short_batches in ATTEMPTS:
        with (
            default_dtype(dtype),
            variable_scope_kept(),
            layer_names_kept(),
            warnings.catch_warnings(action="ignore"),
        ):
            try:
                model, data = _plain_model(setup)
                examples = examples_of(data, setup.batch_size, setup.steps, with_short_batches)
                plain = PlainRuns(model, examples)
                first = plain.first_run()
            except UserError:
                raise
            except Exception as error:
                errors += [error] if dtype is None else []
                continue
            state = plain.state()
            start = first.start if first.start.keys() == state.keys() else state  # which the first step has made
            on_replicas = _run_on_replicas(setup, examples, start, METHODS - first.failed_methods.keys())
            if _is_of_dtype(on_replicas.error) and dtype is not None:
                continue
            outcome = _outcome(setup, plain, first, start, on_replicas, dtype)
            return Runs(plain, on_replicas, setup.strategy, dtype, first.failed_methods, outcome)
    raise errors[0]


def _is_of_dtype(error: Exception | None) -> bool:
    """Whether an error on replicas may come of the dtype: what is no sentence of this library's."""
    return error is not None and not isinstance(error, UserError)


def _outcome(
    setup: Setup,
    plain: PlainRuns,
    first: Trace,
    start: dict[str, np.ndarray],
    on_replicas: ReplicaRun,
    dtype: str | None,
) -> Verdict | Refusal:
    """Compares the run on replicas with plain Keras from the same start."""
    if on_replicas.trace is None:
        return Refusal("REFUSED", line_of(on_replicas.error))
    base = first if first.start is start else plain.run_from(start)
    orders = [_order(setup.seed + number) for number in range(ORDERS)]
    noise = largest_distances(base, [plain.run_from(start, shuffle=order) for order in orders])
    unsteady = _unsteady(base, noise, dtype)
    if unsteady:  # what depends on the order may still be the same in every run
        model, _ = _plain_model(setup, seed=setup.seed + 1)
        of_other_seed = distances(base, PlainRuns(model, plain.examples).run_from(start))
        noise |= {record.key: of_other_seed[record.key] for record in unsteady}
        unsteady = _unsteady(base, noise, dtype)
    if unsteady and unsteady[0].step == 1:
        return Refusal("NOT CHECKED", f"plain Keras's own {unsteady[0]} differs from run to run, or is not finite")
    steps = unsteady[0].step - 1 if unsteady else len(plain.examples.batch_sizes)
    return compare(base.until(steps), on_replicas.trace, noise, plain.cancelled())


def line_of(error: Exception | None) -> str:
    """An error in one line: its sentence alone, if it is this library's."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error  # whose str is a repr
    text = re.sub(r"\x1b\[\d*m", "", " ".join(str(message).split()))[:400]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def _order(seed: int) -> Callable[[Batch], Batch]:
    random = np.random.default_rng(seed)
    return lambda batch: shuffled(batch, random)


def _unsteady(base: Trace, noise: dict[Key, float], dtype: str | None) -> list[Record]:
    """The records, but of state, in which plain Keras's runs differ by more than rounding, or are not finite."""
    limit = STEADY_LIMITS[dtype]
    return [
        record
        for record in base.records
        if record.kind not in STATE and not noise[record.key] <= limit * norm_of(record.value) + ROUNDING
    ]


def _plain_model(setup: Setup, seed: int | None = None) -> tuple[Any, tuple]:
    """A model with Keras's own trainer, and its data.

    Raises:
        UserError: when the function does not return a compiled model that can be checked.
    """
    keras.utils.set_random_seed(setup.seed if seed is None else seed)
    model, data = _model_and_data(setup)
    if {layer.compute_dtype for layer in model._flatten_layers()} & {"float16", "bfloat16"}:
        raise UserError("float16 and bfloat16 are too coarse to compare: build the model in float32 for check")
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise UserError("the function that makes the model must not use a strategy: check makes its own")
    model.__class__ = getattr(type(model), "plain_class", type(model))
    for layer in model._flatten_layers():
        vars(layer).pop("_moments", None)  # of this library
    return model, data


def _model_and_data(setup: Setup) -> tuple[Any, tuple]:
    reset_layer_names()  # so that layers have the same names in each model
    made = setup.build()
    model, *data = made if isinstance(made, tuple) else (made,)
    if not isinstance(model, keras.Model) or not model.compiled:
        returned = ", ".join(type(each).__name__ for each in (model, *data))
        raise UserError(f"the function must return a compiled model, or (model, x, y), not ({returned})")
    model.steps_per_execution = 1
    return model, tuple(data) if setup.data is None else setup.data


def _run_on_replicas(
    setup: Setup, examples: Examples, start: dict[str, np.ndarray], methods: Iterable[str]
) -> ReplicaRun:
    """Trains the model on replicas, from the given start."""
    observed = Observed()
    model = trace = error = None
    keras.utils.set_random_seed(setup.seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            with setup.strategy.scope():
                model, _ = _model_and_data(setup)
                if not isinstance(model, Trainer):
                    data_parallel(model)
            runner = Runner(model, examples, lambda: optimizers_of(model))
            with fixed_draws(observed), replica_reads_observed(observed):
                trace = runner.run_from(start, methods=methods)
            if trace.failed_methods:
                raise next(iter(trace.failed_methods.values()))
        except Exception as raised:
            trace, error = None, raised
    messages = [str(each.message) for each in caught if Path(each.filename).is_relative_to(LIBRARY)]
    return ReplicaRun(model, trace, error, messages, observed)


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers of a model of `data_parallel`, with those that its own steps call."""
    return _each_once([model.optimizer, *(model.step_plans.optimizers if model.step_plans else ())])


def _each_once(optimizers: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in optimizers if each is not None}.values())
