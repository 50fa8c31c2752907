# SPDX-License-Identifier: Apache-2.0
"""What KerasHub's models need in addition: data that is already ids, and presets, which are of the plain class."""

from typing import Any

import tensorflow as tf

from keras_replicas.trainer import Trainer


class HubTask:
    """Precedes one of KerasHub's tasks or backbones among the bases of a `data_parallel` class.

    It is not a `Trainer`: that would put the trainer before KerasHub's classes.
    """

    def fit(self, x=None, *args, **kwargs):
        """Fits the task; a distributed data set, which holds ids already, is not tokenised."""
        return (Trainer.fit if _is_of_ids(x) else super().fit.__func__)(self, x, *args, **kwargs)  # type: ignore[arg-type, misc]

    def evaluate(self, x=None, *args, **kwargs):
        """Evaluates the task, without tokenising what holds ids already."""
        return (Trainer.evaluate if x is None or _is_of_ids(x) else super().evaluate.__func__)(self, x, *args, **kwargs)  # type: ignore[arg-type, misc]

    def predict(self, x, *args, **kwargs):
        """Predicts with the task, without tokenising what holds ids already."""
        return (Trainer.predict if _is_of_ids(x) else super().predict.__func__)(self, x, *args, **kwargs)  # type: ignore[arg-type, misc]

    @classmethod
    def from_preset(cls: Any, *args, **kwargs):
        """Makes the plain class's model, with its head and of the preset's own family, data-parallel."""
        if "plain_class" not in vars(cls):  # a subclass of such a class, which its own `__init__` makes
            return super().from_preset(*args, **kwargs)  # type: ignore[misc]
        options = {name: getattr(cls, name) for name in cls.option_names}
        return cls.make_data_parallel(cls.plain_class.from_preset(*args, **kwargs), **options)

    def save_to_preset(self: Any, *args, **kwargs):
        """Saves the plain class's preset, which loads without this project; mixed precision is saved as float32.

        KerasHub 0.32 cannot load a model that it saved in mixed precision (`Invalid dtype: mixed_bfloat16`).
        """
        backbone = getattr(self, "backbone", self)
        if not backbone.dtype_policy.name.startswith("mixed_"):
            return super().save_to_preset(*args, **kwargs)  # type: ignore[misc]
        policy, backbone.dtype_policy = backbone.dtype_policy, "float32"
        try:
            super().save_to_preset(*args, **kwargs)  # type: ignore[misc]
        finally:
            backbone.dtype_policy = policy


def _is_of_ids(x: Any) -> bool:
    return isinstance(x, tf.distribute.DistributedDataset) or hasattr(x, "iter_from_step")
