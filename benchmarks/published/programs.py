# SPDX-License-Identifier: Apache-2.0
"""Trains a published program on N replicas and compares it with plain Keras, and what the programs share."""

import contextlib
import functools
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import keras_replicas
from benchmarks.features import largest_difference, no_autotune
from keras_replicas import UserError, data_parallel, make_strategy

EXAMPLES = 27
BATCH = 8  # the last of four batches has 3 examples
EPOCHS = 2
IMAGE_SIZE = 8
CLASSES = 3
BOUNDS = {"float32": 1e-5, "float64": 1e-10}

Wrap = Callable[[keras.Model], keras.Model]
Numbers = dict[str, np.ndarray]


@dataclass(frozen=True)
class PublishedProgram:
    """One program.

    Attributes:
        name: its folder and name on keras.io.
        train: a function of `wrap`, which is `data_parallel` or the identity. It makes and trains
            the model in the current strategy scope, and returns numbers by name.
        expected: "equal" when N replicas must compute the same as one device; "warned" when the
            step compares examples, so that they cannot, and the user must be warned;
            "may be refused" when the step cannot run on a shard of the batch.
    """

    name: str
    train: Callable[[Wrap], Numbers]
    expected: str

    @property
    def has_own_step(self) -> bool:
        """Whether it has a `train_step` or `test_step`: those programs have modules of their own."""
        return self.train.__module__.endswith("_steps")


PROGRAMS: dict[str, PublishedProgram] = {}


def published_program(name: str, expected: str) -> Callable:
    """Registers the decorated function as the program of that name."""

    def register(train: Callable[[Wrap], Numbers]) -> Callable[[Wrap], Numbers]:
        @functools.wraps(train)
        def train_from_seed(wrap: Wrap) -> Numbers:
            keras.utils.set_random_seed(0)
            return train(wrap)

        PROGRAMS[name] = PublishedProgram(name, train_from_seed, expected)
        return train_from_seed

    return register


# Comparison


class Comparison(NamedTuple):
    """What N replicas computed, against plain Keras on one device.

    Attributes:
        difference: the largest, relative to the largest number of its tensor; None when refused.
        refusal: the message, in one line, if keras_replicas refuses the program.
        warnings: the messages of the warnings that keras_replicas gave.
    """

    difference: float | None
    refusal: str | None
    warnings: list[str]


PLAIN_NUMBERS: dict[tuple[str, str], Numbers] = {}  # by name and floatx


