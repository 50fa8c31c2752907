# SPDX-License-Identifier: Apache-2.0
"""The seam: all that this library takes from Keras and TensorFlow without their promise to keep it.

Every import from `keras.src`, `keras_hub.src` and `tensorflow.python` stands here, and every private attribute that is
relied upon has a row in `ATTRIBUTES`. A new version of either may move any of them: tests/test_private.py then fails
first, with the row's advice.

One function is replaced for the whole process, from the first `fit` on: `_create_device_dataset`, by device_copies.py.
TensorFlow makes these data sets in a constructor, from nothing that a caller could give options to; without it, the end
of an epoch can wait for a minute.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from keras.src.backend import get_keras_mask, set_keras_mask  # the mask that travels with a tensor
from keras.src.backend.common.global_state import set_global_attribute
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses.loss import reduce_weighted_values
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
from keras.src.trainers.data_adapters import get_data_adapter
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.distribute.distribute_lib import (
    _DefaultReplicaThreadMode,
    _pop_per_thread_mode,
    _push_per_thread_mode,
    _ThreadMode,
)
from tensorflow.python.eager.context import context as eager_context  # holds the workers' key-value store
from tensorflow.python.eager.record import could_possibly_record

CHECKED_VERSIONS = {"keras": "3.15", "tensorflow": "2.21"}


class Attribute(NamedTuple):
    """A private attribute of Keras's or TensorFlow's that this library reads, sets, calls or overrides."""

    owner: str  # whose it is
    name: str
    purpose: str
    advice: str  # when it moves


MODEL, LOSSES, EPOCHS = "keras.Model", "a compiled model's losses", "what Keras's fit iterates over"
READ_TRAINER = (
    "read train_step and test_step in keras/src/backend/tensorflow/trainer.py, and keras/src/trainers/trainer.py"
)
READ_FIT = "read fit and TFEpochIterator in keras/src/backend/tensorflow/trainer.py, and trainer.py here"
ATTRIBUTES = (
    Attribute(MODEL, "_call_has_training_arg", "whether call takes training", READ_TRAINER),
    Attribute(MODEL, "_compile_loss", "the compiled losses", READ_TRAINER),
    Attribute(MODEL, "_compile_metrics", "the compiled metrics", READ_TRAINER),
    Attribute(MODEL, "_compute_loss", "calls a compute_loss with or without training", READ_TRAINER),
    Attribute(MODEL, "_loss_tracker", "the mean of the epoch's losses", READ_TRAINER),
    Attribute(
        MODEL, "_losses_override", "gives compute_loss the terms of add_loss of all replicas", "read Layer.losses"
    ),
    Attribute(MODEL, "_distribute_strategy", "whether a model was made in the strategy's scope", READ_TRAINER),
    Attribute(MODEL, "_flatten_layers", "all layers, at any depth", "walk them as Layer.losses does"),
    Attribute(MODEL, "_make_function", "overridden: the steps of one call", READ_FIT),
    Attribute(MODEL, "_symbolic_build", "builds a model, losses and metrics from shapes", READ_FIT),
    Attribute(MODEL, "_maybe_symbolic_build", "overridden: builds from the data's shapes, not from a batch", READ_FIT),
    Attribute(MODEL, "_unpickle_model", "an unpickled model is of the plain class", "read KerasSaveable.__reduce__"),
    Attribute(LOSSES, "_flat_losses", "where `Noted` stands for each loss", "read CompileLoss in compile_utils.py"),
    Attribute("a metric of a function", "_fn", "which function it is", "read MeanMetricWrapper"),
    Attribute("a loss of a function", "_fn_kwargs", "its axis", "read LossFunctionWrapper; keep tests of axis=0 green"),
    Attribute("a metric of a function", "_fn_kwargs", "its axis", "read MeanMetricWrapper; keep tests of axis=0 green"),
    Attribute(EPOCHS, "_distributed_dataset", "the shapes of the data", READ_FIT),
    Attribute(EPOCHS, "_enumerate_iterator", "begins an epoch in its middle", READ_FIT),
    Attribute(EPOCHS, "_steps_seen", "calls of fewer steps than steps_per_execution", READ_FIT),
    Attribute("BatchNormalization", "_moments", "replaced: moments of the whole batch", "read its call"),
    Attribute("BatchNormalization", "_reduction_axes", "all axes but the channels'", "read its build"),
    Attribute("Dense", "_kernel", "the kernel to which LoRA's adapters are added", "read Dense.kernel"),
    Attribute(
        "keras.Variable", "_value", "this replica's copy takes its place in an update", "read keras.Variable.value"
    ),
    Attribute("an optimizer", "_distribution_strategy", "none in an update", "read backend/tensorflow/optimizer.py"),
    Attribute("an optimizer", "_iterations", "counts steps; iterations counts updates", "read Optimizer.iterations"),
    Attribute("a mirrored variable", "_get", "this replica's copy", "read DistributedValues in TensorFlow's values.py"),
    Attribute("a distributed data set's spec", "_value_specs", "the shapes of one replica", "read PerReplicaSpec"),
    Attribute(
        "multi_device_iterator_ops",
        "_create_device_dataset",
        "replaced: copies of batches that no thread tunes",
        "if tests/test_device_copies.py passes without the replacement, remove it",
    ),
)


@contextlib.contextmanager
def strategy_seen(strategy: Any = None, replica_context: Any = None) -> Iterator[None]:
    """While it lasts, `tf.distribute.get_strategy()` is this one, in this thread alone; None for no strategy."""
    mode = _DefaultReplicaThreadMode() if strategy is None else _ThreadMode(strategy, None, replica_context)
    _push_per_thread_mode(mode)
    try:
        yield
    finally:
        _pop_per_thread_mode()
