# SPDX-License-Identifier: Apache-2.0
"""Builds a model, its losses, metrics and optimizer before its first step, from the shapes of the data."""

import contextlib
import threading
from typing import Any

import keras
import tensorflow as tf

from keras_replicas.batchnorm import take_moments_of_global_batch
from keras_replicas.data import row_by_row
from keras_replicas.device_copies import do_not_tune_device_copies
from keras_replicas.division import divide
from keras_replicas.empty import first_input
from keras_replicas.errors import UserError
from keras_replicas.loop import StepLoop, has_own
from keras_replicas.noise import keep_global_seed
from keras_replicas.optimizers import refuse_made_outside_scope
from keras_replicas.private import ACTIVITIES_ADD_UP
from keras_replicas.replicas import map_given
from keras_replicas.step_counter import StepCounter
from keras_replicas.step_plans import StepPlans
from keras_replicas.step_probe import build_by_running
from keras_replicas.trial_run import SHARDS, constant_batch_size, few_examples, local_batch


class LossIds(threading.local):
    """The identities of the losses that a layer's `call` has added, for each thread: replicas clear their own alone."""

    def __init__(self):
        self._ids: set[int] = set()

    def add(self, identity: int) -> None:
        """Adds one."""
        self._ids.add(identity)

    def clear(self) -> None:
        """Removes those of this thread."""
        self._ids.clear()

    def __contains__(self, identity: int) -> bool:
        return identity in self._ids


