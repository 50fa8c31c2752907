# SPDX-License-Identifier: Apache-2.0
"""`check`: whether N replicas teach somebody's own model what plain Keras teaches it on one device.

Plain Keras's trainer trains the model's plain class on one device; ours trains the model on N replicas, from the same
weights on the same batches. What differs first is named, with the likely reason. So that nothing is hidden, and no
rounding is taken for a fault:

- Both compute in float64 where the model can. Rounding is then far below what a fault changes, even where gradients are
  nothing else, as those of the biases of attention's keys.
- Plain Keras trains once more, with the examples of each batch in another order: what that changes is rounding, too.
- The optimizer's state is compared. Adam's weights hide a gradient that is N times too large; its averages do not.
- Noise is the same for all examples, and dropout drops nothing.
- Plain Keras's optimizer gets each row of an `Embedding`'s gradient once, as ours does. By itself, it squares the rows
  of a token that is repeated one by one.
"""

import argparse
import contextlib
import functools
import math
import operator
import runpy
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.errors import UserError
from keras_replicas.loop import has_own
from keras_replicas.model import data_parallel
from keras_replicas.reasons import comparable, likely_reason, rows_of
from keras_replicas.replicas import sum_rows
from keras_replicas.strategy import make_strategy
from keras_replicas.trainer import Trainer
from keras_replicas.watch import KINDS, Watch

# Of Euclidean norms, relative to plain Keras's: what may differ, and by what plain Keras may differ from itself.
LIMIT, NOISE = 1e-6, {"float64": 1e-4, "": 0.1}  # Adam makes large steps of float32's rounding
ROUNDING = 1e-12  # what is only that, in float64, whatever the norm
ROUNDED = KINDS[1:]  # some of these are nothing but rounding


class CheckResult(NamedTuple):
    """What `keras_replicas.check` found. It is true if nothing differs; its `str` is `text`.

    Attributes:
        same: whether nothing differs.
        text: two or three lines: what was compared; by how much it differs, and what first; the likely reason.
        difference: the largest relative one, of what is not rounding alone; or the first that is too large; infinite
            if nothing was compared.
    """

    same: bool
    text: str
    difference: float

    def __bool__(self) -> bool:
        return self.same

    def __repr__(self) -> str:
        return self.text


