# SPDX-License-Identifier: Apache-2.0
"""What a tensor of a replica's step depends on: found by walking its graph backwards."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

SAME_ON_REPLICAS = "same_on_replicas"  # in the names of operations whose results are the same on all replicas
EXAMPLES, DRAWS = "examples", "draws"

READS = ("ReadVariableOp", "ResourceGather", "VariableShape", "Identity")


class Origins:
    """Finds whether tensors depend on a replica's examples or on random draws.

    What comes of weights alone, or of sums over replicas, is the same on every replica.

    Args:
        examples: the tensors of the replica's examples.
    """

    def __init__(self, examples: Iterable[tf.Tensor]):
        self._graph: Any = tf.compat.v1.get_default_graph()
        self._examples = {tensor.name for tensor in examples}
        self._outside: dict[int, dict[str, tf.Tensor]] = {}  # by a nested graph's id, what it captures, by name
        self._handles: list[tf.Tensor] = []

    def add_examples(self, tensor: tf.Tensor) -> None:
        """Counts another tensor among the examples."""
        self._examples.add(tensor.name)

    def follow_variables(self, handles: Iterable[tf.Tensor]) -> None:
        """Counts what is read of a variable, by its handle, as made from what was assigned to it before."""
        self._handles += handles

    def of(self, tensor: tf.Tensor, also: Iterable[tf.Tensor] = ()) -> set[str]:
        """Which of `EXAMPLES`, `DRAWS` and the names of `also` a tensor depends on."""
        ends = {each.name for each in also}
        found, seen, waiting = set(), set(), [tensor]
        while waiting:
            tensor = waiting.pop()
            graph, operation = tensor.graph, tensor.op
            key = (id(graph), tensor.name)
            if key in seen:
                continue
            seen.add(key)
            if graph is self._graph and tensor.name in ends:
                found.add(tensor.name)
            elif (graph is self._graph or operation.type == "ReadVariableOp") and tensor.name in self._examples:
                found.add(EXAMPLES)
            elif SAME_ON_REPLICAS in operation.name:
                continue
            elif "Random" in operation.type:
                found.add(DRAWS)
            elif operation.type == "Placeholder" and graph is not self._graph:
                outside = self._captured(graph).get(tensor.name)
                if outside is None:  # a loop's own: it may be anything
                    found.add(EXAMPLES)
                else:
                    waiting.append(outside)
            else:
                waiting += operation.inputs
                if operation.type == "ReadVariableOp" and graph is self._graph:
                    waiting += self._assigned_before(operation)
        return found

    def is_reduced(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor was made from a sum over replicas, as a metric's result."""
        seen, waiting = set(), [tensor]
        while waiting:
            tensor = waiting.pop()
            if SAME_ON_REPLICAS in tensor.op.name:
                return True
            if tensor.name not in seen:
                seen.add(tensor.name)
                waiting += tensor.op.inputs
        return False

    def _assigned_before(self, read: Any) -> list[tf.Tensor]:
        """What was assigned, before an operation reads it, to a variable that is followed."""
        name = read.inputs[0].name
        handles = [handle for handle in self._handles if name in _names_inside(self._graph, handle)]
        return [value for handle in handles for value in assigned_values(self._graph, handle, before=read)]

    def _captured(self, graph: Any) -> dict[str, tf.Tensor]:
        if id(graph) not in self._outside:
            self._outside[id(graph)] = {inside.name: outside for outside, inside in graph.captures}
        return self._outside[id(graph)]


def origins_of(data: Any) -> Origins | None:
    """The origins by a replica's examples, a structure of tensors; None where operations run eagerly."""
    if tf.executing_eagerly():
        return None
    leaves = tf.nest.flatten(data, expand_composites=True)
    return Origins(leaf for leaf in leaves if isinstance(leaf, tf.Tensor))


