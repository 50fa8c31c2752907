# SPDX-License-Identifier: Apache-2.0
"""What decides how a model learns: scaling to N replicas, the learning rate's schedule, loss and optimizer."""

import math

import keras
import tensorflow as tf
from keras import ops

NOT_DECAYED = ["bias", "gamma", "beta"]
BETA_2, EPSILON = 0.98, 1e-6  # RoBERTa's (Liu et al. 2019, arXiv:1907.11692), stable at high rates
ON_CPU = not tf.config.list_physical_devices("GPU")  # on GPUs, XLA needs tools of CUDA that may be missing


def scale(batch_size: int, learning_rate: float, replicas: int, rule: str) -> tuple[int, float]:
    """The batch size of N replicas together, and the learning rate for it, from those of one replica.

    They take N times the examples of one in each step: a step takes as long, and an epoch has 1/N of the steps. The
    learning rate follows by a rule. `linear`, times N: Goyal et al. 2017, arXiv:1706.02677; for SGD, with a warm-up.
    `sqrt`, times the square root of N: Krizhevsky 2014, arXiv:1404.5997, derived for Adam by Malladi et al. 2022,
    arXiv:2205.10287. `none`: as given.
    """
    factor = {"linear": float(replicas), "sqrt": math.sqrt(replicas), "none": 1.0}[rule]
    print(f"global batch: {batch_size} examples x {replicas} replica(s) = {batch_size * replicas}")
    print(f"peak learning rate: {learning_rate * factor:g}, {rule} scaling of {learning_rate:g}", flush=True)
    return batch_size * replicas, learning_rate * factor


@keras.saving.register_keras_serializable(package="recipes")
class WarmUpPolynomialDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to `peak`, then Keras's `PolynomialDecay` to zero, as BERT's (arXiv:1810.04805, appendix A.2).

    Of W warm-up steps, the fraction `warmup` of `total_steps`, step s (from 0) has peak * (s + 1) / (W + 1), so that no
    step is spent at rate zero. The decay, which is linear, begins at step W and ends at `total_steps`.
    """

    def __init__(self, peak: float, total_steps: int, warmup: float = 0.1):
        self.peak, self.total_steps, self.warmup = peak, total_steps, warmup
        self.warmup_steps = min(int(warmup * total_steps), total_steps - 1)
        decay_steps = total_steps - self.warmup_steps
        self.decay = keras.optimizers.schedules.PolynomialDecay(peak, decay_steps, end_learning_rate=0.0)

    def __call__(self, step):
        """The rate for optimizer step `step`, a number or scalar tensor counted from 0; a scalar tensor."""
        step = ops.cast(step, "float32")
        warming_up = self.peak * (step + 1) / (self.warmup_steps + 1)
        decaying = self.decay(ops.maximum(step - self.warmup_steps, 0.0))
        return ops.where(step < self.warmup_steps, warming_up, decaying)

    def get_config(self):
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in ("peak", "total_steps", "warmup")}


class CrossEntropy(keras.losses.Loss):
    """`keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, with fewer passes over the logits."""

    adds_up = True  # for `data_parallel`

    def call(self, y_true, y_pred):
        """The loss of each label, in nats, in y_true's shape, by logits [..., classes]."""
        return _cross_entropy(y_pred, _as_ids(y_true, y_pred))


@tf.custom_gradient
def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """log(sum(exp(logits))) - logits[label]; its gradient, softmax(logits) less 1 at the label, shares powers."""
    highest = tf.reduce_max(logits, axis=-1, keepdims=True)
    exponentials = _powers(logits, highest)
    total = tf.reduce_sum(exponentials, axis=-1, keepdims=True)  # by XLA, it would be less exact

    def gradient(of_losses):
        return _of_logits(exponentials, total, labels[..., None], of_losses[..., None]), None

    of_label = tf.gather(logits, labels[..., None], batch_dims=labels.shape.rank)
    return tf.squeeze(highest + tf.math.log(total) - of_label, axis=-1), gradient


@tf.function(jit_compile=ON_CPU)  # one pass over the memory, where TensorFlow has two, and below, five
def _powers(logits, highest):
    return tf.exp(logits - highest)


@tf.function(jit_compile=ON_CPU)
def _of_logits(exponentials, total, labels, of_losses):
    is_label = tf.range(tf.shape(exponentials)[-1]) == labels
    return exponentials * (of_losses / total) - tf.where(is_label, of_losses, 0.0)


class Accuracy(keras.metrics.MeanMetricWrapper):
    """`keras.metrics.SparseCategoricalAccuracy`, with one pass over the logits where Keras has seven.

    Keras 3.15 rounds labels to the type of the logits: in bfloat16, from label 257 on, it takes neighbours for right.
    """

    adds_up = True  # for `data_parallel`

    def __init__(self, name: str = "accuracy", dtype: str | None = None):
        super().__init__(_is_right, name, dtype)

    def get_config(self):
        """The constructor's arguments."""
        return {"name": self.name, "dtype": self.dtype}


def _is_right(labels, logits):
    of_highest = tf.argmax(tf.cast(logits, tf.float32), axis=-1, output_type=tf.int32)  # cast as for the loss
    return tf.cast(tf.equal(of_highest, _as_ids(labels, logits)), tf.float32)


def _as_ids(labels, logits):
    labels = tf.cast(labels, tf.int32)  # Keras has cast them to floats
    return tf.squeeze(labels, -1) if labels.shape.rank == logits.shape.rank else labels


def adamw(schedule, weight_decay: float = 0.01) -> keras.optimizers.Optimizer:
    """AdamW with RoBERTa's settings, whose weight decay spares biases and norms. Call it in the strategy's scope.

    The schedule, or number, is of the learning rate; a step subtracts it times `weight_decay` times each weight.
    """
    optimizer = AdamW(schedule, weight_decay=weight_decay, beta_2=BETA_2, epsilon=EPSILON)
    optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
    return optimizer


class AdamW(keras.optimizers.AdamW):
    """Keras's AdamW, in one TensorFlow operation per variable; Keras needs some ten, each over all its memory."""

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable, and the means of its gradients and their squares."""
        index = self._get_variable_index(variable)
        moments = self._momentums[index], self._velocities[index]
        adam_step(self, gradient, variable, learning_rate, *moments, self.beta_1, self.beta_2)


def adam_step(optimizer, gradient, variable, learning_rate, mean, square, beta_1, beta_2) -> None:
    """Adam's step for one replica's copy of a variable, and of the means of its gradients and their squares."""
    step = tf.cast(optimizer.iterations + 1, variable.dtype)
    handles = {"var": variable.handle, "m": mean.value.handle, "v": square.value.handle}
    betas = {"beta1": beta_1, "beta2": beta_2, "beta1_power": beta_1**step, "beta2_power": beta_2**step}
    rate, dense = tf.cast(learning_rate, variable.dtype), tf.convert_to_tensor(gradient)  # of a table, it may be rows
    grad = tf.cast(dense, variable.dtype)
    tf.raw_ops.ResourceApplyAdam(**handles, **betas, lr=rate, epsilon=optimizer.epsilon, grad=grad)
