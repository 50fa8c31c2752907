# SPDX-License-Identifier: Apache-2.0
"""`keras.Model` for N replicas: `fit`, `evaluate` and the rest compute under a strategy what one device would.

`data_parallel(cls)` is a subclass whose trainer, of `trainer.py`, stands where Keras's own does. Checked against Keras
3.15 and TensorFlow 2.21; docs/keras-under-tf-distribute.md shows what Keras's own does.
"""

import importlib.metadata
import inspect
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES

from common.training.trainer import Trainer

CHECKED_VERSIONS = {"keras": "3.15", "tensorflow": "2.21"}


def data_parallel(model_class: type[keras.Model], *mixins: type) -> type[keras.Model]:
    """A class of models that train on N replicas as on one; itself, where it is one already.

    It is made, compiled and used as `model_class`, with `mixins` before it among its bases; make a model inside of the
    strategy's scope. Under a strategy of N replicas, with batches of any size:

    - The loss that is minimised and reported is what one device would compute for the whole batch, by the loss's own
      reduction. Keras's own losses are summed by replica and divided once. For any other loss, and for a
      `compute_loss` of the class's own, every replica gathers what the others predicted, and computes the whole.
    - A replica may have no examples: it computes one of zeros, which counts for nothing.
    - A term of `add_loss` is weighted by the replica's share of the examples, as fits a mean over examples, which
      `activity_regularizer` is too, and a regulariser of weights, which is the same on all.
    - Metrics are those of the whole data. Keras's own add up over replicas; any other, and a `compute_metrics` of the
      class's own, sees the whole batch on every replica.
    - Gradients are summed before the optimizer sees them: its clipping, accumulation over steps and the rest are by
      the whole batch. So are those of an `Embedding`'s row, which Keras's optimizers would square one by one.
    - `fit` does `steps_per_epoch` steps in an epoch, whatever `steps_per_execution` is.
    - `BatchNormalization` takes the moments of the whole batch. Other state that a layer updates in training changes by
      the mean over examples.
    - Dropout's noise is a function of the seed, the step and the replica, and has no state; see `noise.py`.
    - `jit_compile` compiles the forward and backward pass of each replica, and `accumulate` divides it into parts.
      Both need a single loss of Keras's own, metrics of Keras's own and neither `add_loss` nor `BatchNormalization`.
    - A class with a `train_step` or `test_step` of its own has it run on each replica, as Keras does, with a warning:
      gradients are added up, so that a loss must be divided by the number of replicas, as Keras divides its own, and
      the values that it returns are averaged. A `compute_loss` needs no such care.

    Raises:
        TypeError: when it is not a class of models.

    Attributes of an instance:
        accumulate: parts into which each replica's batch is divided, one after another, to save memory. It must divide
            the batch. Set it before `fit`.
        wire: the dtype in which workers send each other gradients, and add them up: `float32`, or `bfloat16`, which has
            half the bytes, and 8 significant bits. Set it before `fit`.
        told_to_stop: set it True on any worker; after the step at hand, `all_told_to_stop` is True on every one.
        first_step: steps that were done before, of which the next `fit` takes no notice but to begin there, in the
            middle of an epoch too: set it when a run goes on from a checkpoint. `fit` must be told `steps_per_epoch`.
        last_step: after which `fit` ends, in the middle of an epoch too; None for the end of the last epoch.
        steps_done: steps of this `fit`, those before `first_step` too.
        at_epoch_end: whether the last of them is the last of its epoch, where `fit` was told `steps_per_epoch`.
        step_values: for the steps since the last callback, a dict of vectors: each step's own `loss`, metrics (of
            Keras's own), `learning_rate`, and `waited`, seconds that this worker waited for each batch.
    """
    if not (inspect.isclass(model_class) and issubclass(model_class, keras.Model)):
        raise TypeError(f"data_parallel makes a class of a subclass of keras.Model, before a model; got {model_class}")
    if issubclass(model_class, Trainer):
        return model_class
    _warn_outside_checked_versions()
    bases = (*mixins, *([HubTask] if hasattr(model_class, "save_to_preset") else []), model_class, Trainer)
    # Under its plain name, so that what is saved is the plain class's.
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    ours = type(model_class.__name__, bases, names | {"plain_class": model_class})
    if model_class in GLOBAL_CUSTOM_NAMES:  # by `keras.saving.register_keras_serializable`
        GLOBAL_CUSTOM_NAMES[ours] = GLOBAL_CUSTOM_NAMES[model_class]
    return ours


class HubTask:
    """What KerasHub's tasks need beside: data that is ids already, and presets of the plain task.

    It is no `Trainer`: that would put the trainer before KerasHub's classes.
    """

    def fit(self, x=None, *args, **kwargs):
        """As the task's, which would tokenise text, for which a distributed data set has no method; ours holds ids."""
        distributed = isinstance(x, tf.distribute.DistributedDataset)
        return (Trainer.fit if distributed else super().fit.__func__)(self, x, *args, **kwargs)  # type: ignore[arg-type, misc]

    def evaluate(self, x=None, *args, **kwargs):
        """See `fit`."""
        distributed = x is None or isinstance(x, tf.distribute.DistributedDataset)
        return (Trainer.evaluate if distributed else super().evaluate.__func__)(self, x, *args, **kwargs)  # type: ignore[arg-type, misc]

    def save_to_preset(self: Any, preset_dir, **kwargs):
        """Saves the plain task in float32, LoRA's adapters merged into their kernels: it loads without this project.

        KerasHub 0.32 saves a model in mixed precision as what it cannot load (`Invalid dtype: mixed_bfloat16`).
        """
        backbone = type(self.backbone).from_config(self.backbone.get_config() | {"dtype": "float32"})
        own = set(inspect.signature(self.plain_class.__init__).parameters)
        own -= {"self", "backbone", "preprocessor", "kwargs"}
        head = {name: value for name, value in self.get_config().items() if name in own}
        plain = self.plain_class(backbone=backbone, preprocessor=self.preprocessor, compile=False, **head)
        adapted = [layer for layer in self._flatten_layers() if getattr(layer, "lora_enabled", False)]
        merged = {id(layer._kernel): layer.kernel for layer in adapted}
        kept = [weight for weight in self.weights if not weight.name.startswith("lora_")]
        plain.set_weights([np.array(merged.get(id(weight), weight)) for weight in kept])
        plain.save_to_preset(preset_dir, **kwargs)


def _warn_outside_checked_versions() -> None:
    for package, checked in CHECKED_VERSIONS.items():
        version = importlib.metadata.version(package)
        if not version.startswith(checked + "."):
            warnings.warn(
                f"common/training/data_parallel.py is checked against {package} {checked}, not {version}: "
                "run `python -m recipes doctor`, and trust it",
                stacklevel=3,
            )
