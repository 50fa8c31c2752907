# SPDX-License-Identifier: Apache-2.0
"""`keras.Model` for N replicas: `fit`, `evaluate` and the rest compute under a strategy what one device would.

A plain Keras program becomes right on N replicas in these steps; guides/train.py has the first three:

1. Make the strategy: `strategy = keras_replicas.make_strategy()`.
2. In `with strategy.scope():`, make the model, and pass it on: `model = keras_replicas.data_parallel(model)`.
3. Give `fit` a callback `keras_replicas.Checkpoints(folder, every=100)`: killed, the program goes on where it was.
4. Check it, where the layers, losses or steps are your own: `assert keras_replicas.check(build_model, x, y)`.
5. For several workers, start it by `python -m keras_replicas launch --workers 2 train.py`.

docs/keras-under-tf-distribute.md shows what Keras's own trainer does.
"""

import functools
import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_replicas.trainer import Trainer

OPTIONS = ("accumulate", "mean_over", "custom_step", "probe_call")


def data_parallel(
    target: Any,
    *,
    accumulate: int | None = None,
    mean_over: str | None = None,
    custom_step: str | None = None,
    probe_call: bool | None = None,
) -> Any:
    """Makes a Keras model, or a class of them, compute on N replicas what one device would.

    Call it inside the strategy's scope, in which the model was made, before or after `compile`::

        strategy = keras_replicas.make_strategy()
        with strategy.scope():
            model = keras_replicas.data_parallel(build_model())

    A model is any of Keras's: functional, sequential, of a class of your own, loaded from a file, from
    `keras.applications` or `from_preset`. Its class is changed in place to a subclass with this trainer, and it is
    returned. A class becomes a subclass, whose models are made as before.

    What is saved or pickled is of the plain class, and so is what loads it: `data_parallel(load_model(file))`, in the
    scope, trains on with the optimizer's state.

    Without a strategy and on one replica, Keras's own step runs, and the result is Keras's to the bit, for the same
    order of the data; but an epoch's
    loss, the steps of data without a known end and rows of an `Embedding` that repeat are counted rightly, and
    `accumulate` has its effect.

    Under a strategy of N replicas, with batches of any size:

    - The loss that is minimised and reported is what one device would compute for the whole batch, by the loss's own
      reduction. Keras's own losses are summed by replica and divided once. For any other loss, and for a
      `compute_loss` of the class's own, every replica gathers what the others predicted, and computes the whole.
    - A replica may have no examples: it then computes another replica's, which does not count.
    - Outputs need a row for each example, unless all losses and metrics add up, as Keras's own do.
    - `add_loss` of a value for each example adds up. A number is a mean over examples, or of weights alone, or a sum
      over examples: which, is measured on a few examples when `fit` begins.
    - Metrics are those of the whole data. Keras's own add up over replicas; any other, and a `compute_metrics` of the
      class's own, sees the whole batch on every replica.
    - Gradients are summed before the optimizer sees them: its clipping, accumulation over steps and the rest act on
      those of the whole batch. An `Embedding` row's are summed too; Keras's optimizers would square them one by one.
    - `fit` does `steps_per_epoch` steps in an epoch, whatever `steps_per_execution` is.
    - `BatchNormalization` takes the moments of the whole batch. Any other layer that looks at the batch's other
      examples sees those of its replica alone: one warning tells, when `fit` begins, and `check` tells how much it
      matters.
    - Other state that a layer updates is what `add_weight(aggregation=...)` says: "sum" for a counter, "mean" over
      examples for a moving average, or "only_first_replica". Without that word it is refused.
    - Dropout's noise is a function of the seed, the step and the replica. In `evaluate` and `predict`, random draws
      are a function of the training steps so far, of the evaluations since, and of the batch.
    - `jit_compile` compiles the forward and backward pass of each replica, if there is a single loss, and it and all
      metrics are Keras's own, without `add_loss`, regulariser or `BatchNormalization`. `accumulate` needs the same.
    - A custom `train_step` or `test_step` runs on each replica's shard of the batch, as it is written for one device:
      nothing in it is to be divided by the number of replicas. Optimizers get the gradients of the global batch.
      Whether those are the mean of the shards' gradients or their sum is measured on a few examples when `fit` begins;
      where they are neither, one warning says so. See "A custom train_step" in docs/your-own-model.md.

    `batch_size`, and the batches of a data set, are those of all replicas together. Several workers are given the same
    data, each all of it, and take their parts; what was divided by hand is refused. `predict` returns all rows on every
    worker, and Keras's callbacks write files on the chief alone.

    While `fit` runs, a model has two more attributes:

    - `steps_done`: steps of this `fit` so far, with those before it was resumed.
    - `step_values`: for the steps since the last callback, a dict of vectors [steps]: each step's own `loss`, metrics
      (of Keras's own) and `learning_rate`; the logs that callbacks get hold the epoch's means so far.

    Args:
        target: a Keras model, or a subclass of `keras.Model`.
        accumulate: gradient accumulation: in how many parts each replica computes its part of a batch, one after the
            other, to save memory. It must divide that part. The batch stays the same.
        mean_over: the mean loss of an epoch, and of `evaluate`, weights each batch by its "examples", as Keras does, or
            by the "labels", or the sum of their weights, by which the loss's reduction divides: it is then the mean
            over all labels, whatever the batches.
        custom_step: how replicas combine what a custom `train_step` or `test_step` computes, as a "mean" over examples
            or a "sum"; None to measure it.
        probe_call: whether, before the first step on several replicas, the model is called on a few examples together
            and apart, which leaves no trace: one warning names the first layer whose results for an example depend on
            the others.

    An option that is not given stays as it was, where `target` is data-parallel already; otherwise `accumulate` is 1,
    `mean_over` is "examples", `custom_step` is None and `probe_call` is True.

    Returns:
        The model that was given, or a class.

    Raises:
        TypeError: when `target` is neither a model nor a class of models.
        ValueError: when a model was made outside the scope in which it is given, `accumulate` is below 1, or
            another option has a value that is not named here.
    """
    if accumulate is not None and (not isinstance(accumulate, int | np.integer) or accumulate < 1):  # type: ignore[redundant-expr]
        raise ValueError(f"accumulate must be a number of parts, 1 or more, not {accumulate!r}")
    if mean_over not in (None, "examples", "labels"):
        raise ValueError(f"mean_over must be 'examples' or 'labels', not {mean_over!r}")
    if custom_step not in (None, "mean", "sum"):
        raise ValueError(f"custom_step must be 'mean', 'sum' or None, not {custom_step!r}")
    if probe_call is not None and not isinstance(probe_call, bool):
        raise ValueError(f"probe_call must be True or False, not {probe_call!r}")
    all_options = {
        "accumulate": None if accumulate is None else int(accumulate),
        "mean_over": mean_over,
        "custom_step": custom_step,
        "probe_call": probe_call,
    }
    options = {name: value for name, value in all_options.items() if value is not None}
    if inspect.isclass(target) and issubclass(target, keras.Model):
        return _with_trainer(target, **options)  # type: ignore[arg-type]
    if not isinstance(target, keras.Model):
        raise TypeError(f"data_parallel takes a Keras model, or a subclass of keras.Model; got {target!r}")
    if tf.distribute.has_strategy() and target._distribute_strategy is not tf.distribute.get_strategy():
        raise ValueError("the model was made outside this strategy's scope: make or load it in the scope")
    target.__class__ = _with_trainer(target.__class__, **options)
    target.become_data_parallel()
    return target


@functools.cache
def _with_trainer(model_class: Any, **options: Any) -> type[keras.Model]:
    """The subclass of `model_class` with our trainer and these options; itself if it has both.

    What is not among the options stays as the class has it.
    """
    is_ours = issubclass(model_class, Trainer)
    if is_ours and all(getattr(model_class, name) == value for name, value in options.items()):
        return model_class
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}  # to be saved by
    bases = (model_class,) if is_ours else (model_class, Trainer)
    if hasattr(model_class, "save_to_preset") and not is_ours:
        from keras_replicas.kerashub import HubTask

        bases = (HubTask, *bases)
        names |= {"make_data_parallel": staticmethod(data_parallel), "option_names": OPTIONS}
    plain_class = getattr(model_class, "plain_class", model_class)
    ours = type(model_class.__name__, bases, names | {"plain_class": plain_class} | options)
    registered = keras.saving.get_registered_name(plain_class)
    if ">" in registered:  # by `keras.saving.register_keras_serializable`
        for each in (ours, keras.saving.get_registered_object(registered)):  # the last one is what loading a file makes
            keras.saving.register_keras_serializable(*registered.split(">"))(each)
    return ours
