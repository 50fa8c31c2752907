# SPDX-License-Identifier: Apache-2.0
"""`BatchNormalization` by the moments of the global batch."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.custom_step import running
from keras_replicas.empty import OneReplica, current_graph, has_examples_here, sum_of_examples
from keras_replicas.origins import SAME_ON_REPLICAS
from keras_replicas.replicas import reduce_without_gradient, replica_context, replicas, sum_over_replicas

# For a backward pass through moments, what its gradients are to be multiplied by before they are summed over replicas.
Weight = Callable[[str], tf.Tensor | None]


class _Thread(threading.local):
    """In the probe of a call or of a custom step, a function of (layer, inputs) that gives fixed moments."""

    fixed: Callable | None = None


_thread = _Thread()


def take_moments_of_global_batch(layer: keras.layers.BatchNormalization, model: keras.Model) -> None:
    """Makes a layer of a `data_parallel` model normalise by the mean and variance over all replicas' examples.

    Keras's are those of each replica; with `synchronized=True` they are the mean of the replicas', which is wrong
    where these have different numbers of examples.
    """
    layer._moments = functools.partial(_moments, layer, model)


def _moments(layer, model, inputs, mask):
    """Mean and variance for each channel, each [channels], as the layer takes them on one device."""
    if _thread.fixed is not None:
        return _thread.fixed(layer, inputs)
    if tf.distribute.in_cross_replica_context() or (replicas() == 1 and model.accumulate == 1):
        return type(layer)._moments(layer, inputs, mask)
    model._needs_all_replicas("a model without BatchNormalization")
    step = running()
    refuse = functools.partial(_refuse_nested_graph, layer, model, step)
    refuse()
    weight = no_weight if step is None else step.weight_of_moments(layer.path)
    axes = tuple(layer._reduction_axes)
    if mask is None:
        return moments_of_global_batch(inputs, axes, weight, refuse=refuse)
    masked = tf.cast(mask[..., None], inputs.dtype) * tf.ones_like(inputs)
    return moments_of_global_batch(tf.where(masked > 0, inputs, 0.0), axes, weight, masked, refuse)


def _refuse_nested_graph(layer, model, step):
    """Refuses moments where no replica can wait for the others.

    Raises:
        UserError: in a graph that is not the step's own.
    """
    strategy = tf.distribute.get_strategy()
    knows_graph = step is not None or isinstance(strategy, OneReplica)
    is_nested = knows_graph and current_graph() is not (strategy if step is None else step).graph
    if is_nested or _is_vectorized():
        raise model.refused(
            f"{layer.name} normalizes inside a loop, as of keras.layers.RNN, a tf.cond, tf.map_fn, tf.vectorized_map "
            "or a tf.function, where no replica can wait for the moments of the others: call it outside, use "
            "LayerNormalization instead, or use one replica"
        )


def _is_vectorized() -> bool:
    """Whether operations are added for one element of `tf.vectorized_map`, which adds them to the step's own graph."""
    return "loop_body" in tf.get_current_name_scope()


def no_weight(order: str) -> None:
    """The weight of gradients that are those of sums over examples: they add up as they are."""


