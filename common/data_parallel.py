# SPDX-License-Identifier: Apache-2.0
"""`keras.Model` for N replicas: `fit`, `evaluate` and the rest compute under a strategy what one device would.

`data_parallel(cls)` is a subclass whose trainer stands where Keras's own does; nothing in Keras itself is replaced.
Checked against Keras 3.15 and TensorFlow 2.21; docs/keras-under-tf-distribute.md shows what Keras's own trainer does.
"""

import contextlib
import functools
import importlib.metadata
import inspect
import types
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, convert_to_np_if_not_ragged

from common.local_optimizer import local_value, no_strategy, on_local_copies
from common.noise import make_dropout_fast, noise_seeds
from common.optimizers import do_not_reduce_again
from common.replicas import first_replica, steps_in_one_call, sum_over_replicas
from common.whole_batch import (
    count_examples,
    gather,
    gather_around,
    loss_adds_up,
    loss_parts,
    metric_adds_up,
    moments,
    pack,
    with_share_of_gradient,
)

CHECKED_VERSIONS = {"keras": "3.15", "tensorflow": "2.21"}


def data_parallel(model_class: type[keras.Model], *mixins: type) -> type[keras.Model]:
    """A class of models that train on N replicas as on one; itself, where it is one already.

    It is made, compiled and used as `model_class`, with `mixins` before it among its bases; make a model inside of the
    strategy's scope. Under a strategy of N replicas, with batches of any size:

    - The loss that is minimised and reported is what one device would compute for the whole batch, by the loss's own
      reduction. Keras's own losses are summed by replica and divided once. For any other loss, and for a
      `compute_loss` of the class's own, every replica gathers what the others predicted, and computes the whole.
    - A term of `add_loss` is weighted by the replica's share of the examples, as fits a mean over examples, which
      `activity_regularizer` is too, and a regulariser of weights, which is the same on all.
    - Metrics are those of the whole data. Keras's own add up over replicas; any other, and a `compute_metrics` of the
      class's own, sees the whole batch on every replica.
    - Gradients are summed before the optimizer sees them: its clipping, accumulation over steps and the rest are by
      the whole batch.
    - `BatchNormalization` takes the moments of the whole batch. Other state that a layer updates is averaged by
      examples.
    - Dropout's noise is a function of the seed, the step and the replica, and has no state; see `common.noise`.
    - `jit_compile` compiles the forward and backward pass of each replica, and `accumulate` divides it into parts.
      Both need a single loss of Keras's own, metrics of Keras's own and neither `add_loss` nor `BatchNormalization`.
    - A class with a `train_step` or `test_step` of its own has it run on each replica, and the values that it returns
      are averaged, as Keras does.

    Attributes of an instance:
        accumulate: parts into which each replica's batch is divided, one after another, to save memory. It must divide
            the batch. Set it before `fit`.
        told_to_stop: set it True on any worker; after the step at hand, `all_told_to_stop` is True on every one.
        steps_done: steps that `fit` has done. Set it when a run goes on from a checkpoint.
        at_epoch_end: whether the last of them is the last of its epoch, where `fit` was told `steps_per_epoch`.
        step_values: for the steps since the last callback, a dict of vectors: each step's own `loss`, metrics (of
            Keras's own), `learning_rate`, and `waited`, seconds that this worker waited for each batch.
    """
    if issubclass(model_class, Trainer):
        return model_class
    _warn_outside_checked_versions()
    bases = (*mixins, *([HubTask] if hasattr(model_class, "save_to_preset") else []), model_class, Trainer)
    # Under its plain name, so that what is saved is the plain class's.
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(model_class.__name__, bases, names | {"plain_class": model_class})


