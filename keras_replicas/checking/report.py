# SPDX-License-Identifier: Apache-2.0
"""The result of a check, as text."""

from collections.abc import Iterable, Sequence

import numpy as np

from keras_replicas.checking.comparison import Difference, Verdict
from keras_replicas.checking.runs import Runs, line_of

TABLE_ROWS = 8
MAX_LEFT_OUT = 5  # names of weights
MAX_NAME_COLUMNS = 44
GRADIENTS = {
    "mean": "a mean over examples",
    "sum": "a sum over examples",
    "either": "0 on the first batch",
    "neither": "neither a mean nor a sum over examples",
}


def header_of(runs: Runs, seconds: float) -> str:
    """What was compared, in one line."""
    sizes = runs.plain.examples.batch_sizes
    whole = max(sizes)
    short = sorted((size for size in sizes if size < whole), reverse=True)
    batches = f"{len(sizes)} steps of {whole}"
    if len(short) == 2:
        batches += f", two of {short[0]} and {short[1]}"
    elif short:
        batches = f"{len(sizes)} steps of {short[-1]} to {whole}"
    model = runs.plain.model
    return (
        f"{type(model).__name__} on {runs.strategy.num_replicas_in_sync} replicas, plain on one device: {model.dtype}, "
        f"{batches}; {seconds:.0f} s"
    )


def report_of(runs: Runs, verdict: Verdict, cause: str) -> str:
    """What was found, in a few lines."""
    replicas = runs.strategy.num_replicas_in_sync
    lines = [_first_difference(verdict.differences[0], replicas), f"why: {cause}"] if verdict.differences else []
    if not lines:
        methods = _compared_methods(runs) if verdict.steps == len(runs.plain.examples.batch_sizes) else []
        compared = ["losses, metrics, weights, state", *methods]
        lines = [f"THE SAME to {verdict.largest:.0e}: {', '.join(compared)}"]
    if verdict.steps < len(runs.plain.examples.batch_sizes):
        lines.append(
            f"not compared: what follows step {verdict.steps}, where plain Keras's own results differ from run to run"
        )
    for name, error in runs.failed_methods.items():
        has_no_call = isinstance(error, NotImplementedError) and not runs.on_replicas.model._has_call
        why = "the model has no call" if has_no_call else line_of(error)
        lines.append(f"not compared: {name}, which plain Keras cannot do here: {why}")
    if runs.left_out:
        names = ", ".join(sorted(runs.left_out)[:MAX_LEFT_OUT])
        lines.append(f"not compared: {names}, whose gradient is nothing but rounding")
    return "\n".join([*lines, *_custom_steps(runs)])


def _compared_methods(runs: Runs) -> list[str]:
    found = {"evaluate": "evaluation", "predict": "predictions"}
    return [text for name, text in found.items() if name not in runs.failed_methods]


def _first_difference(difference: Difference, replicas: int) -> str:
    one, other = _numbers(difference)
    figures = f": {one} on one device, {other} on {replicas} replicas" if difference.record.value.size == 1 else ""
    return f"DIFFERENT, first the {difference.record}, by {difference.relative:.0e}{figures}"


def _custom_steps(runs: Runs) -> Iterable[str]:
    """A line for each custom step whose optimizers' gradients were measured."""
    plans = runs.on_replicas.model.step_plans
    measured = plans.gradient_kinds if plans is not None else {}
    for step, kinds in measured.items():
        if kinds:
            yield f"{step}: " + "; ".join(f"{optimizer} gets {GRADIENTS[kind]}" for optimizer, kind in kinds)


def table_of(differences: Sequence[Difference], replicas: int) -> str:
    """A table of what differs, each value at the first step where it does.

    Args:
        differences: in the order of training.
        replicas: their number.
    """
    firsts: dict[tuple[str, str], Difference] = {}
    for difference in differences:
        firsts.setdefault((difference.record.kind, difference.record.name), difference)
    chosen = list(firsts.values())
    rows = [("value", "step", "one device", f"{replicas} replicas", "relative")]
    for difference in chosen[:TABLE_ROWS]:
        record = difference.record
        name = f"{record.kind} {record.name}"[:MAX_NAME_COLUMNS]
        rows.append((name, str(record.step), *_numbers(difference), f"{difference.relative:.0e}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    left_out = len(chosen) - TABLE_ROWS
    return "\n".join([*lines, f"and {left_out} more"] if left_out > 0 else lines)


def _numbers(difference: Difference) -> tuple[str, str]:
    return _shown(difference.record.value), _shown(difference.other)


def _shown(value: np.ndarray | None) -> str:
    """A scalar, or the norm of an array."""
    if value is None:
        return "none"
    if not np.issubdtype(value.dtype, np.number):
        return str(value.ravel()[0]) if value.size else "empty"
    return f"{value.item():.7g}" if value.size == 1 else f"|{np.linalg.norm(value):.7g}|"