def moments_of_global_batch(
    inputs: tf.Tensor,
    axes: tuple[int, ...],
    weight: Weight = no_weight,
    mask: tf.Tensor | None = None,
    refuse: Callable[[], None] = lambda: None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over all replicas' examples, with a gradient of every order.

    Without a mask, the first gradient is the closed form: by all replicas' gradients `g` of mean and variance, that of
    an input x is (g_mean + 2 (x - mean) g_variance) / count. It takes one reduction, and a few operations where a
    traced gradient of the moments takes many, in every layer. Other gradients are traced.

    Args:
        inputs: this replica's, of any shape.
        axes: all but that of the channels.
        weight: of this replica's gradients, for a "first" and a "second" gradient: where a replica takes the gradient
            of a mean over its own examples, its share of all examples.
        mask: in the shape of `inputs`, 1 where an input counts.
        refuse: is called before a gradient is computed, and raises an error where that cannot reduce.

    Returns:
        Two tensors [channels].
    """

    return _GlobalMoments(axes, weight, mask, refuse).of(inputs)


class _GlobalMoments:
    """The operation that `moments_of_global_batch` adds to a replica's graph, with its gradients."""

    def __init__(self, axes, weight, mask, refuse):
        self._axes, self._weight, self._mask, self._refuse = axes, weight, mask, refuse
        self._has_examples = has_examples_here()

    def of(self, inputs):
        """Mean and variance; their gradient is `_gradient`."""

        @tf.custom_gradient
        def moments(inputs):
            mean, variance, count = self._combined(tf.stop_gradient(inputs), reduce_without_gradient)

            def gradient(*upstream):
                return self._gradient(inputs, upstream, mean, count)

            return (mean, variance), gradient

        return moments(inputs)

    def _gradient(self, inputs, upstream, mean, count):
        """The gradient by the inputs; its own gradient is `_second_gradient`."""
        self._refuse()
        share = self._weight("first")

        @tf.custom_gradient
        def gradient_of_inputs(inputs, *upstream):
            if self._mask is None:
                slopes = [tf.stop_gradient(each) for each in self._weighted(upstream, share)]
                of_mean, of_variance = tf.unstack(reduce_without_gradient(tf.stack(slopes)) / count)
                found = self._closed_form(tf.stop_gradient(inputs), mean, of_mean, of_variance)
                found = _unweighted(found, share)
            else:
                found = self._traced_gradient(inputs, upstream, share)

            def second_gradient(of_gradient):
                return self._second_gradient(inputs, upstream, share, of_gradient)

            return tf.stop_gradient(found), second_gradient

        return gradient_of_inputs(inputs, *upstream)

    def _second_gradient(self, inputs, upstream, share, of_gradient):
        self._refuse()
        of_second = self._weight("second")
        sources = [inputs, *upstream]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            first = self._traced_gradient(inputs, upstream, share)
        (given,) = self._weighted([of_gradient], of_second)
        found = tape.gradient(first, sources, given, unconnected_gradients="zero")
        return tuple(_unweighted(each, of_second) for each in found)

    def _closed_form(self, inputs, mean, of_mean, of_variance):
        shape = [1 if axis in self._axes else size for axis, size in enumerate(inputs.shape)]
        centred = inputs - tf.reshape(mean, shape)
        return centred * tf.reshape(2.0 * of_variance, shape) + tf.reshape(of_mean, shape)

    def _traced_gradient(self, inputs, upstream, share):
        """The gradient by the inputs, which can be differentiated again."""
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            mean, variance, _ = self._combined(inputs, sum_over_replicas)
        return _unweighted(tape.gradient([mean, variance], inputs, self._weighted(upstream, share)), share)

    def _weighted(self, gradients, share):
        """Gradients that can be summed over replicas; zeros of a replica without examples."""
        selected = [sum_of_examples(each, self._has_examples) for each in gradients]
        return selected if share is None else [each * tf.cast(share, each.dtype) for each in selected]

    def _combined(self, inputs, reduce):
        """Mean, variance and count of all examples, each [channels].

        Nothing cancels, whatever the mean is: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances" (1979). Where there is a mask, Keras adds an epsilon to the count.
        """
        counts, means, squares = tf.unstack(self._of_each_replica(inputs, reduce), axis=1)
        count = tf.reduce_sum(counts, axis=0) + (0.0 if self._mask is None else keras.config.epsilon())
        mean = tf.reduce_sum(counts * means, axis=0) / count
        between = counts * tf.math.squared_difference(means, mean)
        return mean, tf.reduce_sum(squares + between, axis=0) / count, count

    def _of_each_replica(self, inputs, reduce):
        """The replicas' moments, [replicas, 3, channels], by one sum: each adds zeros to the others' rows."""
        local = sum_of_examples(self._local(inputs), self._has_examples)
        number = tf.cast(replica_context().replica_id_in_sync_group, tf.int32)
        mine = tf.one_hot(number, replicas(), dtype=local.dtype)
        moments = reduce(mine[:, None, None] * local)
        with tf.name_scope(SAME_ON_REPLICAS):
            return tf.reshape(moments, [replicas(), 3, local.shape[1]])

    def _local(self, inputs):
        """This replica's count, mean and sum of centred squares, [3, channels]."""
        total = tf.reduce_sum(inputs, self._axes, keepdims=True)
        if self._mask is None:
            count = tf.cast(tf.size(inputs) // tf.maximum(tf.size(total), 1), inputs.dtype) * tf.ones_like(total)
        else:
            count = tf.reduce_sum(self._mask, self._axes, keepdims=True)
        mean = tf.math.divide_no_nan(total, count)
        squares = tf.math.squared_difference(inputs, mean)
        squares = squares if self._mask is None else self._mask * squares
        sums = [count, mean, tf.reduce_sum(squares, self._axes, keepdims=True)]
        return tf.reshape(tf.stack(sums), [3, -1])


def _unweighted(gradient, share):
    return gradient if share is None else tf.math.divide_no_nan(gradient, tf.cast(share, gradient.dtype))


@contextlib.contextmanager
def fixed_moments(noted: Callable[[keras.Layer], Callable[[str, list], None]]) -> Iterator[None]:
    """Context in which this thread's layers normalise by their moving averages, as if those were the moments.

    Args:
        noted: is called with the layer when it takes moments, and returns a function that is given, for each backward
            pass, "first" or "second", and the gradients: of the moments, or of their gradient by the inputs.
    """

    def moments(layer, inputs):
        values = [tf.cast(each, inputs.dtype) for each in (layer.moving_mean, layer.moving_variance)]
        return _with_noted_gradient(inputs, values, noted(layer))

    before, _thread.fixed = _thread.fixed, moments
    try:
        yield
    finally:
        _thread.fixed = before


def _with_noted_gradient(inputs: tf.Tensor, values: list[tf.Tensor], note: Callable[[str, list], Any]) -> Any:
    """The values, which seem to depend on `inputs`: what their gradients are, and the gradients of those, is noted."""

    @tf.custom_gradient
    def fixed(inputs):
        def gradient(*upstream):
            note("first", [*upstream])

            @tf.custom_gradient
            def gradient_of_inputs(inputs, *upstream):
                def second_gradient(of_gradient):
                    note("second", [of_gradient])
                    return tuple(tf.zeros_like(each) for each in (inputs, *upstream))

                return tf.zeros_like(inputs), second_gradient

            return gradient_of_inputs(inputs, *upstream)

        return tuple(tf.stop_gradient(value) for value in values), gradient

    return fixed(inputs)
