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
import inspect
import itertools
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.errors import UserError
from keras_replicas.model import data_parallel
from keras_replicas.replicas import sum_rows
from keras_replicas.strategy import make_strategy
from keras_replicas.trainer import Trainer

# Of Euclidean norms, relative to plain Keras's: what may differ, and by what plain Keras may differ from itself.
LIMIT, NOISE = 1e-6, 1e-4
ROUNDING = 1e-12  # what is only that, in float64, whatever the norm
ROUNDED = ("weight", "optimizer's")  # kinds of which some values are nothing else
SKETCH = 4096  # numbers that are kept of a large tensor


class CheckResult(NamedTuple):
    """What `check` found. It is true if nothing differs; its `str` is `text`.

    Attributes:
        same: whether nothing differs.
        first: what differs first, and by how much; "" if nothing does.
        reason: why that is likely.
        text: a report of a few lines.
    """

    same: bool
    first: str
    reason: str
    text: str

    def __bool__(self) -> bool:
        return self.same

    def __repr__(self) -> str:
        return self.text


class Value(NamedTuple):
    """A value to be compared."""

    kind: str
    name: str
    step: int
    value: np.ndarray


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
        What was found. It is true if all is the same to 1e-6, or to ten times what plain Keras itself differs by with
        the examples of a batch in another order.

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
    each, rest = max(1, steps // 2), max(1, batch_size // 2 - 1)
    ends = [(each - 1) * batch_size + rest, 2 * (each - 1) * batch_size + rest + 1]
    parts = np.split(np.arange(ends[1]) % leaves[0].shape[0], ends[:1])
    train = functools.partial(_train, build, data, parts, batch_size, seed)
    model, plain, noise, unsteady, ours = _trained(train, strategy)
    first, why, same, several = "", "", 0.0, f"{strategy.num_replicas_in_sync} replicas"
    if unsteady:
        first = f"NOT CHECKED: {unsteady}"
        why = (
            "plain Keras differs there from run to run, or is no number: draw noise by keras.random, and seed the rest"
        )
    elif isinstance(ours, Exception):
        first, why = "REFUSED", f"{type(ours).__name__}: {' '.join(str(ours).split())[:400]}"
    else:
        for value, other, by, may in zip(plain, ours, _distances(plain, ours), noise, strict=True):
            size = np.linalg.norm(value.value)
            if not by <= max(may, bound := LIMIT * size + ROUNDING):
                first = f"DIFFERENT, first the {value.name}, by {by / size:.0e}"
                if value.value.size == 1:
                    first += f": {value.value.item():.7g} on one device, {other.value.item():.7g} on {several}"
                why = _reason(model, _rows(data[0], parts[0]), value, batch_size, value.step in (each, 2 * each))
                break
            if may <= bound:  # else it is rounding alone
                same = max(same, (by - ROUNDING) / size if size else 0.0)
    text = (
        f"{type(model).__name__}: plain Keras on one device against {several}, {2 * each} steps of {batch_size}, two of "
        f"them of {rest} and 1, in {model.dtype}, {time.perf_counter() - began:.0f} s\n"
    )
    found = f"{first}\nwhy: {why}" if first else f"THE SAME to {same:.0e}: fit, evaluate, predict"
    return CheckResult(not first, first, why, text + found)


def _trained(train, strategy):
    """Plain Keras's model and values, what they may differ by, which differs from run to run, and ours, or its error."""
    for dtype in ("float64", ""):
        with contextlib.suppress(Exception) if dtype else contextlib.nullcontext(), _comparable(dtype):
            model, start, plain = train()
            for reorder in (True, False):  # what depends on the order may still be the same in every run
                noise = _distances(plain, train(start, reorder=reorder)[2])
                pairs = [(value, by) for value, by in zip(plain, noise, strict=True) if value.kind not in ROUNDED]
                unsteady = [v.name for v, by in pairs if not by <= NOISE * np.linalg.norm(v.value) + ROUNDING]
                if not unsteady:
                    break
            try:
                with warnings.catch_warnings(action="ignore"):
                    ours = train(start, strategy)[2]
            except Exception as error:
                if dtype:
                    raise
                ours = error
            break
    return model, plain, [10 * by for by in noise], next(iter(unsteady), ""), ours


def _train(build, data, parts, batch_size, seed, start=None, strategy=None, reorder=False):
    """A model that plain Keras has trained, or ours with a strategy; its weights at the start; and the `Value`s."""
    keras.utils.set_random_seed(seed)
    with strategy.scope() if strategy else contextlib.nullcontext():
        made = build()
        model = made[0] if isinstance(made, tuple) else made
        if not isinstance(model, keras.Model) or not model.compiled:
            raise UserError(f"the function must return a compiled model, or (model, x, y); it returned {made!r}")
        if strategy and not isinstance(model, Trainer):
            data_parallel(model)
    if {layer.compute_dtype for layer in model._flatten_layers()} & {"float16", "bfloat16"}:
        raise UserError("the model computes in half precision, too coarse to compare: leave that out for check")
    if not strategy:
        if model.distribute_strategy.num_replicas_in_sync > 1:
            raise UserError("the function that makes the model must use no strategy: check does")
        model.__class__ = getattr(type(model), "plain_class", type(model))
        for layer in model._flatten_layers():
            vars(layer).pop("_moments", None)  # of ours
        with contextlib.suppress(Exception):  # it has no call
            model._symbolic_build(data_batch=tuple(_rows(data, parts[0])))
        if model.optimizer is not None and not _has_own(model, "train_step"):
            _get_each_row_once(model.optimizer)
    model.steps_per_execution = 1
    watch, random = Watch(start), np.random.default_rng(seed)
    for rows in parts:
        if reorder:
            batches = np.split(rows, range(batch_size, len(rows), batch_size))
            rows = np.concatenate([random.permutation(batch) for batch in batches])
        x, y, weight = _rows(data, rows)
        model.fit(x, y, batch_size, 1, 0, [watch], sample_weight=weight, shuffle=False)
    x, y, weight = _rows(data, parts[0])
    with contextlib.suppress(NotImplementedError):  # it has no call
        watch.note("evaluate", "evaluate's {}", model.evaluate(x, y, batch_size, 0, weight, return_dict=True))
        outputs = keras.tree.flatten(model.predict(x, batch_size, 0))
        watch.note("predict", "output {} of predict", dict(enumerate(outputs)))
    return model, watch.start, watch.values


class Watch(keras.callbacks.Callback):
    """Gives a model its weights at the start, and notes the values after each step."""

    def __init__(self, start: list[np.ndarray] | None):
        super().__init__()
        self.start, self.step = start, 0
        self.values: list[Value] = []

    def note(self, kind, told, values):
        """Keeps values by name; of a large one, `SKETCH` sums with random signs, whose norm is much the same."""
        for name in sorted(values, key=lambda name: (name != "loss", name)):
            value = np.asarray(values[name])
            if value.size > SKETCH:
                signs = np.random.default_rng(0).choice([-1.0, 1.0], value.size)
                value = np.bincount(np.arange(value.size) % SKETCH, signs * value.ravel())
            self.values.append(Value(kind, told.format(name), self.step, value))

    def on_train_begin(self, logs=None):
        """All is built by now."""
        if self.step == 0 and self.start:
            self.model.set_weights(self.start)
        self.start = self.start or self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        """Losses and metrics are running means."""
        self.step += 1
        self.note("log", f"{{}} until step {self.step}", logs)
        trained = {id(variable) for variable in self.model.trainable_variables}
        optimizer = getattr(self.model.optimizer, "variables", [])
        kinds = {id(variable): "optimizer's" for variable in optimizer} | dict.fromkeys(trained, "weight")
        for variable in (
            [*self.model.non_trainable_variables, *optimizer, *self.model.trainable_variables]
        ):
            if variable.name != "seed_generator_state":
                kind = kinds.get(id(variable), "layer state")
                self.note(kind, f"{kind} {{}} after step {self.step}", {variable.path: variable.numpy()})


def _reason(model, x, differs: Value, batch_size: int, is_uneven: bool) -> str:
    """The likely one."""
    if layer := _looks_at_others(model, x, batch_size // 2 or 1):
        return (
            f"call looks at the other examples of its batch, from {layer} on, and a replica has only its own: do that "
            "in compute_loss, which sees the whole batch, or train on one replica"
        )
    step = {"evaluate": "test_step", "predict": "predict_step"}.get(differs.kind, "train_step")
    if _has_own(model, step):
        mean = f"a mean of means: {type(model).__name__}.{step} takes the mean of each replica's examples"
        if is_uneven or step != "train_step":
            return f"{mean}, of which some have fewer. Compute the loss in compute_loss, which sees the whole batch"
        return (
            "gradients are added up over replicas: divide a mean by self.distribute_strategy.num_replicas_in_sync. In "
            f"uneven batches it is then {mean}; what compute_loss computes is right in all"
        )
    if differs.kind == "layer state":
        return "each replica updates it from its own examples, and it is no mean over them, as a counter or a queue"
    return "none that is known: please report it, with the model"


def _looks_at_others(model, x, size: int) -> str:
    """The first layer whose outputs for `size` examples are not those that it has for all; "" if there is none."""
    layers = [
        layer for layer in model.layers if getattr(model, "inputs", None) and getattr(layer, "output", None) is not None
    ]
    probe = keras.Model(model.inputs, [layer.output for layer in layers]) if layers else model
    names = [layer.name for layer in layers for _ in keras.tree.flatten(layer.output)] or itertools.repeat("it")
    rows = np.arange(keras.tree.flatten(x)[0].shape[0])
    moments = any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers())
    with contextlib.suppress(Exception), _comparable():  # a model need not have a call
        for training in (False,) if moments else (False, True):  # which looks at the others, rightly
            call = tf.function(functools.partial(probe, training=training), autograph=False)
            whole = keras.tree.flatten(call(x))
            for part in np.split(rows, range(size, len(rows), size)):
                for name, of_all, own in zip(names, whole, keras.tree.flatten(call(_rows(x, part))), strict=False):
                    of_part = tf.gather(of_all, part)
                    if of_part.shape != own.shape or not np.allclose(of_part, own, 1e-5, 1e-6):
                        return name
    return ""


def _has_own(model, step: str) -> bool:
    own = getattr(getattr(type(model), "plain_class", type(model)), step)
    return own is not getattr(keras.Model, step) and "super" not in inspect.unwrap(own).__code__.co_names


def _rows(data, rows):
    return keras.tree.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, rows), data)


