# SPDX-License-Identifier: Apache-2.0
"""Trains a model step by step, and records all that is to be compared."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.checking.examples import Batch, Examples
from keras_replicas.custom_step import variables_of_tensorflow
from keras_replicas.losses import variables_of_losses
from keras_replicas.optimizer_calls import all_optimizers, applied_by, calls_replaceable
from keras_replicas.optimizers import variables_of_optimizer
from keras_replicas.replicas import sum_rows

Kind = Literal["training", "layer state", "optimizer state", "weight", "evaluation", "prediction"]
METHODS = frozenset({"evaluate", "predict"})  # that are called after training
MAX_VALUES = 4096  # that are kept of a large tensor


class Record(NamedTuple):
    """A value of a run.

    Attributes:
        kind: what it is. "training" is a loss or metric of `fit`, a mean over the epoch's examples so far.
        step: the training steps before it, counted from 1.
        name: of the metric, the variable or the output.
        value: an array; of a tensor with more than `MAX_VALUES` numbers, as many sums of them with random signs, whose
            Euclidean norm is about the tensor's.
        weight: of a weight, or of the optimizer's state for one, the weight's name.
    """

    kind: Kind
    step: int
    name: str
    value: np.ndarray
    weight: str = ""

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells it from the other records of a run."""
        return self.kind, self.step, self.name

    def __str__(self) -> str:
        return f"{self.kind} {self.name} after step {self.step}"


class Trace(NamedTuple):
    """What a run recorded.

    Attributes:
        start: the values of all variables before the first step, by name.
        records: in the order of the run.
        failed_methods: the errors of those of `METHODS` that raised one.
    """

    start: dict[str, np.ndarray]
    records: list[Record]
    failed_methods: dict[str, Exception]


class GradientSizes:
    """The largest Euclidean norm of each variable's gradient, over the steps of all runs."""

    def __init__(self):
        self._sizes: dict[int, tuple[Any, tf.Variable]] = {}  # by the variable's id

    def update(self, gradients: Iterable[Any], variables: Iterable[Any]) -> None:
        """Takes the gradients of a step into account. Call it where the step computes them."""
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            if id(variable) not in self._sizes:
                with tf.init_scope():
                    self._sizes[id(variable)] = (variable, tf.Variable(0.0, dtype=tf.float64))
            _, size = self._sizes[id(variable)]
            norm = tf.norm(tf.cast(tf.convert_to_tensor(gradient), tf.float64))
            size.assign(tf.maximum(size, norm))

    def relative(self) -> Iterator[tuple[Any, float]]:
        """Each variable, and its gradient's size relative to the largest of all."""
        sizes = [(variable, float(size)) for variable, size in self._sizes.values()]
        largest = max((size for _, size in sizes), default=0.0)
        for variable, size in sizes:
            yield variable, size / largest if largest else 0.0


# Training.


