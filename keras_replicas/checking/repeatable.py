# SPDX-License-Identifier: Apache-2.0
"""What makes two runs of a model comparable: one dtype, fixed random draws, and TensorFlow's state as it was before."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.draws import SHUFFLES, STATEFUL, draw_for_each_example, reversed_shuffle
from keras_replicas.private import DRAWING_MODULES

# The seed that Keras's generators give while draws are fixed, by which a draw of theirs is known.
FIXED_SEED = (1_618_033, 988_749)
# Of TensorFlow's stateless draws, those whose first argument is the shape: [examples, ...].
STATELESS = (
    "stateless_normal",
    "stateless_truncated_normal",
    "stateless_uniform",
    "stateless_gamma",
    "stateless_poisson",
    "stateless_binomial",
)
LIBRARIES = ("tensorflow", "keras", "keras_hub", "keras_replicas")
COUNT = "num_replicas_in_sync"
REPLICA_NUMBERS = (
    (tf.distribute.ReplicaContext, "replica_id_in_sync_group"),
    (tf.distribute.ReplicaContext, COUNT),
    (tf.distribute.Strategy, COUNT),
)


class Observed:
    """What the user's code did in a run that makes replicas unlike one device.

    Attributes:
        replica_reads: functions that asked for the number of their replica, or of all.
        fixed_seeds: functions that drew random numbers from a seed that is a constant.
    """

    def __init__(self):
        self.replica_reads: set[str] = set()
        self.fixed_seeds: set[str] = set()


@contextlib.contextmanager
def default_dtype(dtype: str | None) -> Iterator[None]:
    """Context in which Keras's `floatx` and dtype policy are a dtype; None leaves them."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    try:
        if dtype is not None:
            keras.config.set_floatx(dtype)
            keras.config.set_dtype_policy(dtype)
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def variable_scope_kept() -> Iterator[None]:
    """Context after which TensorFlow's variable scope is as before.

    `tf.map_fn` and `tf.scan` set its caching device while they trace, and leave it set if that fails. No strategy's
    scope could make a variable then: "Caching devices is not yet supported".
    """
    scope = tf.compat.v1.get_variable_scope()
    device = scope.caching_device
    try:
        yield
    finally:
        with tf.Graph().as_default():  # it cannot be set in eager execution
            scope.set_caching_device(device)


@contextlib.contextmanager
def replica_reads_observed(observed: Observed) -> Iterator[None]:
    """Context in which it is noted who asks for the number of a replica."""
    with contextlib.ExitStack() as stack:
        for kind, name in REPLICA_NUMBERS:
            owner = next(each for each in kind.__mro__ if name in vars(each))
            observing = property(functools.partial(_observed_read, observed, name == COUNT, vars(owner)[name].fget))
            stack.enter_context(mock.patch.object(owner, name, observing))
        yield


def _observed_read(observed: Observed, is_count: bool, read: Callable, owner: Any) -> Any:
    number = read(owner)
    caller = _user_function(inspect.currentframe(), ("keras_replicas.replicas",))
    if caller and not (is_count and number == 1):  # as a custom step sees it, which is right
        observed.replica_reads.add(caller)
    return number


def _user_function(frame: FrameType | None, passed_over: tuple[str, ...]) -> str | None:
    """The function of a frame, if it is none of the libraries'.

    Args:
        frame: of the caller.
        passed_over: modules whose frames are passed over, and those of this module.
    """
    while frame is not None and _module_of(frame).startswith((__name__, "functools", *passed_over)):
        frame = frame.f_back
    if frame is None or _module_of(frame).split(".")[0] in LIBRARIES:
        return None
    return frame.f_code.co_name.removeprefix("tf__")  # AutoGraph's prefix


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")  # the user's, also in code that AutoGraph has generated