def _distances(plain: list[Value], other: list[Value]) -> list[float]:
    pairs = [(one.value, two.value) for one, two in zip(plain, other, strict=True)]
    return [float(np.linalg.norm(two - one.astype(float))) if one.shape == two.shape else np.inf for one, two in pairs]


def _get_each_row_once(optimizer: keras.Optimizer) -> None:
    apply = optimizer.apply

    def apply_summed(gradients, *variables):
        return apply([sum_rows(each) if isinstance(each, tf.IndexedSlices) else each for each in gradients], *variables)

    optimizer.apply = apply_summed


@contextlib.contextmanager
def _comparable(dtype: str = "") -> Iterator[None]:
    """Makes a dtype Keras's, all examples draw the same noise in every step, and dropout drop nothing."""

    def of_one_example(draw):
        def drawn(shape, **given):
            if not tf.inside_function():  # as weights are drawn
                return draw(shape=shape, **given)
            shape = tf.convert_to_tensor(shape, tf.int32)
            one = tf.concat([tf.ones_like(shape[:1]), shape[1:]], axis=0)
            return tf.broadcast_to(draw(shape=one, **given | {"seed": (1, 2)}), shape)

        return drawn

    with contextlib.ExitStack() as stack:
        stack.callback(keras.config.set_floatx, keras.config.floatx())
        stack.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
        stack.enter_context(mock.patch.object(tf.nn.experimental, "stateless_dropout", lambda x, **_: x))
        for name in ("stateless_normal", "stateless_uniform", "stateless_truncated_normal"):
            stack.enter_context(mock.patch.object(tf.random, name, of_one_example(getattr(tf.random, name))))
        if dtype:
            keras.config.set_floatx(dtype)
            keras.config.set_dtype_policy(dtype)
        yield


def command(options: argparse.Namespace) -> int:
    """Prints what `check` finds of the function that the command line names, and returns the exit status.

    Raises:
        UserError: when there is no such function, or as `check`.
    """
    tf.get_logger().setLevel("ERROR")  # else it warns of the many functions that are traced
    file, _, name = options.function.rpartition(":")
    if not Path(file).is_file():
        raise UserError(f"there is no file {file!r}: give FILE:FUNCTION, as in train.py:sample")
    make_strategy(options.replicas)  # before the file uses a device
    sys.path.insert(0, str(Path(file).resolve().parent))
    function = runpy.run_path(file, run_name=Path(file).stem).get(name)
    if not callable(function):
        raise UserError(f"{file} has no function {name!r}")
    result = check(function, batch_size=options.batch_size, replicas=options.replicas, steps=options.steps)
    print(result)
    return 0 if result else 1
