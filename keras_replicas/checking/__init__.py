# SPDX-License-Identifier: Apache-2.0
"""`check`: whether a model of the user's own is equivalent to one device when it trains on N replicas.

- `examples.py` makes a few batches of what the user gives, two of them short.
- `traces.py` trains a model on them, and records all that a step changes; `repeatable.py` fixes what else would differ.
- `runs.py` does this on replicas, and in plain Keras on one device, several times.
- `comparison.py` finds what differs by more than rounding.
- `reasons.py` finds the likely cause, by experiments; `report.py` writes the result.
- `command.py` is `python -m keras_replicas check`.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_replicas.checking.comparison import Difference
from keras_replicas.checking.examples import replayable
from keras_replicas.checking.reasons import likely_cause
from keras_replicas.checking.report import header_of, report_of
from keras_replicas.checking.runs import Refusal, Settings, compared_runs
from keras_replicas.errors import UserError
from keras_replicas.strategy import make_strategy

__all__ = ["CheckResult", "check"]


class CheckResult(NamedTuple):
    """What `keras_replicas.check` found. It is true if nothing differs; its `str` is `text`.

    Attributes:
        same: whether nothing differs.
        text: what was compared; what differs first, by how much, and the likely cause.
        difference: relative, the largest of what is not rounding alone; or the first that is too large; infinite if
            nothing was compared.
        differences: all values that differ, in the order of training.
    """

    same: bool
    text: str
    difference: float
    differences: tuple[Difference, ...] = ()

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
    """Compares `fit`, `evaluate` and `predict` of a model on N replicas with plain Keras on one device.

    In a test::

        def test_replicas_train_as_one_device():
            assert keras_replicas.check(build_model, x, y)

    `python -m keras_replicas check FILE:FUNCTION` does the same for a function that returns (model, x, y). `check`
    prints nothing: print the result. It seeds the random numbers of Python, NumPy and TensorFlow. Call it before
    anything else uses a device, which could not be split then; in tests, call `make_strategy(2)` in conftest.py.

    - Both models compute in float64 if they can. Rounding is then far below what a fault changes.
    - The optimizers' state is compared, too. Adam's weights hide a gradient that is N times too large; its averages do
      not.
    - All examples draw the same random numbers, and dropout drops nothing. Draws from a constant seed stay.
    - Plain Keras's optimizer gets each row of an `Embedding`'s gradient once, as on replicas. By itself, it squares the
      rows of a token that is repeated one by one.

    Args:
        build: makes the compiled model, plain or by `data_parallel`, under no strategy. It is called several times. It
            may return (model, x, y), (model, x, y, sample_weight) or (model, dataset).
        x: some examples, as for `fit`: arrays or structures of them, each [examples, ...]; or a `tf.data.Dataset`, a
            `PyDataset`, a generator or a DataLoader of PyTorch, of which a few batches are read. Examples are repeated
            if there are too few.
        y: as for `fit`.
        sample_weight: as for `fit`.
        batch_size: examples in a batch of arrays, of all replicas together.
        replicas: the number of replicas on this machine: one per GPU, or logical devices of a single GPU or of the CPU.
        steps: how many to train, an even number of at least two; it is rounded down. Two batches are short, so that a
            replica has fewer examples than others, or none. They are full where plain Keras fails with short ones.
        seed: of the weights, if `build` draws them.

    Returns:
        What was found. It is true if all is the same to 1e-6, in Euclidean norms relative to plain Keras's, or to ten
        times what plain Keras itself differs by when the examples of a batch have another order.

    Raises:
        UserError: when a number is too small, the devices cannot be split any more, there are no examples, or what
            `build` makes is no compiled model, not a new one each time, uses a strategy or computes in float16 or
            bfloat16.
        Exception: what plain Keras raises when it trains the model.
    """
    began = time.perf_counter()
    for name, value, least in (("batch_size", batch_size, 1), ("replicas", replicas, 1), ("steps", steps, 2)):
        if value < least:
            raise UserError(f"{name} must be at least {least}, not {value}")
    if isinstance(build, keras.Model):
        raise UserError("give check the function that makes the model, not the model: it is made several times")
    strategy = make_strategy(replicas)
    steps = steps // 2 * 2
    data = None if x is None else (replayable(x, steps), y, sample_weight)
    runs = compared_runs(Settings(build, data, batch_size, steps, seed, strategy, weakref.WeakSet()))
    header = header_of(runs, seconds=time.perf_counter() - began)
    if isinstance(runs.outcome, Refusal):
        return CheckResult(False, f"{header}\n{runs.outcome}", float("inf"))
    verdict = runs.outcome
    cause = likely_cause(runs, verdict) if verdict.differences else ""
    text = report_of(runs, verdict, cause)
    largest = verdict.differences[0].relative if verdict.differences else verdict.largest
    return CheckResult(not verdict.differences, f"{header}\n{text}", largest, tuple(verdict.differences))
