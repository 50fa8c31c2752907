# SPDX-License-Identifier: Apache-2.0
"""What decides how a model learns: scaling to N replicas, the learning rate's schedule, loss and optimizers."""

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal

import keras
import numpy as np
import tensorflow as tf
from keras import ops

HEADS = ["logits", "mlm_head"]  # in the paths of the output layers of KerasHub's tasks
STACK = 2**23  # about how many numbers a stack of kernels has; a step takes several times its memory
# RoBERTa's (Liu et al. 2019, arXiv:1907.11692), stable at high rates.
ROBERTA = {"beta_2": 0.98, "epsilon": 1e-6}
NOT_DECAYED = ["bias", "gamma", "beta"]


def scale(
    batch_size: int, learning_rate: float, replicas: int, rule: Literal["sqrt", "linear", "none"]
) -> tuple[int, float]:
    """The batch size of all replicas together, and the learning rate for it, from those of one replica.

    N replicas take N times the examples of one in each step: a step takes as long, and an epoch has 1/N of the steps.

    Args:
        batch_size, learning_rate: for one replica.
        replicas: N, their number.
        rule: by which the learning rate follows. `linear`, times N: Goyal et al. 2017, arXiv:1706.02677; for SGD, with
            a warm-up. `sqrt`, times the square root of N: Krizhevsky 2014, arXiv:1404.5997, derived for Adam by Malladi
            et al. 2022, arXiv:2205.10287: Adam divides by the gradient's size, mostly noise, which N times the examples
            make √N times smaller. `none`: as given.
    """
    factor = {"linear": float(replicas), "sqrt": math.sqrt(replicas), "none": 1.0}[rule]
    print(f"global batch: {batch_size} examples x {replicas} replica(s) = {batch_size * replicas}")
    print(f"peak learning rate: {learning_rate * factor:g}, {rule} scaling of {learning_rate:g}", flush=True)
    return batch_size * replicas, learning_rate * factor


