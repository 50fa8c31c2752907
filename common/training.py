# SPDX-License-Identifier: Apache-2.0
"""What decides how a model learns: scaling to N replicas, the learning rate's schedule, loss and optimizers."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal

import keras
import numpy as np
import tensorflow as tf
from keras import ops

HEADS = ["logits", "mlm_head"]  # in the paths of the output layers of KerasHub's tasks
NOT_DECAYED = ["bias", "gamma", "beta"]
# RoBERTa's (Liu et al. 2019, arXiv:1907.11692), stable at high rates.
BETA_2, EPSILON = 0.98, 1e-6
STACK = 2**23  # numbers in a stack of matrices, about; a step of Muon takes several times its memory


def scale(
    batch_size: int, learning_rate: float, replicas: int, rule: Literal["sqrt", "linear", "none"]
) -> tuple[int, float]:
    """The batch size of N replicas together, and the learning rate for it, from those of one replica.

    They take N times the examples of one in each step: a step takes as long, and an epoch has 1/N of the steps. The
    learning rate follows by a rule. `linear`, times N: Goyal et al. 2017, arXiv:1706.02677; for SGD, with a warm-up.
    `sqrt`, times the square root of N: Krizhevsky 2014, arXiv:1404.5997, derived for Adam by Malladi et al. 2022,
    arXiv:2205.10287: Adam divides by the gradient's size, mostly noise, which N times the examples make √N times
    smaller. `none`: as given.
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
        self.decay = keras.optimizers.schedules.PolynomialDecay(
            peak, decay_steps=total_steps - self.warmup_steps, end_learning_rate=0.0
        )

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
    """As `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, with fewer passes over the logits."""

    adds_up = True  # for `data_parallel`

    def __init__(self, reduction="mean_with_sample_weight", name="cross_entropy", dtype=None):
        super().__init__(name, reduction, dtype)

    def call(self, y_true, y_pred):
        """The loss of each label, in nats, in y_true's shape, by logits [..., classes]."""
        return _cross_entropy(y_pred, tf.cast(y_true, tf.int32))  # Keras has cast the labels to floats


@tf.custom_gradient
def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """log(sum(exp(logits))) - logits[label]; its gradient, softmax(logits) less 1 at the label, shares powers."""
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

    The schedule, or number, is of the learning rate; a step subtracts it times `weight_decay` times each weight.
    """
    optimizer = AdamW(schedule, weight_decay=weight_decay, beta_2=BETA_2, epsilon=EPSILON)
    optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
    return optimizer


def muon(schedule, weight_decay: float = 0.01, clip_norm: float | None = 1.0) -> keras.optimizers.Optimizer:
    """Muon for the kernels of hidden layers, and the above AdamW for the rest, with 0.4 times the learning rate.

    Gradients are clipped to the global norm `clip_norm`, as BERT's and GPT-3's. Call it in the strategy's scope.
    """
    adam = {"adam_lr_ratio": 0.4, "adam_weight_decay": weight_decay, "adam_beta_2": BETA_2, "epsilon": EPSILON}
    optimizer = Muon(schedule, weight_decay=weight_decay, exclude_layers=HEADS, global_clipnorm=clip_norm, **adam)
    optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
    return optimizer


class AdamW(keras.optimizers.AdamW):
    """As Keras's, with one TensorFlow operation per variable, where Keras's has some ten, each over all its memory."""

    def update_step(self, gradient, variable, learning_rate):
        """See Keras; `variable` is one replica's copy, and so are the moments whose handles are used."""
        index = self._get_variable_index(variable)
        moments = self._momentums[index], self._velocities[index]
        _adam_step(self, gradient, variable, learning_rate, *moments, self.beta_1, self.beta_2)


class Muon(keras.optimizers.Muon):
    """Muon for the kernels of hidden layers, and AdamW for embeddings, output layers, biases and norms.

    A step moves a kernel's matrix along its momentum with all singular values brought near 1, by five Newton-Schulz
    iterations (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/). Its root mean square is 0.2 times the
    learning rate, about AdamW's, so that one rate and one weight decay serve both (Liu et al. 2025, arXiv:2502.16982).

    Keras's own leaves kernels of more than two dimensions to AdamW, those of KerasHub's attention among them. Here each
    head is a matrix of its own; see `matrix_axes`. Under a strategy, it needs `data_parallel` or `apply_summed`.
    """

    def _should_use_adamw(self, variable):
        if not variable.path.endswith("kernel"):  # a bias of attention has two dimensions
            return True
        return super()._should_use_adamw(SimpleNamespace(path=variable.path, shape=variable.shape[:2]))

    def _distributed_tf_update_step(self, distribution, grads_and_vars, learning_rate):
        """As Keras's, but with all matrices of one shape in one stack."""
        rest: list[tuple] = []
        stacks: dict[tuple[int, ...], list[tuple]] = {}
        for gradient, variable in grads_and_vars:
            index = self._get_variable_index(variable)
            if self.adam_velocities[index] is not None:
                rest.append((gradient, variable))
                continue
            momentum = self.momentums[index]
            self.assign_add(momentum, gradient + momentum * (self.momentum - 1))
            direction = gradient + momentum * self.momentum  # Nesterov's
            matrices = tf.transpose(direction, matrix_axes(variable.shape))
            shape = matrices.shape[-2:]
            stacks.setdefault(tuple(shape), []).append((variable, tf.reshape(matrices, [-1, *shape])))
        super()._distributed_tf_update_step(distribution, rest, learning_rate)
        for shape, parts in stacks.items():
            stack, at_once = tf.concat([part for _, part in parts], axis=0), max(1, STACK // math.prod(shape))
            pieces = [stack[start : start + at_once] for start in range(0, stack.shape[0], at_once)]
            update = tf.concat([self.zeropower_via_newtonschulz5(piece, self.ns_steps) for piece in pieces], axis=0)
            update *= learning_rate * self.rms_rate * math.sqrt(max(shape))
            updates = tf.split(update, [part.shape[0] for _, part in parts])
            for (variable, _), update in zip(parts, updates, strict=True):
                axes = matrix_axes(variable.shape)
                update = tf.reshape(update, [variable.shape[axis] for axis in axes])
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
    handles = {"var": variable.handle, "m": mean.value.handle, "v": square.value.handle}
    betas = {"beta1": beta_1, "beta2": beta_2, "beta1_power": beta_1**step, "beta2_power": beta_2**step}
    rate, dense = tf.cast(learning_rate, variable.dtype), tf.convert_to_tensor(gradient)  # of a table, it may be rows
    grad = tf.cast(dense, variable.dtype)
    tf.raw_ops.ResourceApplyAdam(**handles, **betas, lr=rate, epsilon=optimizer.epsilon, grad=grad)