def operations_so_far() -> set[str]:
    """The names of the operations of the current graph; none where operations run eagerly."""
    if tf.executing_eagerly():
        return set()
    return {operation.name for operation in tf.compat.v1.get_default_graph().get_operations()}


def first_local(result: tf.Tensor, origins: Origins, operations: set[str]) -> tf.Tensor:
    """The tensor by which a result depends on a replica's examples: of given operations, the one that is used last."""
    seen, waiting = set(), [result]
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen or SAME_ON_REPLICAS in tensor.op.name or EXAMPLES not in origins.of(tensor):
            continue
        seen.add(tensor.name)
        if tensor.op.name in operations:
            return tensor
        waiting += tensor.op.inputs
    return result


COMPARISONS = ("Greater", "GreaterEqual", "Less", "LessEqual")
CHECKS = ("assert", "RaggedReduce", "RowPartition")  # in names of comparisons that change no result
REDUCTIONS = ("Mean", "Sum", "Max", "Min", "Prod")


def compares_with_batch(origins: Origins, graph: Any, rows: int | None) -> bool:
    """Whether a graph compares a statistic of the batch, such as the mean of its losses, with something else.

    No gradient flows through a comparison, so that a few examples can be on the same side of a threshold as the batch,
    and others on another. A comparison with 0 is none, unless it is that of a gradient, as of `tf.maximum`: a sum is
    compared with 0 before something is divided by it.

    Args:
        origins: of the examples.
        graph: the step's.
        rows: of the batch, if its shape is known.
    """
    return any(
        _is_threshold(operation, other) and _is_statistic(origins, one, rows)
        for operation in graph.get_operations()
        if operation.type in COMPARISONS and not any(name in operation.name for name in CHECKS)
        for one, other in (operation.inputs, reversed(operation.inputs))
    )


def _is_threshold(comparison: Any, other: tf.Tensor) -> bool:
    value = tf.get_static_value(other)
    return value is None or bool((value != 0).any()) or "gradient_tape" in comparison.name


def _is_statistic(origins: Origins, tensor: tf.Tensor, rows: int | None) -> bool:
    """Whether a tensor, on its way from the examples, was reduced over all of them."""
    seen, waiting = set(), [tensor]
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen or SAME_ON_REPLICAS in tensor.op.name:
            continue
        seen.add(tensor.name)
        if tensor.op.type in REDUCTIONS and _reduces_rows(tensor.op, rows) and EXAMPLES in origins.of(tensor):
            return True
        waiting += tensor.op.inputs
    return False


def _reduces_rows(operation: Any, rows: int | None) -> bool:
    reduced, axes = operation.inputs
    axes = tf.get_static_value(axes)
    if axes is None or not reduced.shape.rank or reduced.shape[0] != rows:
        return False
    return 0 in [axis % reduced.shape.rank for axis in axes.ravel()]


def _names_inside(graph: Any, handle: tf.Tensor) -> set[str]:
    """The names that a variable's handle has in a graph."""
    inside = {internal.name for external, internal in graph.captures if external is handle}
    outer = getattr(graph, "outer_graph", None)
    while not inside and outer is not None and hasattr(outer, "captures"):
        outside = {internal.name for external, internal in outer.captures if external is handle}
        inside = {internal.name for external, internal in graph.captures if external.name in outside}
        outer = getattr(outer, "outer_graph", None)
    return inside


def assigned_values(graph: Any, handle: tf.Tensor, before: Any = None) -> list[tf.Tensor]:
    """What a graph assigns to a variable, so far, or gives to a function that may assign it.

    Args:
        graph: whose operations are looked at.
        handle: the variable's.
        before: the operation at which to stop, if it is not the last one.
    """
    inside = _names_inside(graph, handle)
    found = []
    for operation in graph.get_operations():
        if operation is before:
            break
        names = [tensor.name for tensor in operation.inputs]
        if inside.isdisjoint(names) or operation.type in READS:
            continue
        found += [tensor for tensor in operation.inputs if tensor.name not in inside]
    return found