@contextlib.contextmanager
def fixed_draws(observed: Observed) -> Iterator[None]:
    """Context in which every example draws the same numbers in every step, and dropout drops nothing.

    A shuffle reverses the order, which is another one for each size of a batch. It holds the draws of Keras's seed
    generators, of `tf.random.normal`, `truncated_normal` and `uniform`, and of the same methods of a
    `tf.random.Generator`. A stateless draw from a seed of the user's own is a function of that seed, and stays.

    Args:
        observed: gets who draws from a constant seed.
    """
    originals = {name: getattr(tf.random, name) for name in (*STATELESS, "stateless_categorical", *STATEFUL)}
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, function: Callable) -> None:
            original = getattr(owner, name)
            replacement = functools.wraps(original)(functools.partial(function, original))
            replacement.__module__ = __name__  # by which a custom step knows that its draws are replaced
            stack.enter_context(mock.patch.object(owner, name, replacement))

        for name in STATELESS:
            replace(tf.random, name, functools.partial(_stateless, observed))
        categorical = functools.partial(_categorical, observed, originals["stateless_uniform"])
        replace(tf.random, "stateless_categorical", categorical)
        for name, options in STATEFUL.items():
            stateless = originals[f"stateless_{name}"]
            replace(tf.random, name, functools.partial(_stateful, stateless, options))
            of_generator = tuple(option for option in options if option != "seed")
            method = functools.partialmethod(_by_generator, stateless, of_generator)
            stack.enter_context(mock.patch.object(tf.random.Generator, name, method))
        replace(keras.random, "beta", _beta)
        for module, name in SHUFFLES:
            replace(module, name, reversed_shuffle)
        replace(tf.nn.experimental, "stateless_dropout", functools.partial(_dropout, observed))
        replace(tf.nn, "dropout", lambda original, x, *positional, **options: x)
        stack.enter_context(mock.patch.object(keras.random.SeedGenerator, "next", _fixed_seed))
        yield


def _fixed_seed(generator: Any, ordered: bool = True) -> tf.Tensor:
    """In place of `SeedGenerator.next`."""
    return tf.constant(FIXED_SEED, tf.int32)  # which Keras passes on as it is


def _is_fixed(observed: Observed, seed: Any) -> bool:
    """Whether a generator of Keras gave the seed; it is noted who uses another constant."""
    value = tf.get_static_value(seed)
    is_fixed = value is not None and np.array_equal(value, FIXED_SEED)
    caller = _user_function(inspect.currentframe(), DRAWING_MODULES)
    if caller and value is not None and not is_fixed:
        observed.fixed_seeds.add(caller)
    return is_fixed


def _stateless(observed: Observed, original: Callable, *positional: Any, **options: Any) -> tf.Tensor:
    given = inspect.signature(original).bind(*positional, **options).arguments
    if not _is_fixed(observed, given["seed"]):
        return original(**given)
    shape, seed = given.pop("shape"), given.pop("seed")
    if _has_arrays(given):
        return original(shape=shape, seed=seed, **given)
    return draw_for_each_example(original, shape, seed, **given)


def _has_arrays(parameters: dict[str, Any]) -> bool:
    """Whether parameters of a distribution are arrays, which may have an axis of examples themselves."""
    return any(len(getattr(each, "shape", ())) > 0 for each in parameters.values())


def _beta(original: Callable, shape: Any, alpha: Any, beta: Any, dtype: Any = None, seed: Any = None) -> tf.Tensor:
    """In place of `keras.random.beta`."""
    if not len(shape) or _has_arrays({"alpha": alpha, "beta": beta}):
        return original(shape, alpha, beta, dtype, seed)
    return tf.broadcast_to(original((1, *shape[1:]), alpha, beta, dtype, FIXED_SEED[0]), shape)


def _categorical(
    observed: Observed, uniform: Callable, original: Callable, *positional: Any, **options: Any
) -> tf.Tensor:
    """Classes of logits [examples, classes]: every example has the same Gumbel noise."""
    given = inspect.signature(original).bind(*positional, **options).arguments
    if not _is_fixed(observed, given["seed"]):
        return original(**given)
    logits = tf.convert_to_tensor(given["logits"])
    shape = (given["num_samples"], tf.shape(logits)[1])
    noise = -tf.math.log(-tf.math.log(uniform(shape, (1, 2), minval=1e-6, maxval=1.0, dtype=logits.dtype)))
    return tf.argmax(logits[:, None] + noise[None], axis=-1, output_type=given.get("dtype", tf.int64))


def _stateful(stateless: Callable, names: tuple, original: Callable, shape: Any, *positional: Any, **options: Any):
    options |= dict(zip(names, positional, strict=False))
    options.pop("seed", None)
    return draw_for_each_example(stateless, shape, None, **options)


def _by_generator(generator: Any, stateless: Callable, names: tuple, shape: Any, *positional: Any, **options: Any):
    return _stateful(stateless, names, stateless, shape, *positional, **options)


def _dropout(observed: Observed, original: Callable, *positional: Any, **options: Any) -> Any:
    given = inspect.signature(original).bind(*positional, **options).arguments
    return given["x"] if _is_fixed(observed, given["seed"]) else original(**given)