def check(
    build: Callable[[], Any],
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int = 8,
    replicas: int = 2,
    steps: int = 8,
    seed: int = 0,
) -> CheckResult:
    """Compares `fit`, `evaluate` and `predict` of your model on N replicas with plain Keras on one device.

    In a test::

        def test_replicas_learn_what_one_device_would():
            assert keras_replicas.check(build_model, x, y)

    `python -m keras_replicas check FILE:FUNCTION` is the same, of a function that returns (model, x, y). It prints
    nothing: print the result. It seeds Python's, NumPy's and TensorFlow's random numbers. Call it before anything else
    touches a device, which could not be split then; in tests, call `make_strategy(2)` in conftest.py.

    Args:
        build: makes the compiled model, plain or by `data_parallel`, under no strategy. It is called several times,
            with float64 as Keras's dtype if the model can. It may return (model, x, y) or (model, x, y, sample_weight).
        x: some examples, as for `fit`: arrays or tensors, or structures of them, each [examples, ...]. They are
            repeated if there are too few.
        y: as for `fit`.
        sample_weight: as for `fit`.
        batch_size: examples in a batch, of all replicas together.
        replicas: of this machine: GPUs, or logical devices of the only one, or of the CPU.
        steps: how many to train. Two have fewer examples, which leave a replica with fewer than others, or none.
        seed: of the weights, if `build` draws them.

    Returns:
        What was found. It is true if all is the same to 1e-6, in Euclidean norms relative to plain Keras's, or to ten
        times what plain Keras itself differs by with the examples of a batch in another order.

    Raises:
        UserError: when the devices cannot be split any more, there are no examples, or what `build` makes is no
            compiled model, uses a strategy or computes in float16 or bfloat16.
        Exception: what plain Keras raises when it trains the model.
    """
    began, strategy = time.perf_counter(), make_strategy(replicas)
    made = build() if x is None else (None, x, y, sample_weight)
    data = [*made[1:], None, None][:3] if isinstance(made, tuple) else []
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    if not leaves or not all(getattr(leaf, "shape", None) and leaf.shape[0] for leaf in leaves):
        raise UserError("give examples as arrays: check(build, x, y), or a function that returns (model, x, y)")
    each, rest = max(1, steps // 2), max(1, batch_size - 1)
    ends = [(each - 1) * batch_size + rest, 2 * (each - 1) * batch_size + rest + 1]
    parts = np.split(np.arange(ends[1]) % leaves[0].shape[0], ends[:1])
    train = functools.partial(_train, build, data, parts, batch_size, seed)
    model, plain, noise, unsteady, ours = _trained(train, strategy)
    found, why, several = "", "", f"{strategy.num_replicas_in_sync} replicas"
    if unsteady:
        found, why = f"NOT CHECKED: {unsteady}", "plain Keras differs from run to run, or is no number: seed its noise"
    elif isinstance(ours, Exception):
        found, why = "REFUSED", f"{type(ours).__name__}: {' '.join(str(ours).split())[:400]}"
    compared = [] if found else zip(plain, ours, _distances(plain, ours), noise, strict=False)
    largest = math.inf if found else 0.0
    different = []
    for (kind, step, name, value), (*_, other), by, may in compared:
        size = np.linalg.norm(value)
        if not by <= max(may, LIMIT * size + ROUNDING):
            different.append((kind, step, name, value, other, by / (size or 1)))
        elif may <= LIMIT * size:  # else it is rounding alone
            largest = max(largest, by / (size + ROUNDING / LIMIT))
    if different:
        kind, step, name, value, other, largest = different[0]
        figures = f": {value.item():.7g} on one device, {other.item():.7g} on {several}" if value.size == 1 else ""
        found = f"DIFFERENT, first the {name}, by {largest:.0e}{figures}"
        why = likely_reason(model, data[0], batch_size // 2 or 1, kind)
    head = f"{type(model).__name__} on {several}, plain on one device: {model.dtype}, {2 * each} steps of {batch_size}"
    same = f"THE SAME to {largest:.0e}: losses, metrics, weights, state, predictions"
    said = f"{found}\nwhy: {why}" if found else same
    return CheckResult(not found, f"{head}, two of {rest} and 1; {time.perf_counter() - began:.0f} s\n{said}", largest)


def _trained(train, strategy):
    """Plain Keras's model and values, what they may differ by, the first without a bound, and ours, or its error."""
    for dtype in ("float64", ""):
        tried = contextlib.suppress(Exception) if dtype else contextlib.nullcontext()
        with tried, comparable(dtype), warnings.catch_warnings(action="ignore"):
            model, start, plain = train()
            limits = [1e300 if v[0] in ROUNDED else NOISE[dtype] * np.linalg.norm(v[3]) + ROUNDING for v in plain]
            noise = [np.inf] * len(plain)
            for other in ("order", "seed"):  # what depends on the order may still be the same in every run
                if not all(map(operator.le, noise, limits)):
                    again = _distances(plain, train(start, other=other)[2])
                    noise = [by if by <= limit else new for by, limit, new in zip(noise, limits, again, strict=True)]
            unsteady = [v[2] for v, by, limit in zip(plain, noise, limits, strict=True) if not by <= limit]
            try:
                ours = train(start, strategy)[2]
            except Exception as error:
                if dtype:
                    raise
                ours = error
            break
    return model, plain, [10 * by for by in noise], next(iter(unsteady), ""), ours


def _train(build, data, parts, batch_size, seed, start=None, strategy=None, other=""):
    """A model that plain Keras has trained, or ours with a strategy; its weights at the start; and what came out."""
    keras.utils.set_random_seed(seed + (other == "seed"))
    with strategy.scope() if strategy else contextlib.nullcontext():
        made = build()
        model = made[0] if isinstance(made, tuple) else made
        if not isinstance(model, keras.Model) or not model.compiled:
            given = ", ".join(type(each).__name__ for each in (made if isinstance(made, tuple) else [made]))
            raise UserError(f"the function must return a compiled model, or (model, x, y), not ({given})")
        if strategy and not isinstance(model, Trainer):
            data_parallel(model)
    if {layer.compute_dtype for layer in model._flatten_layers()} & {"float16", "bfloat16"}:
        raise UserError("float16 and bfloat16 are too coarse to compare: build the model in float32 for check")
    if not strategy:
        if model.distribute_strategy.num_replicas_in_sync > 1:
            raise UserError("the function that makes the model must not use a strategy: check makes its own")
        model.__class__ = getattr(type(model), "plain_class", type(model))
        for layer in model._flatten_layers():
            vars(layer).pop("_moments", None)  # of ours
        with contextlib.suppress(Exception):  # it has no call
            model._symbolic_build(data_batch=tuple(rows_of(data, parts[0])))
        if model.optimizer is not None:
            apply = model.optimizer.apply
            model.optimizer.apply = lambda gradients, *rest: apply(list(map(_each_row_once, gradients)), *rest)
    model.steps_per_execution, how = 1, {"batch_size": batch_size, "verbose": 0}
    watch, random = Watch(start), np.random.default_rng(seed)
    for rows in parts:
        batches = np.split(rows, range(batch_size, len(rows), batch_size))
        order = np.concatenate([random.permutation(batch) for batch in batches]) if other == "order" else rows
        x, y, weight = rows_of(data, order)
        model.fit(x, y, sample_weight=weight, shuffle=False, callbacks=[watch], **how)
    x, y, weight = rows_of(data, parts[0])
    with contextlib.suppress(NotImplementedError):  # it has no call
        if model._compile_loss or model.losses or has_own(model, "test_step") or has_own(model, "compute_loss"):
            watch.note("evaluate", model.evaluate(x, y, sample_weight=weight, return_dict=True, **how))
        outputs = keras.tree.flatten(model.predict(x, **how))
        watch.note("predict", {f"output {index}": output for index, output in enumerate(outputs)})
    return model, watch.start, watch.values


def _distances(plain, other):
    pairs = [(one, two) for (*_, one), (*_, two) in zip(plain, other, strict=False)]
    return [float(np.linalg.norm(two - one.astype(float))) if one.shape == two.shape else np.inf for one, two in pairs]


def _each_row_once(gradient):
    return sum_rows(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def command(options: argparse.Namespace) -> int:
    """Prints what `check` finds of the function that the command line names, and returns the exit status.

    Raises:
        UserError: when there is no such function, or as `check`.
    """
    tf.get_logger().setLevel("ERROR")  # else it warns of the many functions that are traced
    file, _, name = options.function.rpartition(":")
    if not Path(file).is_file():
        raise UserError(f"there is no file {file or name!r}: give FILE:FUNCTION, as in models.py:sample")
    make_strategy(options.replicas)  # before the file uses a device
    sys.path.insert(0, str(Path(file).resolve().parent))
    function = runpy.run_path(file, run_name=Path(file).stem).get(name)
    if not callable(function):
        raise UserError(f"{file} has no function {name!r}: give FILE:FUNCTION, as in models.py:sample")
    result = check(function, batch_size=options.batch_size, replicas=options.replicas, steps=options.steps)
    print(result)
    return 0 if result else 1
