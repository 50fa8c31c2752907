# SPDX-License-Identifier: Apache-2.0
"""What KerasHub's tasks need in addition: data that is already ids, and presets of the plain task."""

import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from keras_replicas.trainer import Trainer


class HubTask:
    """Precedes one of KerasHub's tasks among the bases of a `data_parallel` class.

    It is not a `Trainer`: that would put the trainer before KerasHub's classes.
    """

    def fit(self, x=None, *args, **kwargs):
        """As the task's, but does not tokenise a distributed data set, which has no method for it: ours holds ids."""
        distributed = isinstance(x, tf.distribute.DistributedDataset) or hasattr(x, "iter_from_step")
        return (Trainer.fit if distributed else super().fit.__func__)(self, x, *args, **kwargs)  # type: ignore[arg-type, misc]

    def evaluate(self, x=None, *args, **kwargs):
        """See `fit`."""
        distributed = x is None or isinstance(x, tf.distribute.DistributedDataset) or hasattr(x, "iter_from_step")
        return (Trainer.evaluate if distributed else super().evaluate.__func__)(self, x, *args, **kwargs)  # type: ignore[arg-type, misc]

    def save_to_preset(self: Any, preset_dir, **kwargs):
        """Saves the plain task in float32, LoRA's adapters merged into their kernels, to load without this project.

        KerasHub 0.32 cannot load a model that it saved in mixed precision (`Invalid dtype: mixed_bfloat16`).
        """
        backbone = type(self.backbone).from_config(self.backbone.get_config() | {"dtype": "float32"})
        options = set(inspect.signature(self.plain_class.__init__).parameters)
        options -= {"self", "backbone", "preprocessor", "kwargs"}
        head = {name: value for name, value in self.get_config().items() if name in options}
        plain = self.plain_class(backbone=backbone, preprocessor=self.preprocessor, compile=False, **head)
        adapted = [layer for layer in self._flatten_layers() if getattr(layer, "lora_enabled", False)]
        merged = {id(layer._kernel): layer.kernel for layer in adapted}
        kept = [weight for weight in self.weights if not weight.name.startswith("lora_")]
        plain.set_weights([np.array(merged.get(id(weight), weight)) for weight in kept])
        plain.save_to_preset(preset_dir, **kwargs)