class Building(StepLoop):
    """For the trainer in `trainer.py`."""

    accumulate = 1
    custom_step: str | None = None
    _begins_anywhere = False  # whether `fit` may go on in the middle of an epoch
    _divided_by: dict[str, str] = {}  # by the name of the function
    _fit_iterator: Any = False  # Keras's, over epochs; None from when `fit` begins until it is known

    @property
    def steps_by_keras(self):
        """Whether Keras's own step runs: on one replica, unless something is asked for that Keras has not."""
        ours = self.accumulate > 1 or self.mean_over != "examples"
        return self.distribute_strategy.num_replicas_in_sync == 1 and not ours

    def _scope(self):
        return self.distribute_strategy.scope()

    def _forget_function(self, name, x):
        """Forgets Keras's function of a step on one replica where data changes between our iterators and Keras's.

        They are of different types, of which its `tf.function`, made with `reduce_retracing`, takes one.
        """
        divided_by = "ours" if isinstance(x, tf.distribute.DistributedDataset) else "Keras"
        if self._divided_by.get(name, divided_by) != divided_by and self.steps_by_keras:
            setattr(self, name, None)
        self._divided_by = self._divided_by | {name: divided_by}

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Builds from the shapes of the data; without a strategy nothing, as Keras."""
        if iterator is not None:
            self._divide_evenly(iterator)
        first = iterator is not None and self._fit_iterator is None
        if first:
            self._fit_iterator = iterator
        steps_known = first and (iterator.steps_per_epoch or (iterator.num_batches and not self.steps_by_keras))
        goes_on = steps_known and (self._begins_anywhere or not self.steps_by_keras)
        if goes_on:
            self._begin_epochs_where_they_are(iterator)
        if self.steps_by_keras and not self._distribute_strategy:
            return
        if iterator is not None:
            data_batch = keras.tree.map_structure(_of_one_replica, iterator._distributed_dataset.element_spec)
        self.build_for(data_batch)
        step = self.custom_step_function("train_step")
        is_built = all(layer.built for layer in self._flatten_layers())
        if self.steps_by_keras and step and iterator is not None and not is_built:
            # On one replica, the step is Keras's, in which no variable can be made under a strategy.
            batch = local_batch(self.distribute_strategy, next(iter(iterator._distributed_dataset)))
            build_by_running(self, step, few_examples(batch, sum(SHARDS)))

    def _divide_evenly(self, iterator):
        """Divides the data of Keras's iterator over epochs, which TensorFlow has divided unevenly.

        Data that the user or `arguments.py` has distributed stays as it is.
        """
        if self.distribute_strategy.num_replicas_in_sync == 1 or getattr(iterator, "is_divided_evenly", False):
            return
        dataset = iterator.data_adapter.get_tf_dataset()
        if isinstance(dataset, tf.data.Dataset):
            dataset = row_by_row(dataset)
            iterator._distributed_dataset = divide(self.distribute_strategy, dataset)
            iterator.is_divided_evenly = True

    def build_for(self, batch):
        """Builds the model and its optimizer for batches like this one, of arrays or of `tf.TensorSpec`s."""
        with self._scope():
            if self._has_call:
                with self._as_its_step_allows(batch):
                    if not self.trainable_variables and all(layer.built for layer in self._flatten_layers()):
                        self._call_symbolically(batch)  # it makes layers in its call, and yet says that it is built
                    self._symbolic_build(data_batch=batch)
                if self._has_outputs_of_one_axis is None:
                    self._has_outputs_of_one_axis = self._gives_one_axis(batch)
            self._prepare()
            self._build_optimizer()

    @contextlib.contextmanager
    def _as_its_step_allows(self, batch):
        """Does without building where a custom step may give the model something else than the data.

        The step then builds it, before it is first traced: see `step_probe.py`.

        Raises:
            UserError: when the model could be built for the whole batch, but not for this part of it.
        """
        try:
            yield
        except Exception:
            if has_own(self, "train_step"):
                return
            rows = self._rows_that_it_takes(batch)
            try:
                self._call_symbolically(batch)
            except Exception:  # the model's own error, as without a strategy
                if rows:
                    raise constant_batch_size(f"{type(self).__name__}.call", rows) from None
                raise
            raise  # of a loss or metric

    def _rows_that_it_takes(self, batch):
        """The number of rows of the whole batch, if the model can be called for that; None if not, or unknown."""
        replicas = self.distribute_strategy.num_replicas_in_sync
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        is_given = any(leaf is not None for leaf in keras.tree.flatten(x))
        rows = first_input(x).shape[0] if is_given else None
        if replicas == 1 or not rows:
            return None
        rows *= replicas
        whole = map_given(lambda leaf: tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype), x)
        try:
            self._call_symbolically((whole,))
        except Exception:
            return None
        return rows

    def _gives_one_axis(self, batch):
        """Whether, on several replicas, an output has no axis beside that of the examples."""
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return False
        outputs = getattr(self, "outputs", None)  # of a functional model
        if outputs is None:
            try:
                outputs = self._call_symbolically(batch)
            except Exception:  # a custom step gives it something else than the data
                return False
        return any(len(output.shape) == 1 for output in keras.tree.flatten(outputs) if output is not None)

    def _call_symbolically(self, batch):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with self._scope():
            return self(
                keras.tree.map_structure(lambda t: None if t is None else keras.KerasTensor(t.shape, t.dtype.name), x)
            )

    @property
    def _has_call(self):
        """Whether it can be built by a call; keras.io's generative examples have a `train_step` only."""
        return type(self).call is not keras.Model.call

    def _prepare(self):
        self._make_step_counter()
        if self.compiled:
            self._make_step_plans()
        if self.steps_by_keras:
            if self._distribute_strategy:
                keep_global_seed(self)
            return
        keep_global_seed(self)
        for layer in self._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization):
                take_moments_of_global_batch(layer, self)
            if not isinstance(layer._loss_ids, LossIds):
                layer._loss_ids = LossIds()
            if getattr(layer, "stateful", False) and self.distribute_strategy.num_replicas_in_sync > 1:
                raise UserError(
                    f"the layer {layer.name} has stateful=True, so it needs the same rows in every batch, and replicas "
                    "get other ones: set stateful=False, or use one replica"
                )
            if ACTIVITIES_ADD_UP and layer.activity_regularizer is not None:
                raise UserError(
                    f"{layer.name} has an activity_regularizer, which Keras 3.13 sums over each replica's examples: "
                    "install Keras 3.14 or newer, or use one replica"
                )
        do_not_tune_device_copies()
        if not self.compiled or self.optimizer is None:
            return
        refuse_made_outside_scope(self.optimizer)
        if has_own(self, "train_step") and self.accumulate > 1:
            raise UserError(f"accumulate has no effect: {type(self).__name__} has its own train_step. Leave it out")
        self._build_optimizer()

    def _make_step_counter(self):
        """Makes the counts of steps, once."""
        if self.step_counter is None:  # assigned as usual, they would be tracked
            object.__setattr__(self, "step_counter", StepCounter(self))

    def _begin_evaluation(self):
        """Counts an evaluation or a prediction, so that it draws other random numbers than the one before."""
        if not self.steps_by_keras:
            self._make_step_counter()
            self.step_counter.begin_evaluation()

    def _make_step_plans(self):
        """Makes what custom steps need, once."""
        if self.step_plans is None:  # assigned as usual, they would be tracked
            object.__setattr__(self, "step_plans", StepPlans(self, self.custom_step))

    def _build_optimizer(self):
        layers = self._flatten_layers(include_self=self._has_call)
        is_built = all(layer.built for layer in layers) and self.trainable_variables
        if self.optimizer is not None and not self.optimizer.built and is_built:
            self.optimizer.build(self.trainable_variables)


def _of_one_replica(spec):
    """The spec of one replica's part of the data; None for an input that is not given."""
    spec = getattr(spec, "_value_specs", [spec])[0]
    return spec if hasattr(spec, "shape") else None  # an optional, or TensorFlow's spec of None
