# SPDX-License-Identifier: Apache-2.0
"""The seam: all that this library takes from Keras and TensorFlow without their promise to keep it.

Every import from `keras.src`, `keras_hub.src` and `tensorflow.python` stands here, and here is every private attribute
that is read, set, called or overridden: what for, and what to do when it moves: tests/test_private.py tells first.
"Keras's trainer" is keras/src/backend/tensorflow/trainer.py and what it inherits from keras/src/trainers/trainer.py.

Of a model:

- `_call_has_training_arg`: whether call takes training; read train_step in Keras's trainer
- `_compile_loss`: the compiled losses; read compute_loss in Keras's trainer
- `_compile_metrics`: the compiled metrics; read compute_metrics in Keras's trainer
- `_compute_loss`: calls a compute_loss with or without training; read it in Keras's trainer
- `_loss_tracker`: the mean of the epoch's losses; read train_step in Keras's trainer
- `_losses_override`: gives compute_loss the terms of add_loss of all replicas; read Layer.losses
- `_distribute_strategy`: whether a model was made in the strategy's scope; read distribute_strategy in Keras's trainer
- `_flatten_layers`: all layers, at any depth; walk them as Layer.losses does
- `_make_function`: overridden, for the steps of one call; read make_train_function in Keras's trainer
- `_symbolic_build`: builds a model, losses and metrics from shapes; read fit in Keras's trainer
- `_maybe_symbolic_build`: overridden, to build from shapes, not from a batch; read fit in Keras's trainer
- `_unpickle_model`: an unpickled model is of the plain class; read KerasSaveable.__reduce__

Of a layer:

- `_loss_ids`: replaced by a set of each thread's own; read Layer.add_loss and Layer._clear_losses

Of a compiled model's losses:

- `_flat_losses`: the compiled losses, one of them steps aside while Keras finds its part of y; read CompileLoss

Of a loss of a function:

- `_fn_kwargs`: its axis; read LossFunctionWrapper, and keep tests of axis=0 green

Of a metric of a function:

- `_fn`: which function it is; read MeanMetricWrapper
- `_fn_kwargs`: its axis; read MeanMetricWrapper, and keep tests of axis=0 green

Of what Keras's fit iterates over:

- `_distributed_dataset`: the shapes of the data; read TFEpochIterator in Keras's trainer
- `_enumerate_iterator`: begins an epoch in its middle; read TFEpochIterator in Keras's trainer, and trainer.py here
- `_num_batches`: data that ends within a call; read EpochIterator, and trainer.py here
- `_steps_seen`: calls of fewer steps than steps_per_execution; read EpochIterator, and trainer.py here

Of a layer BatchNormalization:

- `_moments`: replaced by moments of the whole batch; read its call
- `_reduction_axes`: all axes but the channels'; read its build

Of a Keras variable:

- `_value`: this replica's copy takes its place in an update; read keras.Variable.value

Of an output of softmax or sigmoid:

- `_keras_logits`: losses are computed from them; read _get_logits in keras/src/backend/tensorflow/nn.py

Of an optimizer:

- `_distribution_strategy`: none in an update; read keras/src/backend/tensorflow/optimizer.py
- `_iterations`: counts steps, where iterations counts updates; read Optimizer.iterations
- `_trainable_variables`: those of `apply` without variables; read Optimizer.apply

Of a mirrored variable:

- `_get`: this replica's copy; read DistributedValues in TensorFlow's values.py
- `_aggregation`: none in a custom step, in which replicas assign their own copies; read DistributedVariable there

Of a mirrored strategy, by its attribute extended:

- `_input_workers_devices`: put back after an option has changed it; read _input_workers_with_options

Of any strategy, by its attribute extended:

- `_num_replicas_in_sync`: the number that is seen as 1 in a custom step; read Strategy.num_replicas_in_sync

Of a distributed data set's spec:

- `_value_specs`: the shapes of one replica; read PerReplicaSpec

Of an iterator over a distributed data set:

- `_options`: of the data set, and part of its type for a tf.function; read DistributedIterator

Of an adapter of arrays:

- `_inputs`: x, y and sample weights as Keras takes them; read get_tf_dataset in ArrayDataAdapter

Of a callback SwapEMAWeights:

- `_ema_weights_in_model`: whether they are swapped, which a checkpoint keeps; read the callback

Of the module multi_device_iterator_ops:

- `_create_device_dataset`: replaced, see below; if tests/test_device_copies.py passes without, remove it

That one function is replaced for the whole process, from the first `fit` on, by device_copies.py. TensorFlow makes
these data sets in a constructor, from nothing that a caller could give options to; without it, the end of an epoch can
wait for a minute.
"""