class Trainer(TensorFlowTrainer):
    """Stands where Keras's trainer does, among the bases of a `data_parallel` class; see there."""

    accumulate = 1
    mean_over = "examples"  # what an epoch's loss weighs a step by; "values": by what the step's loss was divided by
    told_to_stop = all_told_to_stop = False
    steps_done = 0
    step_values: dict[str, np.ndarray] | None = None

    def update_counts(self, x, y, sample_weight):
        """For metrics of a class's own, that add up: update them here, from a replica's part of a batch."""

    @functools.wraps(TensorFlowTrainer.compile)
    def compile(self, *args, **kwargs):  # noqa: D102
        with self._scope():
            super().compile(*args, **kwargs)
            self._prepare()

    def compile_from_config(self, config):
        """As Keras's, which would take this `compile` for a user's own."""
        if type(self).compile is Trainer.compile:
            self.compile(**keras.saving.deserialize_keras_object(config))
        else:
            super().compile_from_config(config)

    @functools.wraps(TensorFlowTrainer.fit)
    def fit(self, *args, **kwargs):  # noqa: D102
        given = inspect.signature(TensorFlowTrainer.fit).bind(self, *args, **kwargs).arguments
        self._steps_per_epoch = given.get("steps_per_epoch")
        self._fit_began_at = self.steps_done
        return super().fit(*args, **kwargs)

    @functools.wraps(TensorFlowTrainer.evaluate)
    def evaluate(self, *args, **kwargs):  # noqa: D102
        given = inspect.signature(TensorFlowTrainer.evaluate).bind(self, *args, **kwargs).arguments
        self._test_steps_left = given.get("steps")
        return super().evaluate(*args, **kwargs)

    def train_step(self, data):
        """One replica's part of a training step; returns a dict of what all steps of the epoch come to so far."""
        return _split(self._step(data, training=True))[0]

    def test_step(self, data):
        """One replica's part of an evaluation step."""
        return _split(self._step(data, training=False))[0]

    def make_train_function(self, force=False):
        """The train function leaves each step's own values in `step_values`."""
        if self.train_function is not None and not force:
            return
        own = type(self).train_step is not Trainer.train_step
        run_steps = self._on_replicas(self.train_step if own else functools.partial(self._step, training=True), own)

        def train_function(iterator):
            left = None if self._steps_per_epoch is None else self._steps_per_epoch - self._steps_of_epoch()
            values = run_steps(iterator, left)
            logs, self.step_values = _split(values)
            self.steps_done += len(next(iter(values.values())))
            return _last(logs)

        self.train_function = train_function

    def make_test_function(self, force=False):
        """See `_on_replicas`."""
        if self.test_function is not None and not force:
            return
        own = type(self).test_step is not Trainer.test_step
        run_steps = self._on_replicas(self.test_step if own else functools.partial(self._step, training=False), own)

        def test_function(iterator):
            values = run_steps(iterator, self._test_steps_left)
            if self._test_steps_left is not None:
                self._test_steps_left -= len(next(iter(values.values())))
            return _last(_split(values)[0])

        self.test_function = test_function

    def make_predict_function(self, force=False):
        """As Keras's; a model that is not built yet is built first, for XLA."""
        if self.predict_function is not None and not force:
            return
        super().make_predict_function(force)
        predict = self.predict_function
        local = self.distribute_strategy.experimental_local_results

        def predict_function(data):
            if self.jit_compile and not all(layer.built for layer in self._flatten_layers()):
                parts = [local(leaf)[0] for leaf in keras.tree.flatten(data[0])]
                given = [None if part is None else keras.KerasTensor(part.shape, part.dtype) for part in parts]
                x, _, _ = keras.utils.unpack_x_y_sample_weight(keras.tree.pack_sequence_as(data[0], given))
                with self._scope():
                    compute_output_spec(self, x)
            return predict(data)

        self.predict_function = predict_function

    def train_on_batch(self, *args, **kwargs):
        """As Keras's; each replica takes a part of the batch."""
        self._steps_per_epoch = None
        return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args, **kwargs):
        """As Keras's; each replica takes a part of the batch."""
        self._test_steps_left = None
        return super().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, x):
        """As Keras's; each replica takes a part of the batch."""
        self.make_predict_function()
        return keras.tree.map_structure(convert_to_np_if_not_ragged, self.predict_function([self._divided((x,))]))

    @property
    def at_epoch_end(self):
        """See `data_parallel`."""
        return self._steps_per_epoch is not None and self._steps_of_epoch() == 0

    def _steps_of_epoch(self):
        return (self.steps_done - self._fit_began_at) % self._steps_per_epoch

    def _scope(self):
        return self._distribute_strategy.scope() if self._distribute_strategy else contextlib.nullcontext()

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Builds from the shapes of the data.

        Keras builds from the first batch, by averaging its inputs over replicas, and dies before step 1 where they are
        booleans, strings or uneven (keras-team/keras#19246, #21172), and always on several workers
        (keras-team/keras#20585).
        """
        if iterator is not None:
            data_batch = keras.tree.map_structure(_of_one_replica, iterator._distributed_dataset.element_spec)
        with self._scope():
            self._symbolic_build(data_batch=data_batch)
            self._prepare()

    def _prepare(self):
        own_step = type(self).train_step is not Trainer.train_step
        for layer in self._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization):
                layer._moments = functools.partial(_moments_of_whole_batch, layer, self)
            if getattr(layer, "stateful", False) and self.distribute_strategy.num_replicas_in_sync > 1:
                raise ValueError(f"{layer.name} keeps its state from batch to batch, which no replica has: use one")
        make_dropout_fast(self)
        if self.optimizer is None:
            return
        if not own_step:
            do_not_reduce_again(self.optimizer)
        if self.built and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)

    def _on_replicas(self, step, own):
        """A function of (iterator, left) that does as many steps as one call has, and returns a dict of arrays.

        A worker that is told to stop says so in the step's reduction, so that all stop after the same step.

        Args:
            step: of one replica.
            own: whether it is the class's own.
        """
        strategy = self.distribute_strategy

        def replica_step(data, stop):
            data = keras.tree.map_structure(lambda t: None if isinstance(t, tf.experimental.Optional) else t, data)
            if not own:
                return step(data, stop=stop)
            logs = keras.tree.map_structure(lambda t: tf.cast(t, tf.float32), step(data))
            logs, stop = sum_over_replicas((logs, stop))
            return {name: value / strategy.num_replicas_in_sync for name, value in logs.items()} | {"stop": stop}

        def one_step(iterator, stop):
            return first_replica(strategy, strategy.run(replica_step, args=(next(iterator), stop)))

        def step_on_data(data, stop):
            return first_replica(strategy, strategy.run(replica_step, args=(data, stop)))

        if not self.run_eagerly:
            do_steps = steps_in_one_call(one_step)
            step_on_data = tf.function(step_on_data, autograph=False, reduce_retracing=True)

        def run_steps(iterator, left):
            stop = tf.constant(float(self.told_to_stop))
            if left is not None and not self.run_eagerly:
                values = do_steps(iterator, min(self.steps_per_execution, left), self.told_to_stop)
            else:
                rows = []
                for _ in range(self.steps_per_execution):
                    try:
                        if isinstance(iterator, types.GeneratorType):
                            rows.append(_as_row(step_on_data(self._divided(next(iterator)), stop)))
                        elif self.run_eagerly:
                            rows.append(_as_row(one_step(iterator, stop)))
                        else:
                            rows.append(do_steps(iterator, 1, self.told_to_stop))
                    except (StopIteration, tf.errors.OutOfRangeError):
                        if not rows:
                            raise
                        break
                values = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            self.all_told_to_stop = bool(values.pop("stop")[-1])
            return values

        return run_steps

    def _divided(self, batch):
        """Each replica's part of a batch, in their order; the last ones may have fewer examples, or none."""
        strategy = self.distribute_strategy
        replicas = strategy.num_replicas_in_sync

        def part(leaf, context):
            size = -(-leaf.shape[0] // replicas)
            return leaf[context.replica_id_in_sync_group * size :][:size]

        def distributed(leaf):
            if leaf is None:
                return None
            leaf = tf.convert_to_tensor(leaf)
            return strategy.experimental_distribute_values_from_function(lambda context: part(leaf, context))

        return batch if replicas == 1 else keras.tree.map_structure(distributed, batch)

    def _step(self, data, stop=0.0, training=False):
        """One replica's part of a step: a dict of running values, each step's own as `step/...`, and `stop`.

        All are the same on every replica: sums are added up over replicas, in a single reduction, and divided once.
        """
        data = keras.utils.unpack_x_y_sample_weight(data)
        metric_variables = self._metric_variables()
        state = [tf.convert_to_tensor(local_value(variable)) for variable in metric_variables]
        gathers = not (self._loss_adds_up() and self._metrics_add_up())
        if gathers:
            self._refuse_if_pure("a loss, metric, compute_loss or compute_metrics of your own")
            state = _sum(state)
        scale, factor = tf.constant(1.0), tf.constant(1.0)
        if training and self.optimizer is not None and isinstance(of_one := self.optimizer.scale_loss(1.0), tf.Tensor):
            scale, factor = of_one, _replicas() / _sum(count_examples(data[0]))  # keeps numbers small in float16
        weights = [tf.convert_to_tensor(variable.value) for variable in self.trainable_variables]
        gradients, sums, whole = self._in_parts(weights, state if gathers else [], data, scale, factor, training)

        sums["stop"] = tf.cast(stop, tf.float32)
        if not gathers:
            sums["metrics before"] = state
        packed, unpack = pack(sums)
        leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
        with tf.control_dependencies(leaves):  # at the end of the data, nothing is to be counted
            reduced = _sum(([gradient for gradient in gradients if gradient is not None], packed))
        sums = unpack(reduced[1])
        count = sums.get("count", 1.0)
        loss = (whole | sums)["loss"] if "total" not in sums else tf.math.divide_no_nan(sums["total"], count)
        step_values = {"loss": loss}
        if training:
            step_values["learning_rate"] = tf.cast(self.optimizer.learning_rate, tf.float32)
            self._assign_state(sums)
            share = tf.math.divide_no_nan(1.0, count * factor) if "total" in sums else None
            self._apply(gradients, reduced[0], share)

        def track_losses():
            if self._loss_tracker is not None:
                over = count if self.mean_over == "values" and "count" in sums else sums["examples"]
                self._loss_tracker.update_state(loss, sample_weight=over)
            for tracker, value in zip(self._loss_trackers(), sums.get("losses", []), strict=False):
                # In a graph Keras does not know how many examples a batch has, and weighs all batches alike.
                tracker.update_state(value, sample_weight=sums["examples"] if self.run_eagerly else None)

        before = whole.get("metrics") or (state if gathers else sums["metrics before"])
        now = [old + new for old, new in zip(before, sums["metrics"], strict=True)]
        with no_strategy(), keras.StatelessScope(list(zip(metric_variables, now, strict=True))) as scope:
            track_losses()
            logs = self.get_metrics_result() if self._metrics_add_up() else self.compute_metrics(*whole["batch"])
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        for variable in metric_variables:  # read, Keras's metric variables are the sum over replicas: the first has all
            value = scope.get_current_value(variable)
            local_value(variable).assign(tf.where(tf.equal(replica, 0), value, tf.zeros_like(value)))
        if not gathers:
            with no_strategy(), keras.StatelessScope(list(zip(metric_variables, sums["metrics"], strict=True))):
                track_losses()
                step_values |= {name: value for name, value in self.get_metrics_result().items() if name != "loss"}
        return logs | {f"step/{name}": value for name, value in step_values.items()} | {"stop": sums["stop"]}

    def _apply(self, gradients, reduced, share):
        """The optimizer's step, by gradients of the whole batch; `reduced` are those that are not None."""
        if not self.trainable_variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        reduced = iter(reduced)
        gradients = [None if gradient is None else next(reduced) for gradient in gradients]
        if share is not None:
            gradients = [None if g is None else g * tf.cast(share, g.dtype) for g in gradients]
        with on_local_copies(self.optimizer, self.trainable_variables):
            self.optimizer.apply(gradients, self.trainable_variables)

    def _assign_state(self, sums):
        """What layers have updated, as the mean over the batch's examples, to this replica's own copies."""
        variables = self.trainable_variables + self.non_trainable_variables
        for index, total in sums["state"].items():
            value = tf.math.divide_no_nan(total, sums["examples"])
            variable = local_value(variables[int(index)])
            variable.assign(tf.cast(value if variable.dtype.is_floating else tf.round(value), variable.dtype))

    def _in_parts(self, weights, state, data, scale, factor, training):
        """See `_part`; of the `accumulate` parts of this replica's batch, gradients and sums are added up."""
        part = self._part
        if self.jit_compile:
            part = self._jitted = getattr(self, "_jitted", None) or tf.function(
                self._part, autograph=False, jit_compile=True
            )
        if self.accumulate == 1 or not training:
            return part(weights, self._others(0), state, data, scale, factor, training)
        parts = keras.tree.map_structure(
            lambda t: None if t is None else tf.reshape(t, tf.concat([[self.accumulate, -1], tf.shape(t)[1:]], axis=0)),
            data,
        )

        @tf.function(autograph=False)
        def numbered_part(number):
            own = keras.tree.map_structure(lambda t: None if t is None else t[number], parts)
            return part(weights, self._others(number), state, own, scale, factor, training)

        first = numbered_part(tf.constant(0))
        flat = [value for value in tf.nest.flatten(first) if value is not None]

        def add(totals, number):
            values = [value for value in tf.nest.flatten(numbered_part(number)) if value is not None]
            return [total + value for total, value in zip(totals, values, strict=True)]

        totals = iter(tf.foldl(add, tf.range(1, self.accumulate), initializer=flat, parallel_iterations=1))
        return tf.nest.map_structure(lambda value: None if value is None else next(totals), first)

    def _part(self, weights, others, state, data, scale, factor, training):
        """A part of a batch, without a change to any variable.

        Args:
            weights, others, state: values of the model's trained and other variables, and of its metrics'.
            data: (x, y, sample_weight).
            scale: of the loss whose gradient is taken.
            factor: by which a single loss is multiplied too.
            training: or evaluation.

        Returns:
            Gradients, a list with None where there is none. A dict of what adds up over replicas. And what is the same
            on all of them: `loss`, `batch`, and `metrics`, values of their variables, where it was needed.
        """
        x, y, sample_weight = data
        variables = self.trainable_variables + self.non_trainable_variables
        metric_variables = self._metric_variables()
        mapping = list(zip(variables, [*weights, *others], strict=True))
        mapping += [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metric_variables]
        examples = count_examples(x)
        sums, whole = {"examples": examples}, {}
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            if training:
                tape.watch(weights)
            with keras.StatelessScope(mapping, collect_losses=True) as scope:
                given = dict(scope.state_mapping)
                y_pred = self(x, training=training) if self._call_has_training_arg else self(x)
                self.update_counts(x, y, sample_weight)
                if self._compile_metrics is not None and self._metrics_add_up():
                    self._compile_metrics.update_state(y, y_pred, sample_weight)
                added = self._added_losses(scope)
                parts = self._loss_parts(y, y_pred, sample_weight) if self._loss_adds_up() else []
                if len(parts) == 1 and not added:
                    ((total, count, weight),) = parts
                    total *= weight
                    sums |= {"total": total} | ({} if count is None else {"count": count})
                    objective = total * tf.cast(scale * factor, total.dtype)
            if "total" not in sums:
                self._refuse_if_pure("several losses, or with add_loss or a regulariser")
                if self._loss_adds_up():
                    sums["loss"], sums["losses"] = self._sum_of_losses(examples, parts, added)
                    objective = sums["loss"]
                else:
                    whole["loss"], whole["metrics"] = self._own_loss(
                        mapping, weights, state, data, y_pred, self._summed(examples, added), training
                    )
                    objective = whole["loss"]
                objective *= tf.cast(scale, objective.dtype)
        gradients = tape.gradient(objective, weights) if training and weights else []
        gradients = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        after = {id(v): scope.get_current_value(v) for v in [*variables, *metric_variables]}
        sums["state"] = {
            str(index): tf.cast(after[id(variable)], tf.float32) * examples
            for index, variable in enumerate(variables)
            if after[id(variable)] is not given[id(variable)] and variable.name != "seed_generator_state"
        }
        sums["metrics"] = self._metric_sums(given, after)
        if not self._metrics_add_up():
            whole["batch"] = (gather(x) if self._has_own("compute_metrics") else x, *gather((y, y_pred, sample_weight)))
        return gradients, sums, whole

    def _loss_parts(self, y, y_pred, sample_weight):
        """`whole_batch.loss_parts` of every compiled loss, and its weight."""
        if self._compile_loss is None:
            return []
        parts, losses = [], self._compile_loss._flat_losses

        def noting(each):
            def note(*batch):
                total, count = loss_parts(each.loss, *batch)
                parts.append((total, count, 1.0 if each.loss_weights is None else each.loss_weights))
                return total

            return each._replace(loss=note)

        self._compile_loss._flat_losses = [noting(each) for each in losses]  # which finds each one's part of y
        try:
            self._compile_loss(y, y_pred, sample_weight)
        finally:
            self._compile_loss._flat_losses = losses
        return parts

    def _sum_of_losses(self, examples, parts, added):
        """This replica's part of the whole batch's loss, and of each compiled loss."""
        counts = [tf.constant(1.0) if count is None else count for _, count, _ in parts]
        all_examples, counts = _sum((examples, counts))
        losses = [
            total if own is None else tf.math.divide_no_nan(total, count)
            for (total, own, _), count in zip(parts, counts, strict=True)
        ]
        share = tf.math.divide_no_nan(examples, all_examples)
        terms = [loss * weight for loss, (_, _, weight) in zip(losses, parts, strict=True)]
        terms += [tf.math.multiply_no_nan(loss, share) for loss in added]
        if not terms:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        return tf.add_n(terms), losses

    def _summed(self, examples, added):
        """Terms of `add_loss` with the whole batch's value, and this replica's part of its gradient."""
        share = tf.math.divide_no_nan(examples, _sum(examples))
        own = [tf.math.multiply_no_nan(loss, share) for loss in added]
        return [part + tf.stop_gradient(total - part) for part, total in zip(own, _sum(own), strict=True)]

    def _own_loss(self, mapping, weights, state, data, y_pred, added, training):
        """The whole batch's loss by any code, and the metrics' variables after it. Every replica computes it all.

        Gradients flow through this replica's predictions; those that reach weights in another way are divided by the
        number of replicas, so that the sum over replicas is that of the whole batch.
        """
        x, y, sample_weight = data
        metric_variables = self._metric_variables()
        shared = [with_share_of_gradient(weight, tf.constant(1.0 / _replicas())) for weight in weights]
        shared = list(zip(self.trainable_variables, shared, strict=True))
        rest = mapping[len(weights) : len(mapping) - len(state)]
        if _replicas() > 1:
            x = gather(x) if self._has_own("compute_loss") else x
            y, sample_weight, y_pred = gather(y), gather(sample_weight), gather_around(y_pred)
        scope = keras.StatelessScope([*shared, *rest, *zip(metric_variables, state, strict=True)])
        with no_strategy(), scope:
            self._losses_override = added
            try:
                loss = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
            finally:
                self._losses_override = []
        return loss, [scope.get_current_value(variable) for variable in metric_variables]

    def _added_losses(self, scope):
        """Terms of `add_loss`, `activity_regularizer`s (in Keras a mean over examples) and regularisers."""
        terms = [*scope.losses, *self._get_regularization_losses()]
        return [tf.cast(tf.reduce_sum(term), keras.config.floatx()) for term in terms]

    def _metric_sums(self, given, after):
        """What a part of a batch adds to the variables of metrics, those of losses left out."""
        of_losses = {id(v) for metric in [self._loss_tracker, *self._loss_trackers()] for v in _variables_of(metric)}
        owner = {id(variable): metric for metric in self.metrics for variable in metric.variables}
        sums = []
        for variable in self._metric_variables():
            value = after[id(variable)]
            if id(variable) in of_losses:
                value = given[id(variable)]
            elif value is not given[id(variable)] and not _each_adds_up(owner[id(variable)]):
                raise ValueError(f"{owner[id(variable)].name} is updated in a layer, of which a replica sees a part")
            sums.append(value)
        return sums

    def _metric_variables(self):
        metrics = [self._loss_tracker, *self._loss_trackers(), *self.metrics]
        return list({id(v): v for metric in metrics for v in _variables_of(metric)}.values())

    def _loss_trackers(self):
        return self._compile_loss.metrics if self._compile_loss is not None else []

    def _has_own(self, method):
        return getattr(type(self), method) is not getattr(TensorFlowTrainer, method)

    def _loss_adds_up(self):
        losses = [] if self._compile_loss is None else self._compile_loss._flat_losses
        return not self._has_own("compute_loss") and all(loss_adds_up(each.loss) for each in losses)

    def _metrics_add_up(self):
        metrics = [] if self._compile_metrics is None else self._compile_metrics.metrics
        return not self._has_own("compute_metrics") and all(map(metric_adds_up, metrics))

    def _refuse_if_pure(self, what):
        if self.accumulate > 1 or (self.jit_compile and _replicas() > 1):
            way = "accumulate" if self.accumulate > 1 else "jit_compile"
            raise ValueError(
                f"{what} needs the whole batch, of which {way} gives each replica a part at a time: leave out {way}"
            )

    def _others(self, part):
        """Values of the variables that are not trained, with seeds for one part of one replica's batch."""
        count = tf.constant(0, tf.int64) if self.optimizer is None else tf.cast(self.optimizer.iterations, tf.int64)
        count = count * self.accumulate + tf.cast(part, tf.int64)
        seeds = {id(variable): seed for variable, seed in noise_seeds(self, count)}
        return [
            seeds.get(id(variable), tf.convert_to_tensor(variable.value)) for variable in self.non_trainable_variables
        ]


class HubTask:
    """What KerasHub's tasks need beside: data that is ids already, and presets of the plain task."""

    def fit(self, x=None, *args, **kwargs):
        """As the task's, which would tokenise text, for which a distributed data set has no method; ours holds ids."""
        distributed = isinstance(x, tf.distribute.DistributedDataset)
        return (Trainer.fit(self, x, *args, **kwargs)) if distributed else super().fit(x, *args, **kwargs)

    def evaluate(self, x=None, *args, **kwargs):
        """See `fit`."""
        distributed = x is None or isinstance(x, tf.distribute.DistributedDataset)
        return (Trainer.evaluate(self, x, *args, **kwargs)) if distributed else super().evaluate(x, *args, **kwargs)

    def save_to_preset(self, preset_dir, **kwargs):
        """Saves the plain task in float32: it loads without this project.

        KerasHub 0.32 saves a model in mixed precision as what it cannot load (`Invalid dtype: mixed_bfloat16`).
        """
        backbone = type(self.backbone).from_config(self.backbone.get_config() | {"dtype": "float32"})
        own = inspect.signature(self.plain_class.__init__).parameters.keys()
        own -= {"self", "backbone", "preprocessor", "kwargs"}
        head = {name: value for name, value in self.get_config().items() if name in own}
        plain = self.plain_class(backbone=backbone, preprocessor=self.preprocessor, compile=False, **head)
        plain.set_weights(self.get_weights())
        plain.save_to_preset(preset_dir, **kwargs)


def _moments_of_whole_batch(layer, model, inputs, mask):
    if tf.distribute.in_cross_replica_context() or (_replicas() == 1 and model.accumulate == 1):
        return type(layer)._moments(layer, inputs, mask)
    model._refuse_if_pure("BatchNormalization")
    return moments(inputs, mask, layer._reduction_axes)


def _replicas() -> int:
    return tf.distribute.get_strategy().num_replicas_in_sync


def _sum(values: Any) -> Any:
    return sum_over_replicas(values) if _replicas() > 1 and tf.nest.flatten(values) else values


def _variables_of(metric: keras.metrics.Metric | None) -> list[keras.Variable]:
    return [] if metric is None else metric.variables


def _of_one_replica(spec):
    """What one replica is given of data that this describes; None for what is left out."""
    spec = getattr(spec, "_value_specs", [spec])[0]
    return None if isinstance(spec, tf.OptionalSpec) else spec


def _split(values: dict) -> tuple[dict, dict]:
    """What all steps come to so far, and each step's own values."""
    own = {name.removeprefix("step/"): value for name, value in values.items() if name.startswith("step/")}
    if "waited" in values:
        own["waited"] = values["waited"]
    others = {f"step/{name}" for name in own} | {"stop", "waited"}
    return {name: value for name, value in values.items() if name not in others}, own


def _each_adds_up(metric: keras.metrics.Metric) -> bool:
    return all(map(metric_adds_up, getattr(metric, "metrics", None) or [metric]))


def _last(logs: dict) -> dict:
    return {name: values[-1] for name, values in logs.items()}


def _as_row(values: dict) -> dict:
    return {name: np.asarray(value)[None] for name, value in values.items()}


def _warn_outside_checked_versions() -> None:
    for package, checked in CHECKED_VERSIONS.items():
        version = importlib.metadata.version(package)
        if not version.startswith(checked + "."):
            warnings.warn(
                f"common/data_parallel.py is checked against {package} {checked}, not {version}: "
                "run `python -m recipes doctor`, and trust it",
                stacklevel=3,
            )