@keras.saving.register_keras_serializable(package="recipes")
class WarmUpPolynomialDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up to `peak`, then Keras's `PolynomialDecay` to zero.

    Of W warm-up steps, step s (from 0) has peak * (s + 1) / (W + 1), so that no step is spent at rate zero and the
    warm-up meets the decay, which starts with `peak` at step W and would be zero at `total_steps`. Warm-up and linear
    decay are BERT's (Devlin et al. 2018, arXiv:1810.04805, appendix A.2).

    Args:
        peak: peak learning rate.
        total_steps: steps of the whole run.
        warmup: fraction of all steps that are warm-up, below 1.
        power: of the decay; 1: linear.
    """

    def __init__(self, peak: float, total_steps: int, warmup: float = 0.1, power: float = 1.0):
        self.peak, self.total_steps, self.warmup, self.power = peak, total_steps, warmup, power
        self.warmup_steps = min(int(warmup * total_steps), total_steps - 1)
        self.decay = keras.optimizers.schedules.PolynomialDecay(
            peak, decay_steps=total_steps - self.warmup_steps, end_learning_rate=0.0, power=power
        )

    def __call__(self, step):
        """The rate for optimizer step `step`, a number or scalar tensor counted from 0; a scalar tensor."""
        step = ops.cast(step, "float32")
        warming_up = self.peak * (step + 1) / (self.warmup_steps + 1)
        decaying = self.decay(ops.maximum(step - self.warmup_steps, 0.0))
        return ops.where(step < self.warmup_steps, warming_up, decaying)

    def get_config(self):
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in ("peak", "total_steps", "warmup", "power")}


class CrossEntropy(keras.losses.Loss):
    """As `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, with fewer passes over the logits."""

    adds_up = True  # for `data_parallel`

    def __init__(self, reduction="mean_with_sample_weight", name="cross_entropy", dtype=None):
        super().__init__(name, reduction, dtype)

    def call(self, y_true, y_pred):
        """The loss of each label, in nats, in y_true's shape; see `cross_entropy`."""
        return cross_entropy(y_pred, tf.cast(y_true, tf.int32))  # Keras has cast the labels to floats


@tf.custom_gradient
def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """log(sum(exp(logits))) - logits[label], whose gradient is softmax(logits) less 1 at the label.

    The exponentials serve both the loss and the gradient. Takes logits [..., classes] and labels, int32 [...]; returns
    the loss of each label, in nats, [...].
    """
    highest = tf.reduce_max(logits, axis=-1, keepdims=True)
    exponentials = tf.exp(logits - highest)
    total = tf.reduce_sum(exponentials, axis=-1, keepdims=True)

    def gradient(of_losses):
        of_losses = of_losses[..., None]
        is_label = tf.range(tf.shape(logits)[-1]) == labels[..., None]
        return exponentials * (of_losses / total) - tf.where(is_label, of_losses, 0.0), None

    own = tf.gather(logits, labels[..., None], batch_dims=labels.shape.rank)
    return tf.squeeze(highest + tf.math.log(total) - own, axis=-1), gradient


def adamw(schedule, weight_decay: float = 0.01) -> keras.optimizers.Optimizer:
    """AdamW with RoBERTa's settings, whose weight decay spares biases and norms. Call it in the strategy's scope.

    Args:
        schedule: a schedule of the learning rate, or a number.
        weight_decay: fraction of each weight that a step subtracts, times the learning rate.
    """
    optimizer = AdamW(schedule, weight_decay=weight_decay, **ROBERTA)
    optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
    return optimizer


def muon(schedule, weight_decay: float = 0.01, clip_norm: float = 1.0) -> keras.optimizers.Optimizer:
    """Muon for the kernels of hidden layers, and the above AdamW for the rest. Call it in the strategy's scope.

    What AdamW trains, embeddings above all, learns with 0.4 times the rate.

    Args:
        schedule, weight_decay: see `adamw`.
        clip_norm: global norm to which the gradient is clipped, as BERT's and GPT-3's.
    """
    adam = {"adam_lr_ratio": 0.4, "adam_weight_decay": weight_decay, "adam_beta_2": 0.98, "epsilon": 1e-6}
    optimizer = Muon(schedule, weight_decay=weight_decay, exclude_layers=HEADS, global_clipnorm=clip_norm, **adam)
    optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
    return optimizer


class AdamW(keras.optimizers.AdamW):
    """As Keras's, but with one TensorFlow operation per variable, not some ten with a pass over memory each."""

    def _apply_weight_decay(self, variables):
        pass  # update_step does it, with one pass over memory less

    def update_step(self, gradient, variable, learning_rate):
        """See Keras; `variable` is one replica's copy, and so are the moments whose handles are used."""
        if self._use_weight_decay(variable):
            self.assign(variable, variable * (1 - learning_rate * self.weight_decay))
        index = self._get_variable_index(variable)
        betas = self.beta_1, self.beta_2
        _adam_step(self, gradient, variable, learning_rate, self._momentums[index], self._velocities[index], *betas)


class Muon(keras.optimizers.Muon):
    """Muon for the kernels of hidden layers, and AdamW for embeddings, output layers, biases and norms.

    A step moves a kernel's matrix along its momentum with all singular values brought near 1, by five Newton-Schulz
    iterations (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/). Its root mean square is 0.2 times the
    learning rate, about AdamW's, so that one rate and one weight decay serve both (Liu et al. 2025, arXiv:2502.16982).

    Keras's own silently leaves every kernel of more than two dimensions to AdamW, including those of KerasHub's
    attention. Here each head of such a kernel is a matrix of its own; see `matrix_axes`.
    """

    def _should_use_adamw(self, variable):
        if not variable.path.endswith("kernel"):  # a bias of attention has two dimensions
            return True
        return super()._should_use_adamw(SimpleNamespace(path=variable.path, shape=variable.shape[:2]))

    def _distributed_tf_update_step(self, distribution, grads_and_vars, learning_rate):
        """As Keras's. On one replica alone, as in `data_parallel`, all kernels are updated at once."""
        rest = list(grads_and_vars)
        if not tf.distribute.has_strategy():
            velocities = [self.adam_velocities[self._get_variable_index(variable)] for _, variable in rest]
            kernels = [pair for pair, velocity in zip(rest, velocities, strict=True) if velocity is None]
            rest = [pair for pair, velocity in zip(rest, velocities, strict=True) if velocity is not None]
            self._update_kernels(kernels, learning_rate)
        super()._distributed_tf_update_step(distribution, rest, learning_rate)

    def _muon_update_step(self, gradient, variable, lr, m):
        self._update_kernels([(gradient, variable)], lr)

    def _update_kernels(self, grads_and_vars, learning_rate):
        stacks: dict[tuple, list[tf.Tensor]] = {}  # by the matrices' shape, and a number
        places: list[tuple] = []
        numbers: Counter[tuple[int, ...]] = Counter()
        for gradient, variable in grads_and_vars:
            momentum = self.momentums[self._get_variable_index(variable)]
            self.assign_add(momentum, gradient + momentum * (self.momentum - 1))
            direction = gradient + momentum * self.momentum if self.nesterov else tf.convert_to_tensor(momentum)
            matrices = tf.transpose(direction, matrix_axes(variable.shape))
            shape = tuple(matrices.shape[-2:])
            numbers[shape] += math.prod(variable.shape)
            places.append((shape, numbers[shape] // STACK))
            stacks.setdefault(places[-1], []).append(tf.reshape(matrices, [-1, *shape]))
        updates = {}
        for (shape, number), parts in stacks.items():
            update = self.zeropower_via_newtonschulz5(tf.concat(parts, axis=0), self.ns_steps)
            scale = learning_rate * (self.rms_rate * math.sqrt(max(shape)) if self.rms_rate else 1.0)
            updates[shape, number] = iter(tf.split(update * scale, [part.shape[0] for part in parts]))
        for (_, variable), place in zip(grads_and_vars, places, strict=True):
            axes = matrix_axes(variable.shape)
            update = tf.reshape(next(updates[place]), [variable.shape[axis] for axis in axes])
            self.assign_sub(variable, tf.transpose(update, np.argsort(axes)))

    def _adamw_update_step(self, gradient, variable, learning_rate, m, v):
        _adam_step(self, gradient, variable, learning_rate, m, v, self.adam_beta_1, self.adam_beta_2)


def matrix_axes(shape: Sequence[int]) -> list[int]:
    """The axes of a kernel, ordered to make it a stack of matrices, [..., rows, columns], with rows <= columns.

    Of three axes, as in attention, the second counts heads if the first is the longest: [width, heads, width of a
    head]. Otherwise the first does: [heads, width of a head, width], or [heads, width, width of a head]. In a
    convolution, all axes but the last two count positions.
    """
    axes = [1, 0, 2] if len(shape) == 3 and shape[0] == max(shape) else list(range(len(shape)))
    return [*axes[:-2], *sorted(axes[-2:], key=lambda axis: (shape[axis], axis))]


def _adam_step(optimizer, gradient, variable, learning_rate, mean, square, beta_1, beta_2) -> None:
    step = tf.cast(optimizer.iterations + 1, variable.dtype)
    gradient = tf.convert_to_tensor(gradient)  # of a table, it may be rows
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=mean.value.handle,
        v=square.value.handle,
        beta1_power=beta_1**step,
        beta2_power=beta_2**step,
        lr=tf.cast(learning_rate, variable.dtype),
        beta1=beta_1,
        beta2=beta_2,
        epsilon=optimizer.epsilon,
        grad=tf.cast(gradient, variable.dtype),
    )