class Runner:
    """Trains one model as often as it is asked, always on the same examples.

    Args:
        model: compiled, plain or of `data_parallel`.
        examples: to train on.
        optimizers: a function that gives the optimizers that steps have called so far.
    """

    def __init__(self, model: Any, examples: Examples, optimizers: Callable[[], list[Any]]):
        self.model = model
        self._examples = examples
        self._optimizers = optimizers

    def run(
        self,
        start: Mapping[str, np.ndarray] | None = None,
        reorder: Callable[[Batch], Batch] = lambda batch: batch,
        methods: Iterable[str] = METHODS,
    ) -> Trace:
        """Trains, evaluates and predicts.

        Args:
            start: values for the variables, by name; None for those that the model has.
            reorder: gives each batch's examples another order, or returns it as it is.
            methods: which of `METHODS` to call after training.

        Raises:
            Exception: what `fit` raises.
        """
        recorder = _Recorder(self, start)
        for arguments in self._examples.calls_of_fit(reorder):
            self.model.fit(**arguments, shuffle=False, verbose=0, callbacks=[recorder])
        calls = {"evaluate": self._evaluate, "predict": self._predict}
        failed: dict[str, Exception] = {}
        for method in sorted(methods):
            try:
                kind, values = calls[method]()
                recorder.record(kind, values)
            except Exception as error:
                failed[method] = error
        return Trace(recorder.start, recorder.records, failed)

    def run_from(self, start: Mapping[str, np.ndarray], **options: Any) -> Trace:
        """Runs as `run` does; and again, if its first step made variables that the start has values for."""
        trace = self.run(start, **options)
        return trace if trace.start.keys() == start.keys() else self.run(start, **options)

    def state(self) -> dict[str, np.ndarray]:
        """The values of all variables, by name."""
        return {each.name: _value_of(each.variable) for each in self.variables()}

    def set_state(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets the variables of these names."""
        for each in self.variables():
            if each.name in values:
                each.variable.assign(values[each.name])

    def variables(self) -> list["NamedVariable"]:
        """The variables that are compared. Metrics begin each epoch anew, and seeds change nothing here."""
        model = self.model
        state = [each for each in model.non_trainable_variables if each.name != "seed_generator_state"]
        state += variables_of_losses(model)
        named = named_variables(state, self._optimizers(), model.trainable_variables)
        of_tensorflow = variables_of_tensorflow(model).items()
        return [*named, *(NamedVariable("layer state", name, variable) for name, variable in of_tensorflow)]

    def _evaluate(self) -> tuple[Kind, dict[str, Any]]:
        return "evaluation", self.model.evaluate(**self._examples.for_evaluate(), verbose=0, return_dict=True)

    def _predict(self) -> tuple[Kind, dict[str, Any]]:
        outputs = self.model.predict(**self._examples.for_predict(), verbose=0)
        named = keras.tree.flatten_with_path(outputs)
        return "prediction", {"/".join(map(str, path)) or "output": output for path, output in named}


class _Recorder(keras.callbacks.Callback):
    """Sets the variables when training begins, and records them after each step."""

    def __init__(self, runner: Runner, start: Mapping[str, np.ndarray] | None):
        super().__init__()
        self._runner = runner
        self._given_start = start
        self.start: dict[str, np.ndarray] = {}
        self.records: list[Record] = []
        self._step = 0

    def on_train_begin(self, logs=None):
        """Sets the start, in the first call of `fit`."""
        if self._step:
            return
        if self._given_start is not None:
            self._runner.set_state(self._given_start)
        self.start = self._runner.state()

    def on_train_batch_end(self, batch, logs=None):
        """Records losses and metrics first, as the first difference is the one that is reported."""
        self._step += 1
        self.record("training", logs or {})
        for each in self._runner.variables():
            self._add(each.kind, each.name, _value_of(each.variable), each.weight)

    def record(self, kind: Kind, values: Mapping[str, Any]) -> None:
        """Records values by name, a loss before the others."""
        for name in sorted(values, key=lambda name: name != "loss"):
            self._add(kind, name, np.asarray(values[name]))

    def _add(self, kind: Kind, name: str, value: np.ndarray, weight: str = "") -> None:
        self.records.append(Record(kind, self._step, name, _sketch(value), weight))


def _value_of(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _sketch(value: np.ndarray) -> np.ndarray:
    if value.size <= MAX_VALUES or not np.issubdtype(value.dtype, np.number):
        return value
    signs = np.random.default_rng(0).choice([-1.0, 1.0], value.size)
    return np.bincount(np.arange(value.size) % MAX_VALUES, signs * value.ravel())


@contextlib.contextmanager
def plain_optimizer_calls(sizes: GradientSizes, called: list[Any]) -> Iterator[None]:
    """Context of plain Keras's runs: optimizers get each row of an embedding's gradient once, as ours do.

    By themselves, adaptive optimizers square the rows of a token that is repeated one by one.

    Args:
        sizes: gets the gradients.
        called: gets the optimizers that are called, each once, in the order of their first calls.
    """

    def apply(optimizer, gradients, variables):
        if all(optimizer is not each for each in called):
            called.append(optimizer)
        sizes.update(gradients, variables)
        merged = [sum_rows(each) if isinstance(each, tf.IndexedSlices) else each for each in gradients]
        optimizer.apply(merged, variables)

    with calls_replaceable(all_optimizers()), applied_by(apply):
        yield


# Names.


class NamedVariable(NamedTuple):
    """A variable that is compared.

    Attributes:
        kind: of its records.
        name: the same in each model of the same code.
        variable: of Keras or TensorFlow.
        weight: of a weight, or of the optimizer's state for one, the weight's name.
    """

    kind: Kind
    name: str
    variable: Any
    weight: str = ""


def named_variables(state: Iterable[Any], optimizers: Iterable[Any], weights: Iterable[Any]) -> list[NamedVariable]:
    """Variables of a model with names that are the same in each model of the same code.

    A name is the end of the variable's path, "dense/kernel": how the path begins depends on what
    built the layer first. That of an optimizer's variable begins with the optimizer's name, which
    the path of some lacks, and has no number that Keras has counted. Where several have one name,
    they are numbered in their order.

    Args:
        state: what layers update.
        optimizers: whose variables are named.
        weights: what is trained.
    """
    names = _UniqueNames()
    named_state = [NamedVariable("layer state", names.name_of(_end_of(each)), each) for each in state]
    named_weights = []
    for weight in weights:
        name = names.name_of(_end_of(weight))
        named_weights.append(NamedVariable("weight", name, weight, name))
    # A slot of an optimizer is named after the weight's path: "adam/sequential_dense_kernel_momentum".
    by_path = {each.variable.path.replace("/", "_"): each.name for each in [*named_state, *named_weights]}
    slots = []
    for optimizer in optimizers:
        for variable in variables_of_optimizer(optimizer):
            slot = re.sub(r"^variable_\d+$", "variable", variable.path.split("/")[-1])
            path = max((path for path in by_path if slot.startswith(f"{path}_")), key=len, default="")
            of_weight = by_path.get(path, "")
            name = f"{optimizer.name}/{of_weight.replace('/', '_')}{slot.removeprefix(path)}"
            slots.append(NamedVariable("optimizer state", names.name_of(name), variable, of_weight))
    return [*named_state, *slots, *named_weights]


class _UniqueNames:
    """Gives each but the first of equal names a number."""

    def __init__(self):
        self._counts: dict[str, int] = {}

    def name_of(self, name: str) -> str:
        """The name of the next one."""
        count = self._counts.get(name, 0) + 1
        self._counts[name] = count
        return f"{name} ({count})" if count > 1 else name


def _end_of(variable: Any) -> str:
    return "/".join(variable.path.split("/")[-2:])
