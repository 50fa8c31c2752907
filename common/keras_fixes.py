# SPDX-License-Identifier: Apache-2.0
"""Makes Keras 3's `fit` and `evaluate` right under `tf.distribute`. Checked against Keras 3.15 and TensorFlow 2.21.

`data_parallel(BertMaskedLM)` is a subclass with a few methods of its own; nothing in Keras itself is replaced. Each
method says which fault it is for; docs/keras-under-tf-distribute.md shows every fault in a program of its own.
"""

import importlib.metadata
import inspect
import math
import warnings
from collections.abc import Callable

import keras
import tensorflow as tf

from common.noise import make_dropout_fast, noise_seeds
from common.optimizers import do_not_reduce_again
from common.replicas import (
    COUNTS,
    MEANS,
    batch_sums,
    first_replica,
    means_of,
    steps_in_one_call,
    sum_over_replicas,
)

CHECKED_VERSIONS = {"keras": "3.15", "tensorflow": "2.21"}


def data_parallel(task_class: type[keras.Model]) -> type[keras.Model]:
    """A KerasHub task's class whose `fit` computes over N replicas what one would; itself, where it is one already.

    The task gives logits for integer labels. Data are batches `(x, y, sample_weight)` of the same number of examples on
    each replica, where `x["padding_mask"]` is 1 for a token and 0 for padding.

    Metrics are `loss` and `accuracy`, means over all labels by weight; `labels`, the sum of the weights; `tokens`,
    without padding; and `slots`, the places for tokens. `fit` gives callbacks the last step's own values, and the
    epoch's at the epoch's end.

    Attributes of an instance:
        told_to_stop: set it True on any worker; after the step at hand, `all_told_to_stop` is True on every one.
        steps_done: steps that `fit` has done. Set it when a run goes on from a checkpoint.
        at_epoch_end: whether the last of them is the last of its epoch, where `fit` was told `steps_per_epoch`.
        step_values: for the steps since the last callback, a dict of vectors: the metrics, the `learning_rate`, and
            `waited`, seconds that this worker waited for each batch.
    """
    if hasattr(task_class, "step_values"):
        return task_class
    _warn_outside_checked_versions()

    class DataParallel(task_class):
        step_values = None
        train_function: Callable | None  # of Keras, None until they are made
        test_function: Callable | None

        def compile(self, optimizer, loss, clip_norm=0.0, accumulate=1, jit=False, steps_per_execution=1):
            """Configures training. Call it inside the strategy's scope.

            Completes the model and the optimizer. Keras's `fit` does that from the first batch, by averaging its inputs
            over replicas, and dies before step 1 where they are booleans, strings or uneven
            (keras-team/keras#19246, #21172), and always on several workers (keras-team/keras#20585). Dropout layers
            become those of `common.noise`.

            Args:
                optimizer: a Keras optimizer. In mixed_float16, Keras wraps it in a `LossScaleOptimizer`.
                loss: one whose `reduction` is `"sum"`.
                clip_norm: the global norm to which the gradient of the whole batch is clipped; 0 for none.
                accumulate: parts into which each replica's batch is divided, one after another, to save memory. It
                    must divide the batch.
                jit: compile the forward and backward pass of each replica with XLA.
                steps_per_execution: steps in one call of the train function.
            """
            if loss.reduction != "sum":
                raise ValueError(f'the loss must have reduction="sum": it is divided here; got {loss.reduction!r}')
            keras.Model.compile(
                self, optimizer=optimizer, loss=loss, steps_per_execution=steps_per_execution, jit_compile=False
            )
            self.clip_norm, self.accumulate = clip_norm, accumulate
            make_dropout_fast(self)
            do_not_reduce_again(self.optimizer)
            self.optimizer.build(self.trainable_variables)
            self.steps_done = 0
            self.told_to_stop = self.all_told_to_stop = False
            self.means = {name: keras.metrics.Mean(name=name) for name in MEANS}
            self.sums = {name: keras.metrics.Sum(name=name) for name in COUNTS}
            # XLA cannot compile a function that touches another device's variables, as Keras's own step does
            # ("Trying to access resource ... located in device CPU:1"): this one is a pure function of tensors.
            self._gradients = tf.function(self._gradients_of_part, jit_compile=True) if jit else self._gradients_of_part

        @property
        def at_epoch_end(self):
            return (self.steps_done - self._fit_began_at) % self._steps_per_epoch == 0

        @property
        def metrics(self):
            return [*self.means.values(), *self.sums.values()]

        def train_step(self, data, stop=0.0):
            """One replica's part of a step: the gradient of the batch's mean loss, over all replicas, is applied.

            Keras divides by each replica's own weight and then by the number of replicas. Where replicas have different
            numbers of labels, that is not the mean over the batch. Here sums are added up over replicas, in a single
            reduction, and divided once.

            That reduction comes before clipping, which Keras does by each replica's own norm, and before the
            `LossScaleOptimizer` asks whether all is finite, for which Keras looks at the first replica's part alone: an
            overflow on another replica made every weight NaN. Now one that overflows anywhere is skipped everywhere.
            """
            examples = tf.cast(tf.shape(data[1])[0], tf.float32)  # keeps numbers small in float16
            gradients, sums = self._gradients_and_sums(data, self.optimizer.scale_loss(1.0 / examples))
            gradients, batch_sums = sum_over_replicas((gradients, sums | {"stop": stop}))
            share = tf.math.divide_no_nan(examples, batch_sums["labels"])
            gradients = [gradient * share for gradient in gradients]
            if self.clip_norm:
                gradients, _ = tf.clip_by_global_norm(gradients, self.optimizer.scale_loss(self.clip_norm))
            learning_rate = tf.cast(self.optimizer.learning_rate, tf.float32)
            self.optimizer.apply(gradients, self.trainable_variables)
            self._update_metrics(sums)
            return means_of(batch_sums) | {"learning_rate": learning_rate}

        def test_step(self, data, stop=0.0):
            """One replica's part of an evaluation step."""
            x, y, weight = data
            sums = self._sums(x, y, weight, self(x, training=False))
            self._update_metrics(sums)
            return means_of(sum_over_replicas(sums | {"stop": stop}))

        def make_train_function(self, force=False):
            """See `_on_replicas`. The train function leaves each step's own values in `step_values`."""
            if self.train_function is None or force:
                run_steps = self._on_replicas(self.train_step)

                def train_function(iterator):
                    left = self._steps_per_epoch - (self.steps_done - self._fit_began_at) % self._steps_per_epoch
                    self.step_values = run_steps(iterator, min(self.steps_per_execution, left))
                    self.steps_done += len(self.step_values["loss"])
                    return {metric.name: self.step_values[metric.name][-1] for metric in self.metrics}

                self.train_function = train_function

        def make_test_function(self, force=False):
            """See `_on_replicas`."""
            if self.test_function is None or force:
                run_steps = self._on_replicas(self.test_step)

                def test_function(iterator):
                    values = run_steps(iterator, min(self.steps_per_execution, self._test_steps_left))
                    self._test_steps_left -= len(values["loss"])
                    return {metric.name: values[metric.name][-1] for metric in self.metrics}

                self.test_function = test_function

        def fit(self, *args, steps_per_epoch=None, **kwargs):
            """As `keras.Model.fit`: KerasHub's tokenises text and takes no distributed data set; ours holds ids."""
            self._steps_per_epoch = self._known(steps_per_epoch, "steps_per_epoch")
            self._fit_began_at = self.steps_done
            return keras.Model.fit(self, *args, steps_per_epoch=steps_per_epoch, **kwargs)

        def evaluate(self, *args, steps=None, **kwargs):
            """As `keras.Model.evaluate`."""
            self._test_steps_left = self._known(steps, "steps")
            return keras.Model.evaluate(self, *args, steps=steps, **kwargs)

        def save_to_preset(self, preset_dir, **kwargs):
            """Saves the plain task in float32: it loads without this project.

            KerasHub 0.32 saves a model in mixed precision as what it cannot load (`Invalid dtype: mixed_bfloat16`).
            """
            backbone = type(self.backbone).from_config(self.backbone.get_config() | {"dtype": "float32"})
            own = inspect.signature(task_class.__init__).parameters.keys() - {
                "self",
                "backbone",
                "preprocessor",
                "kwargs",
            }
            head = {name: value for name, value in self.get_config().items() if name in own}
            plain = task_class(backbone=backbone, preprocessor=self.preprocessor, compile=False, **head)
            plain.set_weights(self.get_weights())
            plain.save_to_preset(preset_dir, **kwargs)

        def _maybe_symbolic_build(self, iterator=None, data_batch=None):
            pass  # A task is built when it is made, and its optimizer by compile: no need to look at data.

        def _known(self, steps, name):
            if steps is None and self.steps_per_execution > 1:
                raise ValueError(f"steps_per_execution needs {name}, to end at the epoch's last step")
            return steps or math.inf

        def _on_replicas(self, step):
            """A function of (iterator, count) that does `count` steps and returns a dict of vectors.

            A worker that is told to stop says so in the step's reduction, so that all stop after the same step.

            The loss that Keras gives for an epoch of unknown length is too low, N / (N + 1) of it for N steps: the end
            of the data is found by one more step, which raises the loss's count before it fails. On several workers it
            averages scalars over an axis that they do not have (keras-team/keras#20585). Here values are the same on
            every replica, and the first one's are taken.
            """

            strategy = self.distribute_strategy

            def one_step(iterator, stop):
                return first_replica(strategy, strategy.run(step, args=(next(iterator), stop)))

            do_steps = steps_in_one_call(one_step)

            def run_steps(iterator, count):
                values = do_steps(iterator, count, self.told_to_stop)
                self.all_told_to_stop = bool(values.pop("stop")[-1])
                return values

            return run_steps

        def _gradients_and_sums(self, data, factor):
            """The gradient of factor times the sum of this replica's losses, and its sums; see `_sums`.

            With Keras's own `gradient_accumulation_steps`, a strategy fails (`merge_call called while defining a new
            graph`, keras-team/keras#20582). Here the parts of a step's batch follow one another inside the step.
            """
            weights = [tf.convert_to_tensor(variable.value) for variable in self.trainable_variables]
            if self.accumulate == 1:
                return self._gradients(weights, self._others(0), data, factor)
            parts = keras.tree.map_structure(
                lambda t: tf.reshape(t, tf.concat([[self.accumulate, -1], tf.shape(t)[1:]], axis=0)), data
            )

            def add_part(totals, numbered):
                number, part = numbered
                values = self._gradients(weights, self._others(number), part, factor)
                return tf.nest.map_structure(tf.add, totals, values)

            zero_sums = {name: tf.constant(0.0) for name in [*self.means, *self.sums]}
            return tf.foldl(
                add_part,
                (tf.range(self.accumulate), parts),
                initializer=([tf.zeros_like(weight) for weight in weights], zero_sums),
                parallel_iterations=1,
            )

        def _gradients_of_part(self, weights, others, data, factor):
            x, y, sample_weight = data
            with tf.GradientTape() as tape:
                tape.watch(weights)
                logits, _ = self.stateless_call(weights, others, x, training=True)
                sums = self._sums(x, y, sample_weight, logits)
                objective = sums["loss"] * factor
            gradients = tape.gradient(objective, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return [tf.convert_to_tensor(gradient) for gradient in gradients], sums

        def _others(self, part):
            """Values of the variables that are not trained, with seeds for one part of one replica's batch."""
            count = tf.cast(self.optimizer.iterations, tf.int64) * self.accumulate + tf.cast(part, tf.int64)
            seeds = {id(variable): seed for variable, seed in noise_seeds(self, count)}
            return [
                seeds.get(id(variable), tf.convert_to_tensor(variable.value))
                for variable in self.non_trainable_variables
            ]

        def _sums(self, x, y, weight, logits):
            return batch_sums(x, y, weight, logits, self.compute_loss(x, y, logits, weight))

        def _update_metrics(self, sums):
            means = means_of(sums)
            for name, metric in self.means.items():
                metric.update_state(means[name], sample_weight=sums["labels"])
            for name, metric in self.sums.items():
                metric.update_state(sums[name])

    return DataParallel


def _warn_outside_checked_versions() -> None:
    for package, checked in CHECKED_VERSIONS.items():
        version = importlib.metadata.version(package)
        if not version.startswith(checked + "."):
            warnings.warn(
                f"common/keras_fixes.py is checked against {package} {checked}, not {version}: "
                "run `python -m recipes doctor`, and trust it",
                stacklevel=3,
            )
