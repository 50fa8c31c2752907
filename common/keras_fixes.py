# SPDX-License-Identifier: Apache-2.0
"""Makes Keras 3's `fit` and `evaluate` right under `tf.distribute`. Checked against Keras 3.15 and TensorFlow 2.21.

`data_parallel(BertMaskedLM)` is a subclass with a few methods of its own; nothing in Keras itself is replaced.
What is mended:

- **Crash before step 1** (keras-team/keras#19246, #21172). To build the model, `fit` averages the *inputs* of the first
  batch over replicas, which fails for booleans, strings and uneven batches. Here `compile` completes the model.
- **The loss is a mean of means.** Keras divides by each replica's own weight and then by the number of replicas; where
  replicas have different numbers of labels, that is not the mean over the batch. Here the sum is divided, once, by the
  weight of the whole batch.
- **The epoch's loss is too low by N / (N + 1)** for N steps of a fixed batch size: Keras finds the end of the data by
  running one more step, which raises the loss's count before it fails. Here counts come from the data.
- **Every replica drops the same units, and no checkpoint saves the state of dropout.** Keras counts up seeds kept in
  mirrored variables. Here a layer's noise is a function of its seed, the optimizer's step and the replica: no state.
- **Crash on several workers** (keras-team/keras#20585): Keras averages scalars over an axis that they do not have. Here
  a step returns what is the same on every replica, and the first one's is taken.
"""

import keras
import tensorflow as tf


def data_parallel(task_class: type[keras.Model]) -> type[keras.Model]:
    """A KerasHub task's class whose `fit` computes over N replicas what one would.

    The task gives logits for integer labels. Compile it with a loss whose `reduction` is `"sum"`. Data are batches
    `(x, y, sample_weight)`, where `x["padding_mask"]` is 1 for a token and 0 for padding.

    Metrics are `loss` and `accuracy`, means over all labels by weight; `labels`, the sum of the weights; `tokens`,
    without padding; and `slots`, the places for tokens. `fit` gives callbacks a step's own values at its end, and the
    epoch's at the epoch's end.
    """

    class DataParallel(task_class):
        def compile(self, optimizer, loss):
            super().compile(optimizer=optimizer, loss=loss, weighted_metrics=None)
            optimizer.build(self.trainable_variables)
            self.means = {name: keras.metrics.Mean(name=name) for name in ("loss", "accuracy")}
            self.sums = {name: keras.metrics.Sum(name=name) for name in ("labels", "tokens", "slots")}

        @property
        def metrics(self):
            return [*self.means.values(), *self.sums.values()]

        def train_step(self, data):
            x, y, weight = data
            batch_weight = _sum_over_replicas(tf.reduce_sum(weight))
            with tf.GradientTape() as tape, self._replica_noise():
                logits = self(x, training=True)
                loss_sum = self.compute_loss(x, y, logits, weight)
                # This replica's part of the batch's mean: the optimizer adds up the gradients of all parts.
                objective = self.optimizer.scale_loss(tf.math.divide_no_nan(loss_sum, batch_weight))
            gradients = tape.gradient(objective, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return self._update_metrics(x, y, weight, logits, loss_sum)

        def test_step(self, data):
            x, y, weight = data
            logits = self(x, training=False)
            return self._update_metrics(x, y, weight, logits, self.compute_loss(x, y, logits, weight))

        def make_train_function(self, force=False):
            if self.train_function is None or force:
                self.train_function = self._on_replicas(self.train_step)

        def make_test_function(self, force=False):
            if self.test_function is None or force:
                self.test_function = self._on_replicas(self.test_step)

        # KerasHub's fit and evaluate tokenise text and take no distributed data set; ours holds token ids.
        def fit(self, *args, **kwargs):
            return keras.Model.fit(self, *args, **kwargs)

        def evaluate(self, *args, **kwargs):
            return keras.Model.evaluate(self, *args, **kwargs)

        def save_to_preset(self, preset_dir, **kwargs):
            # As the plain task, so that the preset loads without this project.
            plain = task_class(backbone=self.backbone, preprocessor=self.preprocessor, compile=False)
            plain.set_weights(self.get_weights())
            plain.save_to_preset(preset_dir, **kwargs)

        def _maybe_symbolic_build(self, iterator=None, data_batch=None):
            pass  # A task is built when it is made, and its optimizer by compile: no need to look at data.

        def _on_replicas(self, step):
            @tf.function(reduce_retracing=True, autograph=False)
            def one_step(iterator):
                values = self.distribute_strategy.run(step, args=(next(iterator),))
                return keras.tree.map_structure(self._first_replicas, values)

            return one_step

        def _first_replicas(self, value):
            return self.distribute_strategy.experimental_local_results(value)[0]

        def _replica_noise(self):
            replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
            step = tf.cast(self.optimizer.iterations, tf.int64)
            return keras.StatelessScope(
                state_mapping=[
                    (seed, tf.stack([seed.value[0] + replica * 2**32, step * 2**16]))
                    for seed in self.non_trainable_variables
                    if seed.name == "seed_generator_state"
                ]
            )

        def _update_metrics(self, x, y, weight, logits, loss_sum):
            matches = tf.cast(tf.argmax(logits, axis=-1, output_type=y.dtype) == y, tf.float32)
            weight_sum = tf.reduce_sum(weight)
            totals = {"loss": loss_sum, "accuracy": tf.reduce_sum(matches * weight)}
            is_token = tf.cast(x["padding_mask"], tf.float32)
            counts = {
                "labels": weight_sum,
                "tokens": tf.reduce_sum(is_token),
                "slots": tf.cast(tf.size(is_token), tf.float32),
            }
            for name, total in totals.items():
                self.means[name].update_state(tf.math.divide_no_nan(total, weight_sum), sample_weight=weight_sum)
            for name, count in counts.items():
                self.sums[name].update_state(count)
            of_batch = _sum_over_replicas(totals | counts)
            means = {name: tf.math.divide_no_nan(of_batch[name], of_batch["labels"]) for name in totals}
            return means | {name: of_batch[name] for name in counts}

    return DataParallel


def _sum_over_replicas(values):
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)
