# SPDX-License-Identifier: Apache-2.0
"""What a model's `call` does with its examples: found by calling it on a few of them, together and apart.

Each replica calls the model on its own examples. So a model is right on several replicas only where an example's
outputs do not depend on the other examples of the batch. And what `call` gives to `add_loss` is combined over replicas
as a mean or as a sum, which the same calls tell.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.batchnorm import fixed_moments
from keras_replicas.cluster import is_chief, num_workers
from keras_replicas.combination import combination_of, relative_difference
from keras_replicas.errors import UserError
from keras_replicas.state import aggregation_needed
from keras_replicas.trial_run import (
    SHARDS,
    as_numbers,
    as_one_replica,
    constant_batch_size,
    rows_of,
    sizes_of_shards,
    slice_of,
    tolerance_of,
    undone,
    unlike_examples,
    without_optionals,
)
from keras_replicas.workers import exchange

EXAMPLES = sum(SHARDS)


class CallFindings(NamedTuple):
    """What the probe found.

    Attributes:
        losses: of each of the model's losses of layers, in their order, how replicas' scalars combine: "mean", "sum",
            or "either" where they are 0.
        warnings: what cannot be the same on several replicas, and what to do.
    """

    losses: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class _LayerCall(NamedTuple):
    """A call of a layer: its name, and the tensors that it was given and returned."""

    name: str
    inputs: list[Any]
    outputs: list[Any]


class _Run(NamedTuple):
    """What one call of the model computed.

    Attributes:
        outputs: tensors.
        losses: of layers.
        added: what it added to the variables of layers that do not say how replicas combine them, by name.
        layer_calls: all calls of layers, if they are asked for.
    """

    outputs: list[Any]
    losses: list[Any]
    added: dict[str, np.ndarray]
    layer_calls: list[_LayerCall]


def agreed_findings(model: Any, x: Any, training: bool) -> CallFindings:
    """What `probe_call` finds; on several workers, what the chief finds. All workers call it."""
    if num_workers() == 1:
        return probe_call(model, x, training)
    try:
        found = probe_call(model, x, training)
    except UserError as refusal:
        exchange({"error": str(refusal)})  # raises it on all workers
        raise
    chiefs = exchange({"losses": found.losses, "warnings": found.warnings})[0]
    return CallFindings(tuple(chiefs["losses"]), tuple(chiefs["warnings"]) if is_chief() else ())


def probe_call(model: Any, x: Any, training: bool) -> CallFindings:
    """Finds whether a model compares examples, and how the losses of its layers combine. It leaves no trace.

    Args:
        model: of `data_parallel`, built.
        x: the model's input for a batch, of all replicas of this worker.
        training: whether to call it as in training.

    Raises:
        UserError: when the model can be called on the batch, but not on a part of it; or when a layer counts examples
            in a variable that does not say how replicas combine it.
    """
    try:
        examples = unlike_examples(x)
        parts = (examples, slice_of(examples, 0, SHARDS[0]), slice_of(examples, SHARDS[0], EXAMPLES))
        whole, first, second = (_call(model, part, training) for part in parts)
    except Exception:
        _refuse_constant_batch_size(model, x, training)
        return CallFindings()
    _refuse_counters(model, whole, first, second)
    losses, warnings = _compare_losses(model, SHARDS, whole, first, second)
    if "either" in losses and rows_of(x) > EXAMPLES:
        losses, warnings = _compare_losses_on_batch(model, x, training)
    tolerance, is_ragged = tolerance_of(model), _has_ragged(x)
    difference = _difference(whole.outputs, first.outputs, second.outputs, is_ragged)
    if difference > tolerance:
        # Only now are the outputs of all layers kept, which may be large.
        whole, first, second = (_call(model, part, training, with_layers=True) for part in parts)
        where = _first_that_differs(whole, first, second, tolerance, is_ragged) or f"{type(model).__name__}.call"
        warnings.append(
            f"the outputs of {where} for an example depend on the other examples of the batch (they differ by "
            f"{difference:.1g}, relative to the largest), and a replica has its part of the batch alone"
        )
    return CallFindings(losses, tuple(warnings))


def _call(model: Any, x: Any, training: bool, with_layers: bool = False) -> _Run:
    """Calls the model eagerly, as on one replica, and undoes what that did."""
    layer_calls: list[_LayerCall] = []
    options = {"training": training} if model._call_has_training_arg else {}
    with undone(model) as scope, as_one_replica(model), fixed_moments(lambda layer: lambda *_: None):
        for layer in model._flatten_layers(include_self=False) if with_layers else ():
            vars(layer)["call"] = _noting_calls(layer, layer_calls)  # which `undone` takes away
        with scope:
            outputs = model(x, **options)
            losses = list(model.losses)
    added = {name: scope.assigned[name][1] - scope.assigned[name][0] for name in scope.undeclared}
    return _Run(_tensors(outputs), losses, added, layer_calls)


def _noting_calls(layer: Any, layer_calls: list[_LayerCall]) -> Any:
    call, name = layer.call, layer.name

    def noting(*args, **kwargs):
        outputs = call(*args, **kwargs)
        layer_calls.append(_LayerCall(name, _tensors((args, kwargs)), _tensors(outputs)))
        return outputs

    return noting


def _tensors(outputs: Any) -> list[Any]:
    """The tensors of a structure that have values: none of a graph that a layer traces."""
    leaves = keras.tree.flatten(outputs)
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, tf.RaggedTensor) or (isinstance(leaf, tf.Tensor) and not tf.is_symbolic_tensor(leaf))
    ]


def _refuse_counters(model: Any, whole: _Run, first: _Run, second: _Run) -> None:
    """Refuses a variable of a layer that counts examples, and does not say so.

    Where shapes are known, a number of examples is a constant in the graph, which seems the same on all replicas.

    Raises:
        UserError: then.
    """
    for name in sorted(whole.added.keys() & first.added.keys() & second.added.keys()):
        added = [[each.added[name]] for each in (first, second)]
        if combination_of([whole.added[name]], added, SHARDS, tolerance_of(model)).kind == "sum":
            raise UserError(aggregation_needed(name))


def _compare_losses_on_batch(model: Any, x: Any, training: bool) -> tuple[tuple[str, ...], list[str]]:
    """What `_compare_losses` gives of the whole batch: on a few examples, a loss may be 0."""
    batch, sizes = without_optionals(x), sizes_of_shards(rows_of(x))
    parts = batch, slice_of(batch, 0, sizes[0]), slice_of(batch, sizes[0], sum(sizes))
    return _compare_losses(model, sizes, *(_call(model, part, training) for part in parts))


def _compare_losses(
    model: Any, sizes: tuple[int, int], whole: _Run, first: _Run, second: _Run
) -> tuple[tuple[str, ...], list[str]]:
    """How the losses of layers combine, and warnings of those that are neither means nor sums.

    Args:
        model: that was called.
        sizes: of the two shards.
        whole, first, second: what its calls gave.
    """
    kinds: list[str] = []
    warnings: list[str] = []
    if not len(whole.losses) == len(first.losses) == len(second.losses):
        return (), [f"{type(model).__name__} does not call add_loss equally often for all batches"]
    for number, (loss, *of_shards) in enumerate(zip(whole.losses, first.losses, second.losses, strict=True), 1):
        kind = "mean"
        if not loss.shape.rank:
            shards = [[as_numbers(each)] for each in of_shards]
            found = combination_of([as_numbers(loss)], shards, sizes, tolerance_of(model))
            kind = "mean" if found.kind == "neither" else found.kind
            if found.kind == "neither":
                warnings.append(
                    f"loss {number} of those that layers of {type(model).__name__} add by add_loss is neither the mean "
                    f"nor the sum over the examples (they differ by {found.difference:.1g}); it is averaged over "
                    "replicas. Give add_loss a value for each example"
                )
        kinds.append(kind)
    return tuple(kinds), warnings


def _first_that_differs(whole: _Run, first: _Run, second: _Run, tolerance: float, is_ragged: bool) -> str | None:
    """The first call of a layer, inner ones first, whose outputs differ between batch and shard, and inputs do not."""
    calls = zip(whole.layer_calls, first.layer_calls, second.layer_calls, strict=False)
    for together, one, other in calls:
        in_outputs = _difference(together.outputs, one.outputs, other.outputs, is_ragged)
        in_inputs = _difference(together.inputs, one.inputs, other.inputs, is_ragged)
        if in_outputs > tolerance >= in_inputs:
            return f"the layer {together.name}"
    return None


def _difference(whole: list[Any], first: list[Any], second: list[Any], is_ragged: bool) -> float:
    """The largest relative difference between rows that were computed of all examples, and of a shard.

    Outputs without a row for each example are left out.
    """
    largest = 0.0
    for together, *apart in zip(whole, first, second, strict=False):
        dense = [each.to_tensor() if isinstance(each, tf.RaggedTensor) else each for each in (together, *apart)]
        if any(each.dtype == tf.string or not each.shape.rank for each in dense):
            continue
        sizes = [each.shape[0] for each in dense]
        if sizes != [EXAMPLES, *SHARDS]:
            continue
        rows = [as_numbers(each) for each in dense]
        if len({each.shape[1:] for each in rows}) > 1 and not is_ragged:
            return float("inf")  # another axis is that of the examples, too
        expected = [rows[0][: SHARDS[0]], rows[0][SHARDS[0] :]]
        if len({each.ndim for each in rows}) > 1:
            return float("inf")
        pairs = [_common(one, other) for one, other in zip(expected, rows[1:], strict=True)]
        largest = max(largest, relative_difference([one for one, _ in pairs], [other for _, other in pairs]))
    return largest


def _common(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The part that both arrays have: where rows are padded to the longest, they may differ in length."""
    part = tuple(slice(0, min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    return one[part], other[part]


def _has_ragged(x: Any) -> bool:
    return any(isinstance(leaf, tf.RaggedTensor) for leaf in keras.tree.flatten(x))


def _refuse_constant_batch_size(model: Any, x: Any, training: bool) -> None:
    """Refuses a model that can be called on the whole batch, but on no part of it.

    Raises:
        UserError: then. If a replica's part of the batch is what the model takes, it is right.
    """
    rows = rows_of(x)
    part = -(-rows // model.distribute_strategy.num_replicas_in_sync)
    if _can_call(model, x, training) and not _can_call(model, slice_of(x, 0, part), training):
        raise constant_batch_size(f"{type(model).__name__}.call", rows)


def _can_call(model: Any, x: Any, training: bool) -> bool:
    try:
        _call(model, x, training)
    except Exception:
        return False
    return True
