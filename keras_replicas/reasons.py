# SPDX-License-Identifier: Apache-2.0
"""Why a model differs on N replicas: experiments on one device, for `checking.py`; and what makes runs comparable."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.loop import has_own


def likely_reason(model, x, size: int, kind: str) -> str:
    """The likely reason why something of this kind differs."""
    if layer := _looks_at_others(model, x, size):
        return f"from {layer} on, call uses other examples, which a replica does not have; compute_loss has them"
    step = {"evaluate": "test_step", "predict": "predict_step"}.get(kind, "train_step")
    if has_own(model, step):
        return (
            f"{type(model).__name__}.{step} is neither a mean nor a sum over examples, or compares them: a replica has "
            "one shard of the batch; compute_loss has the whole batch"
        )
    if kind != "layer state" and model.losses:
        return "add_loss or a regulariser adds a number, which counts as a mean: for a sum, add a value per example"
    averaged = "replicas average a layer's state, but it is a counter, say, or a queue, and no mean over examples"
    before = f"{step} uses other examples before it calls Keras's, which a replica does not have"
    unknown = "not known: please report it, with the model"
    return averaged if kind == "layer state" else before if overrides(model, step) else unknown


def _looks_at_others(model, x, size: int) -> str:
    """The first layer whose outputs for `size` examples are not those that it has for all; "" if there is none."""
    layers = [layer for layer in model.layers if getattr(model, "inputs", None) and hasattr(layer, "output")]
    probe = keras.Model(model.inputs, [layer.output for layer in layers]) if layers else model
    names = [layer.name for layer in layers for _ in keras.tree.flatten(layer.output)] or itertools.repeat("the start")
    rows = np.arange(keras.tree.flatten(x)[0].shape[0])[: 16 * size]
    moments = any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers())
    with contextlib.suppress(Exception), comparable():  # a model need not have a call
        for training in (False,) if moments else (False, True):  # which looks at the others, rightly
            call = tf.function(functools.partial(probe, training=training), autograph=False)
            of_rows = keras.tree.flatten(call(rows_of(x, rows)))
            for part in np.split(rows, range(size, len(rows), size)):
                alone = keras.tree.flatten(call(rows_of(x, part)))
                for name, together, apart in zip(names, of_rows, alone, strict=False):
                    together = tf.gather(together, part)
                    if together.shape != apart.shape or not np.allclose(together, apart, 1e-5, 1e-6):
                        return name
    return ""


def overrides(model, step: str) -> bool:
    """Whether a model's class overrides a step of Keras's."""
    return getattr(type(model), step) is not getattr(keras.Model, step)


def rows_of(data, rows):
    """These rows of each array."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, rows), data)


def _of_one_example(draw, shape, **given):
    """What `draw` draws for one example, the same in each step, for all; but weights, outside of a step, as usual."""
    if not tf.inside_function():
        return draw(shape=shape, **given)
    shape = tf.convert_to_tensor(shape, tf.int32)
    return tf.broadcast_to(draw(shape=shape[1:], **given | {"seed": (1, 2)}), shape)


@contextlib.contextmanager
def comparable(dtype: str = "") -> Iterator[None]:
    """Makes a dtype Keras's, all examples draw the same noise in every step, and dropout drop nothing."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    names = ("stateless_normal", "stateless_uniform", "stateless_truncated_normal")
    drawn: dict[str, Any] = {name: functools.partial(_of_one_example, getattr(tf.random, name)) for name in names}
    dropped = mock.patch.object(tf.nn.experimental, "stateless_dropout", lambda x, **_: x)
    with mock.patch.multiple(tf.random, **drawn), dropped:
        try:
            keras.config.set_floatx(dtype or floatx)
            keras.config.set_dtype_policy(dtype or policy)
            yield
        finally:
            keras.config.set_floatx(floatx)
            keras.config.set_dtype_policy(policy)
