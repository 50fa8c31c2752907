# SPDX-License-Identifier: Apache-2.0
"""The likely cause of a difference: a table of experiments, each of which knows one cause."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_replicas.call_probe import probe_call
from keras_replicas.checking.comparison import Difference, Verdict
from keras_replicas.checking.runs import Runs
from keras_replicas.loop import has_own

STEPS = {"evaluation": "test_step", "prediction": "predict_step"}
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
    for experiment in EXPERIMENTS:
        if cause := experiment(case):
            return cause
    return UNKNOWN


def _number_of_replica(case: Case) -> str | None:
    """Does the model's code ask which replica computes it?"""
    functions = case.runs.on_replicas.observed.replica_reads
    if not functions:
        return None
    return (
        f"{_listed(functions)} asks for the number of its replica, or of all replicas, and computes something else by "
        "it: compute the same on every replica, and divide nothing by their number"
    )


def _constant_seed(case: Case) -> str | None:
    """Does it draw random numbers from a seed that is a constant?"""
    functions = case.runs.on_replicas.observed.fixed_seeds
    if not functions:
        return None
    return (
        f"{_listed(functions)} draws random numbers from a constant seed, so each replica draws for its examples what "
        "the others draw for theirs: use a keras.random.SeedGenerator"
    )


def _call_compares_examples(case: Case) -> str | None:
    """Do the outputs for an example depend on the others, when the model is called on a few together and apart?"""
    for x in case.runs.plain.examples.inputs:
        for training in (True, False):
            with contextlib.suppress(Exception):  # a model need not have a call
                warnings = probe_call(case.model, x, training).warnings
                if warnings:
                    return f"{warnings[0]}. compute_loss gets the whole batch"
    return None


def _library_warned(case: Case) -> str | None:
    """Did this library warn when the model was trained? It says why."""
    messages = case.runs.on_replicas.warnings
    of_step = [message for message in messages if f".{case.step} " in message]
    return next(iter([*of_step, *messages]), None)


def _layer_state(case: Case) -> str | None:
    """Is the first difference a variable that a layer updates?"""
    record = case.first.record
    if record.kind != "layer state":
        return None
    return (
        f"{record.name} is combined over replicas as its aggregation says, which is not what the layer computes of the "
        "whole batch: it takes 'sum' for a counter and 'mean' for a mean over examples; a maximum, say, or a queue has "
        "none"
    )


def _custom_step(case: Case) -> str | None:
    """Does the class have a step of its own, without Keras's?"""
    if not has_own(case.model, case.step):
        return None
    return (
        f"{type(case.model).__name__}.{case.step} is neither a mean nor a sum over examples, or compares them: a "
        "replica has one shard of the batch; compute_loss gets the whole batch"
    )


def _step_around_keras(case: Case) -> str | None:
    """Does it override Keras's step, and call it?"""
    model, step = case.model, case.step
    if not model.has_custom_step(step):
        return None
    return (
        f"{type(model).__name__}.{step} uses other examples, of which a replica has its shard, before it calls Keras's"
    )


def _added_loss(case: Case) -> str | None:
    """Do layers add losses?"""
    if not case.model.losses or case.first.record.kind == "prediction":
        return None
    return "add_loss gets a number that is neither a mean nor a sum over examples: give it a value for each example"


def _metric(case: Case) -> str | None:
    """Is it a metric alone?"""
    record = case.first.record
    if record.kind not in ("training", "evaluation") or record.name in ("loss", "val_loss"):
        return None
    return (
        f"the metric {record.name} is a function of the batch, or has a state that is no sum over examples: derive it "
        "from keras.metrics.Mean, or update it in compute_metrics"
    )


def _loss(case: Case) -> str | None:
    """Is the loss the user's own?"""
    if case.first.record.kind != "training":
        return None
    if not _has_custom_loss(case.model):
        return None
    return "the loss is not a function of the labels, the outputs and the weights alone: it reads something else"


def _has_custom_loss(model: Any) -> bool:
    if has_own(model, "compute_loss"):
        return True
    functions = [loss for loss in keras.tree.flatten(model.loss) if callable(loss)]
    modules = [inspect.getmodule(loss if inspect.isfunction(loss) else type(loss)) for loss in functions]
    return any(not getattr(module, "__name__", "").startswith("keras.") for module in modules)


def _listed(functions: set[str]) -> str:
    return " and ".join(sorted(functions))


EXPERIMENTS: tuple[Callable[[Case], str | None], ...] = (
    _number_of_replica,
    _constant_seed,
    _call_compares_examples,
    _library_warned,
    _layer_state,
    _custom_step,
    _step_around_keras,
    _added_loss,
    _loss,
    _metric,
)