def compare(name: str, replicas: int) -> Comparison:
    """Trains a program on N replicas, and compares it with plain Keras on one device.

    The CPU must have been divided into at least N logical devices. Errors other than the refusals
    of keras_replicas are raised.
    """
    program = PROGRAMS[name]
    key = (name, keras.config.floatx())
    with draws_of_the_example(sys.modules[program.train.__module__]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if key not in PLAIN_NUMBERS:
            keras.backend.clear_session()  # layers are named alike in both runs
            PLAIN_NUMBERS[key] = program.train(lambda model: model)
        keras.backend.clear_session()
        caught.clear()
        try:
            with make_strategy(replicas).scope():
                found = program.train(data_parallel)
        except ValueError as error:
            if not is_refusal(error):
                raise
            return Comparison(None, refusal_line(error), our_warnings(caught))
    return Comparison(largest_difference(found, PLAIN_NUMBERS[key]), refusal=None, warnings=our_warnings(caught))


class _FitCalled(Exception):
    """Ends a program where it would train."""


def model_and_data(name: str) -> tuple[Any, ...]:
    """The compiled model of a program, and the x, y and sample_weight that it first gives to `fit`."""
    given: list[tuple] = []
    signature = inspect.signature(keras.Model.fit)

    def fit(model, *args, **kwargs):
        arguments = signature.bind(model, *args, **kwargs).arguments
        given.append((model, *(arguments.get(name) for name in ("x", "y", "sample_weight"))))
        raise _FitCalled

    with mock.patch.object(keras.Model, "fit", fit), contextlib.suppress(_FitCalled):
        PROGRAMS[name].train(lambda model: model)
    return given[0]


def is_refusal(error: ValueError) -> bool:
    """Whether keras_replicas raised the error, and no package that it calls."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, UserError) or raised_in.is_relative_to(package_folder())


def refusal_line(error: ValueError) -> str:
    """The error's message without the lines that Keras puts around it."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(line for line in lines if not line.startswith("Exception encountered"))


def our_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    """The messages that keras_replicas gave, each once, whatever line they are attributed to."""
    found = []
    for warning in caught:
        message = str(warning.message)
        is_ours = Path(warning.filename).is_relative_to(package_folder()) or "replica" in message
        if is_ours and message not in found:
            found.append(message)
    return found


def package_folder() -> Path:
    """The folder of keras_replicas."""
    return Path(keras_replicas.__file__).parent


class ModuleView:
    """A module with some attributes replaced, for those who use this object in its stead."""

    def __init__(self, module: Any, **replaced: Any):
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def draws_of_the_example(programs: ModuleType) -> Iterator[None]:
    """Context in which every example of every step draws the same fixed numbers.

    Random draws then do not depend on how a batch is divided. It replaces `normal` and `uniform` of
    `tf.random` and `keras.random` for the code of the module `programs`, and for nobody else. Draws
    outside of a `tf.function`, such as those of initial values, stay random, but are of
    `keras.config.floatx()`.
    """
    views = {}
    for module_name, module in (("tf", tf), ("keras", keras)):
        draws = {
            "normal": same_for_each_example(module.random, "normal", tf.random.stateless_normal),
            "uniform": same_for_each_example(module.random, "uniform", tf.random.stateless_uniform),
        }
        views[module_name] = ModuleView(module, random=ModuleView(module.random, **draws))
    with mock.patch.dict(vars(programs), views):
        yield


def same_for_each_example(module: Any, name: str, draw_from_seed: Callable) -> Callable:
    """Makes a random function that draws shape [1, ...] from a fixed seed for a shape [n, ...].

    The function of that name in `module` is called too, so that its seeds advance as published.
    """

    def draw_fixed(shape, *limits, dtype=None, seed=None, **named_limits):
        draw = getattr(module, name)
        dtype = dtype or keras.config.floatx()
        if tf.executing_eagerly():
            return draw(shape, *limits, dtype=dtype, seed=seed, **named_limits)
        draw((1,), dtype=dtype, seed=seed)
        shape = tf.convert_to_tensor(shape, tf.int32)
        one_example = tf.concat([[1], shape[1:]], axis=0)
        row = draw_from_seed(one_example, (0, 1), *limits, dtype=dtype, **named_limits)
        return tf.broadcast_to(row, shape)

    return draw_fixed


# What the programs share


def random_array(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> np.ndarray:
    """Uniform random numbers of `keras.config.floatx()`."""
    numbers = np.random.default_rng(seed).uniform(low, high, shape)
    return numbers.astype(keras.config.floatx())


def random_images(count: int, channels: int = 3, low: float = 0.0, high: float = 1.0, seed: int = 0) -> np.ndarray:
    """Images that a horizontal flip leaves as they are."""
    images = random_array(count, IMAGE_SIZE, IMAGE_SIZE, channels, low=low, high=high, seed=seed)
    return (images + images[:, :, ::-1]) / 2


def binary_labels(count: int, seed: int = 0) -> np.ndarray:
    """Integers 0 and 1."""
    return np.random.default_rng(seed).integers(0, 2, count)


def random_labels(count: int, seed: int = 0) -> np.ndarray:
    """Integers below the number of classes."""
    return np.random.default_rng(seed).integers(0, CLASSES, count)


def batched(data: Any, size: int = BATCH, drop_remainder: bool = False) -> tf.data.Dataset:
    """Batches of arrays, in their order."""
    return batch_dataset(tf.data.Dataset.from_tensor_slices(data), size, drop_remainder)


def batch_dataset(dataset: tf.data.Dataset, size: int = BATCH, drop_remainder: bool = False) -> tf.data.Dataset:
    """Batches of a data set's elements, which are prefetched as most programs do."""
    return dataset.batch(size, drop_remainder=drop_remainder).prefetch(2).with_options(no_autotune())


def zipped(*datasets: tf.data.Dataset) -> tf.data.Dataset:
    """Tuples of the elements of several data sets."""
    return tf.data.Dataset.zip(datasets).with_options(no_autotune())


def sgd(learning_rate: Any, **options: Any) -> keras.optimizers.Optimizer:
    """The optimizer in place of the published one."""
    return keras.optimizers.SGD(learning_rate, **options)


def nonzero_bias() -> keras.initializers.Initializer:
    """For a bias with a gradient so small that its rounding would be all that is compared."""
    return keras.initializers.RandomNormal(stddev=0.5)


def fit_arrays(model: keras.Model, x: Any, y: Any = None, **options: Any) -> keras.callbacks.History:
    """Trains on arrays in their order."""
    defaults = {"batch_size": BATCH, "epochs": EPOCHS}
    return model.fit(x, y, shuffle=False, verbose=0, **(defaults | options))


def prefixed(prefix: str, numbers: Numbers) -> Numbers:
    """The same numbers under longer names, of a program that trains several times."""
    return {f"{prefix}/{name}": value for name, value in numbers.items()}


def results(
    model: keras.Model,
    history: keras.callbacks.History,
    variables: dict[str, tf.Variable] | None = None,
    scores: dict[str, float] | None = None,
) -> Numbers:
    """The numbers of a program by name: of its History, its evaluation, and its variables.

    Keras tracks no `tf.Variable`, so the programs that have some name them here.
    """
    numbers = {f"history/{name}": np.asarray(value) for name, value in history.history.items()}
    numbers |= {f"evaluate/{name}": np.asarray(value) for name, value in (scores or {}).items()}
    for index, weight in enumerate(model.weights):
        if not weight.path.endswith("key/bias"):  # attention ignores it: its gradient is rounding
            numbers |= values_of(f"weights/{index:03}", weight.value)
    for name, variable in (variables or {}).items():
        numbers |= values_of(f"variables/{name}", variable)
    return numbers


def values_of(name: str, variable: tf.Variable) -> Numbers:
    """A variable's value, and the last replica's copy of it, which must be the same.

    A variable that is synchronized when it is read has copies that may differ.
    """
    numbers = {name: np.asarray(variable.numpy())}
    if variable.synchronization != tf.VariableSynchronization.ON_READ:
        copies = tf.distribute.get_strategy().experimental_local_results(variable)
        numbers[f"{name} (last copy)"] = np.asarray(copies[-1].numpy())
    return numbers
