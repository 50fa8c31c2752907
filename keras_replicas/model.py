# SPDX-License-Identifier: Apache-2.0
"""`keras.Model` for N replicas: `fit`, `evaluate` and the rest compute under a strategy what one device would.

`data_parallel(cls)` is a subclass of `cls` with the trainer of `trainer.py` in place of Keras's own. Checked against
Keras 3.15 and TensorFlow 2.21; docs/keras-under-tf-distribute.md shows what Keras's own does.
"""

import importlib.metadata
import inspect
import warnings

import keras

from keras_replicas.private import CHECKED_VERSIONS
from keras_replicas.trainer import Trainer


def data_parallel(model_class: type[keras.Model], *mixins: type) -> type[keras.Model]:
    """A subclass whose models train on N replicas as on one; `model_class` itself if it is one already.

    Its models are made, compiled and used like those of `model_class`, which `mixins` precede among its bases; make a
    model inside the strategy's scope. Under a strategy of N replicas, with batches of any size:

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
    - Dropout's noise is a function of the seed, the step and the replica, and has no state; see `noise.py`.
    - `jit_compile` compiles the forward and backward pass of each replica, and `accumulate` divides it into parts.
      Both need a single loss and metrics, all Keras's own, and no `add_loss`, regulariser or `BatchNormalization`.
    - A class's own `train_step` or `test_step` runs on each replica, as under Keras: gradients are added up, so a loss
      must be divided by the number of replicas, as Keras divides its own, and the values that it returns are averaged.
      A `train_step` that does so warns. A `compute_loss` needs no such care.

    Raises:
        TypeError: when `model_class` is not a subclass of `keras.Model`.

    Attributes of an instance:
        accumulate: number of parts of each replica's batch, computed one after another to save memory. It must divide
            the batch. Set it before `fit`.
        told_to_stop: set it to True on any worker; after the current step, `all_told_to_stop` is True on every worker.
        first_step: steps done before the next `fit`, which begins there, even in the middle of an epoch: set it to
            resume from a checkpoint. `fit` must be told `steps_per_epoch`.
        last_step: step after which `fit` ends, even in the middle of an epoch; None for the end of the last epoch.
        steps_done: steps of this `fit` so far, including those of `first_step`.
        at_epoch_end: whether the last of those is the last of its epoch, if `fit` was told `steps_per_epoch`.
        step_values: for the steps since the last callback, a dict of vectors: each step's own `loss`, metrics (of
            Keras's own), `learning_rate`, and `waited`, seconds that this worker waited for each batch.
    """
    if not (inspect.isclass(model_class) and issubclass(model_class, keras.Model)):
        raise TypeError(f"data_parallel makes a class of a subclass of keras.Model, before a model; got {model_class}")
    if issubclass(model_class, Trainer):
        return model_class
    _warn_outside_checked_versions()
    bases = (*mixins, *_of_kerashub(model_class), model_class, Trainer)
    # Named like the plain class, so that what is saved is the plain class's.
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    ours = type(model_class.__name__, bases, names | {"plain_class": model_class})
    registered = keras.saving.get_registered_name(model_class)
    if ">" in registered:  # by `keras.saving.register_keras_serializable`
        for each in (ours, model_class):  # the last one is what loading a file makes
            keras.saving.register_keras_serializable(*registered.split(">"))(each)
    return ours


def _of_kerashub(model_class):
    if not hasattr(model_class, "save_to_preset"):
        return []
    from keras_replicas.kerashub import HubTask

    return [HubTask]


def _warn_outside_checked_versions() -> None:
    for package, checked in CHECKED_VERSIONS.items():
        version = importlib.metadata.version(package)
        if not version.startswith(checked + "."):
            warnings.warn(
                f"keras_replicas/model.py is checked against {package} {checked}, not {version}: "
                "run `python -m recipes doctor`, and trust it",
                stacklevel=3,
            )
