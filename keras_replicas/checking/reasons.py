# SPDX-License-Identifier: Apache-2.0
"""The likely cause of a difference: a table of tests and experiments, each of which knows one cause."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_replicas.call_probe import probe_call
from keras_replicas.checking.comparison import Difference, Verdict
from keras_replicas.checking.repeatable import Observed, default_dtype, fixed_draws
from keras_replicas.checking.runs import Runs
from keras_replicas.loop import has_own

STEPS = {"evaluation": "test_step", "prediction": "predict_step"}
NOT_THE_SAME = "is not the same on several replicas"  # in the warnings of this library that name a cause
UNKNOWN = "not known: please report it, with the model"


class Case(NamedTuple):
    """What an experiment gets.

    Attributes:
        runs: what was run.
        first: the first difference.
    """

    runs: Runs
    first: Difference

    @property
    def model(self) -> Any:
        """The model on replicas."""
        return self.runs.on_replicas.model

    @property
    def step(self) -> str:
        """The step that computed what differs: "train_step", "test_step" or "predict_step"."""
        return STEPS.get(self.first.record.kind, "train_step")


def likely_cause(runs: Runs, verdict: Verdict) -> str:
    """The likely cause of the first difference, and what to do: that of the first experiment that knows one."""
    case = Case(runs, verdict.differences[0])
    with default_dtype(runs.floatx), fixed_draws(Observed()):
        for experiment in EXPERIMENTS:
            if cause := experiment(case):
                return cause
    return UNKNOWN


def _reads_replica_number(case: Case) -> str | None:
    """Finds code that asks which replica computes it."""
    functions = case.runs.on_replicas.observed.replica_reads
    if not functions:
        return None
    return (
        f"{_listed(functions)} reads the number of its replica, or of all replicas: compute the same on every replica, "
        "and do not divide by the number of replicas"
    )


def _draws_from_constant_seed(case: Case) -> str | None:
    """Finds code that draws random numbers from a seed that is a constant."""
    functions = case.runs.on_replicas.observed.fixed_seeds
    if not functions:
        return None
    return (
        f"{_listed(functions)} draws random numbers from a constant seed, so each replica draws for its examples what "
        "the others draw for theirs: use a keras.random.SeedGenerator"
    )


def _call_compares_examples(case: Case) -> str | None:
    """Calls the model on a few examples, together and apart."""
    for x in case.runs.plain.examples.inputs:
        for training in (True, False):
            with contextlib.suppress(Exception):  # a model need not have a call
                warnings = probe_call(case.model, x, training).warnings
                if warnings:
                    return warnings[0]
    return None


def _library_warned(case: Case) -> str | None:
    """Finds the warning that this library gave when the model was trained on replicas."""
    messages = [message for message in case.runs.on_replicas.warnings if NOT_THE_SAME in message]
    of_step = [message for message in messages if f".{case.step} " in message]
    return next(iter([*of_step, *messages]), None)


def _python_state(case: Case) -> str | None:
    """Calls the plain model, and finds what its layers count or keep in Python."""
    layers = case.runs.plain.model._flatten_layers()
    before = [_python_values(layer) for layer in layers]
    with contextlib.suppress(Exception):  # a model need not have a call
        case.runs.plain.model(case.runs.plain.examples.inputs[0])
    for layer, values in zip(layers, before, strict=True):
        now = _python_values(layer)
        changed = sorted(name for name, value in values.items() if now.get(name) != value)
        if changed:
            return (
                f"{layer.name}.{changed[0]} changes in each call, and each replica calls the model: keep it in a "
                "variable, by add_weight(..., aggregation='sum')"
            )
    return None


def _python_values(layer: keras.Layer) -> dict[str, Any]:
    """The numbers and texts that are attributes of a layer."""
    return {
        name: value
        for name, value in vars(layer).items()
        if isinstance(value, int | float | str) and not name.startswith("_")
    }


def _layer_state(case: Case) -> str | None:
    """Tests whether what differs first is a variable that a layer updates."""
    record = case.first.record
    if record.kind != "layer state":
        return None
    return (
        f"{record.name} does not combine over replicas by its aggregation: use 'sum' for a counter and 'mean' for a "
        "mean over examples; a maximum or a queue cannot be combined"
    )


def _custom_step(case: Case) -> str | None:
    """Tests whether the class has a step of its own, which does not call Keras's."""
    if not has_own(case.model, case.step):
        return None
    name = f"{type(case.model).__name__}.{case.step}"
    if case.step == "predict_step":
        return f"{name} compares examples, and each replica has only its shard of the batch: compare what it returns"
    return (
        f"{name} is neither a mean nor a sum over examples, and each replica has only its shard of the batch: leave "
        "the step to Keras, and put the loss into compute_loss, which then gets the global batch"
    )


def _step_around_keras(case: Case) -> str | None:
    """Tests whether the class overrides Keras's step, and calls it."""
    model = case.model
    if not model.has_custom_step(case.step):
        return None
    return (
        f"{type(model).__name__}.{case.step} compares examples before it calls Keras's, and each replica has only its "
        "shard of the batch: move that to compute_loss, which gets the global batch"
    )


def _metric(case: Case) -> str | None:
    """Tests whether a metric differs, and the loss before it does not."""
    record = case.first.record
    if record.kind not in ("training", "evaluation") or record.name == "loss":
        return None
    return (
        f"the metric {record.name} is a function of the batch, or has a state that is no sum over examples: derive it "
        "from keras.metrics.Mean, or update it in compute_metrics, which gets the global batch"
    )


def _added_loss(case: Case) -> str | None:
    """Tests whether layers add losses."""
    if not case.model.losses or case.first.record.kind == "prediction":
        return None
    return "add_loss gets a number that is neither a mean nor a sum over examples: give it a value for each example"


def _loss(case: Case) -> str | None:
    """Tests whether the loss is the user's own."""
    if case.first.record.kind != "training" or not _has_custom_loss(case.model):
        return None
    return "the loss is not a function of the labels, the outputs and the weights alone: it reads something else"


def _gradient(case: Case) -> str | None:
    """Tests whether the loss of the first step is the same: then its gradients are likely not."""
    record = case.first.record
    if record.kind in ("evaluation", "prediction") or (record.kind == "training" and record.step == 1):
        return None
    return (
        "likely the gradients, as the loss of the first step is the same: what a tf.custom_gradient or "
        "tf.stop_gradient computes for an example may depend on the other examples of the batch. If there is none, "
        "please report it, with the model"
    )


def _has_custom_loss(model: Any) -> bool:
    if has_own(model, "compute_loss"):
        return True
    functions = [loss for loss in keras.tree.flatten(model.loss) if callable(loss)]
    modules = [inspect.getmodule(loss if inspect.isfunction(loss) else type(loss)) for loss in functions]
    return any(not getattr(module, "__name__", "").startswith("keras.") for module in modules)


def _listed(functions: set[str]) -> str:
    return " and ".join(sorted(functions))


EXPERIMENTS: tuple[Callable[[Case], str | None], ...] = (
    _reads_replica_number,
    _draws_from_constant_seed,
    _call_compares_examples,
    _library_warned,
    _python_state,
    _layer_state,
    _custom_step,
    _step_around_keras,
    _metric,
    _added_loss,
    _loss,
    _gradient,
)