import collections
import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

# Of each package the minor versions that the tests pass with; benchmarks/versions.py runs them.
CHECKED_VERSIONS = {"keras": "3.13, 3.14, 3.15", "tensorflow": "2.20, 2.21"}
VERSIONS = {"keras": keras.__version__, "tensorflow": tf.__version__}  # keras-nightly is Keras too


def minor(version: str) -> list[int]:
    """The first two numbers."""
    return [int(number) for number in version.split(".")[:2]]


def check_version(package: str, version: str) -> None:
    """Refuses a version that is older than all checked ones, and warns of a newer one."""
    oldest, *_, newest = CHECKED_VERSIONS[package].split(", ")
    if minor(version) < minor(oldest):
        raise ImportError(f"keras_replicas needs {package} {oldest} or newer, not {version}: pip install -U {package}")
    if minor(version) > minor(newest):
        advice = "verify it by `python -m keras_replicas doctor`"
        warnings.warn(f"keras_replicas is checked against {package} {newest}, not {version}: {advice}", stacklevel=2)


for _package, _version in VERSIONS.items():
    check_version(_package, _version)
if keras.config.backend() != "tensorflow":
    raise RuntimeError(
        f"keras_replicas works with Keras's TensorFlow backend, not with {keras.config.backend()}: "
        "set the environment variable KERAS_BACKEND=tensorflow before Keras is imported"
    )

from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask  # the mask that travels with a tensor
from keras.src.backend.tensorflow import trainer as _trainer
from keras.src.losses.loss import reduce_weighted_values
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable, train_validation_split
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.distribute.distribute_lib import (
    _DefaultReplicaThreadMode,
    _pop_per_thread_mode,
    _push_per_thread_mode,
    _ThreadMode,
)
from tensorflow.python.eager.context import context as eager_context  # holds the workers' key-value store

TensorFlowTrainer = getattr(_trainer, "TensorFlowTrainer", None) or _trainer.Trainer  # its name from Keras 3.16 on
ACTIVITIES_ADD_UP = minor(keras.__version__) < [3, 14]  # an activity_regularizer is a sum over examples, not a mean
# Modules between a user's random draw and TensorFlow's.
DRAWING_MODULES = ("tensorflow", "keras.src.random", "keras.src.backend.tensorflow.random")


@contextlib.contextmanager
def layer_names_kept() -> Iterator[None]:
    """Context after which Keras goes on numbering the names of layers, as "dense_7", where it was."""
    counts = get_global_attribute("object_name_uids")
    try:
        yield
    finally:
        set_global_attribute("object_name_uids", counts)


def reset_layer_names() -> None:
    """Makes Keras number the names of layers from the first."""
    set_global_attribute("object_name_uids", collections.defaultdict(int))


@contextlib.contextmanager
def no_stateless_scope() -> Iterator[None]:
    """While it lasts, Keras's variables are assigned as outside of any `keras.StatelessScope`, in this thread."""
    scope = get_global_attribute("stateless_scope")
    set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        set_global_attribute("stateless_scope", scope)


@contextlib.contextmanager
def strategy_seen(strategy: Any = None, replica_context: Any = None) -> Iterator[None]:
    """While it lasts, `tf.distribute.get_strategy()` is this one, in this thread alone; None for no strategy."""
    mode = _DefaultReplicaThreadMode() if strategy is None else _ThreadMode(strategy, None, replica_context)
    _push_per_thread_mode(mode)
    try:
        yield
    finally:
        _pop_per_thread_mode()
