# SPDX-License-Identifier: Apache-2.0
"""`keras.Model` for N replicas: `fit`, `evaluate` and the rest compute under a strategy what one device would.

A plain Keras program becomes right on N replicas in these steps; guides/train.py has them all:

1. Make the strategy: `strategy = keras_replicas.make_strategy()`.
2. In `with strategy.scope():`, make the model, and pass it on: `model = keras_replicas.data_parallel(model)`.
3. Give `fit` a callback `keras_replicas.Checkpoints(folder, every=100)`: killed, the program goes on where it was.
4. For several workers, start it by `python -m keras_replicas launch --workers 2 train.py`.

docs/keras-under-tf-distribute.md shows what Keras's own trainer does.
"""

import functools
import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.trainer import Trainer


def data_parallel(target: Any, *, accumulate: int = 1) -> Any:
    """Makes a Keras model, or a class of them, compute on N replicas what one device would.

    Call it inside the strategy's scope, in which the model was made, before or after `compile`:

        strategy = keras_replicas.make_strategy()
        with strategy.scope():
            model = keras_replicas.data_parallel(build_model())

    A model is any of Keras's: functional, sequential, of a class of one's own, loaded from a file, from
    `keras.applications` or `from_preset`. Its class is changed in place to a subclass with this trainer, and it is
    returned. What is saved of it is of the plain class. A class becomes a subclass, whose models are made as before.

    Under a strategy of N replicas, with batches of any size:

    - The loss that is minimised and reported is what one device would compute for the whole batch, by the loss's own
      reduction. Keras's own losses are summed by replica and divided once. For any other loss, and for a
      `compute_loss` of the class's own, every replica gathers what the others predicted, and computes the whole.
    - A replica may have no examples: it then computes one of zeros, which does not count.
    - A term of `add_loss` is weighted by the replica's share of the examples. That suits a mean over examples, such as
      `activity_regularizer`, and a regulariser of weights, which is the same on all replicas.
    - Metrics are those of the whole data. Keras's own add up over replicas; any other, and a `compute_metrics` of the
      class's own, sees the whole batch on every replica.
    - Gradients are summed before the optimizer sees them: its clipping, accumulation over steps and the rest act on
      those of the whole batch. An `Embedding` row's are summed too; Keras's optimizers would square them one by one.
    - `fit` does `steps_per_epoch` steps in an epoch, whatever `steps_per_execution` is.
    - `BatchNormalization` takes the moments of the whole batch. Other state that a layer updates in training changes by
      the mean over examples.
    - Dropout's noise is a function of the seed, the step and the replica.
    - `jit_compile` compiles the forward and backward pass of each replica. It needs a single loss and metrics, all
      Keras's own, and no `add_loss`, regulariser or `BatchNormalization`; so does `accumulate`.
    - A class's own `train_step` or `test_step` runs on each replica, as under Keras: gradients are added up, so a loss
      must be divided by the number of replicas, as Keras divides its own, and the values that it returns are averaged.
      A `train_step` that does so warns. A `compute_loss` needs no such care.

    `batch_size`, and the batches of a data set, are those of all replicas together. Several workers are given the same
    data, each all of it, and take their parts; what was divided by hand is refused. `predict` returns all rows on every
    worker, and Keras's callbacks write files on the chief alone.

    Args:
        target: a Keras model, or a subclass of `keras.Model`.
        accumulate: gradient accumulation: in how many parts each replica computes its part of a batch, one after the
            other, to save memory. It must divide that part. The batch stays the same.

    Returns:
        The model that was given, or a class.

    Raises:
        TypeError: when `target` is neither a model nor a class of models.
        ValueError: when a model was made outside the scope in which it is given, or `accumulate` is below 1.

    Attributes of a model, while `fit` runs:
        steps_done: steps of this `fit` so far, with those before it was resumed.
        step_values: for the steps since the last callback, a dict of vectors [steps]: each step's own `loss`,
            metrics (of Keras's own) and `learning_rate`; the logs that callbacks get hold the epoch's means so far.
    """
    if not isinstance(accumulate, int | np.integer) or accumulate < 1:  # type: ignore[redundant-expr]
        raise ValueError(f"accumulate must be a number of parts, 1 or more, not {accumulate!r}")
    is_class = inspect.isclass(target) and issubclass(target, keras.Model)
    if is_class:
        ours = _with_trainer(target)
        return ours if accumulate == 1 else type(ours.__name__, (ours,), _names(ours) | {"accumulate": int(accumulate)})
    if not isinstance(target, keras.Model):
        raise TypeError(f"data_parallel takes a Keras model, or a subclass of keras.Model; got {target!r}")
    if tf.distribute.has_strategy() and target._distribute_strategy is not tf.distribute.get_strategy():
        raise ValueError("the model was made outside this strategy's scope: make it inside, then call data_parallel")
    target.__class__ = _with_trainer(target.__class__)
    target.become_data_parallel(int(accumulate))
    return target


@functools.cache
def _with_trainer(model_class: type[keras.Model]) -> type[keras.Model]:
    """The subclass of `model_class` with our trainer; itself if it is one already."""
    if issubclass(model_class, Trainer):
        return model_class
    bases = (*_of_kerashub(model_class), model_class, Trainer)
    plain_class = getattr(model_class, "plain_class", model_class)
    ours = type(model_class.__name__, bases, _names(model_class) | {"plain_class": plain_class})
    registered = keras.saving.get_registered_name(model_class)
    if ">" in registered:  # by `keras.saving.register_keras_serializable`
        for each in (ours, model_class):  # the last one is what loading a file makes
            keras.saving.register_keras_serializable(*registered.split(">"))(each)
    return ours


def _names(model_class: type) -> dict[str, Any]:
    """Names like those of the plain class, so that what is saved is the plain class's."""
    return {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}


def _of_kerashub(model_class: type[keras.Model]) -> list[type]:
    if not hasattr(model_class, "save_to_preset"):
        return []
    from keras_replicas.kerashub import HubTask

    return [HubTask]
