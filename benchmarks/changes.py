# SPDX-License-Identifier: Apache-2.0
"""Techniques for which `bert_mlm` has no option: each replaces a function or a class that the recipe uses."""

import functools

import keras
import numpy as np
import tensorflow as tf
from common.data.stream import Stream
from keras_hub.src.models.bert import bert_masked_lm

from common.training import optimizers
from keras_replicas import locate


def muon(recipe, one_matrix: bool = False, **settings) -> None:
    """Muon with other settings."""

    class Muon(optimizers.Muon):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | settings)

        def _update_kernels(self, grads_and_vars, learning_rate):
            if not one_matrix:
                super()._update_kernels(grads_and_vars, learning_rate)
                return
            for gradient, variable in grads_and_vars:
                momentum = self.momentums[self._get_variable_index(variable)]
                self.assign_add(momentum, gradient + momentum * (self.momentum - 1))
                matrix = tf.reshape(gradient + momentum * self.momentum, [_inputs(variable.shape), -1])
                update = self.lr_adjust(learning_rate * self.zeropower_via_newtonschulz5(matrix, self.ns_steps))
                self.assign_sub(variable, tf.reshape(update, variable.shape))

    optimizers.Muon = Muon


def initial(recipe, positions: float = 0.0, kernels: bool = False) -> None:
    """Position embeddings from noise of that standard deviation, or kernels from noise of 1/sqrt(inputs)."""
    make = recipe.masked_lm_from_size

    def masked_lm_from_size(*args):
        model = make(*args)
        for variable in model.trainable_variables:
            if positions and variable.path.endswith("position_embedding/embeddings"):
                variable.assign(np.random.normal(scale=positions, size=variable.shape))
            if kernels and variable.path.endswith("kernel"):
                variable.assign(np.random.normal(scale=_inputs(variable.shape) ** -0.5, size=variable.shape))
        return model

    recipe.masked_lm_from_size = masked_lm_from_size


def _inputs(shape) -> int:
    """The inputs of a kernel: dense, or of KerasHub's attention, a query's [width, heads, columns] or an output's."""
    return shape[0] * shape[1] if len(shape) == 3 and shape[0] < shape[2] else shape[0]


def untied(recipe) -> None:
    """An output layer with weights of its own."""
    tied = bert_masked_lm.MaskedLMHead
    bert_masked_lm.MaskedLMHead = lambda token_embedding, **kwargs: tied(token_embedding=None, **kwargs)


def batches(recipe, rates: list[float] = (0.3, 0.3), shorter: bool = False) -> None:
    """Other training batches: a mask rate that changes linearly, or sequences of half the length in the first half."""
    own = recipe.masked_batches

    def masked_batches(config, vocabulary, sequences, split, batch_size):
        usual = own(config, vocabulary, sequences, split, batch_size)
        if split != "train":
            return usual
        rule = recipe.MaskingRule.of(vocabulary)
        last = len(usual) * config.epochs * batch_size

        def make_batch(positions, halved):
            epochs, numbers = locate(positions, len(sequences[split]), batch_size, config.seed)
            ids = recipe.read_sequences(sequences[split], numbers, rule.pad_id, trim=False)
            if halved:
                ids, epochs = tf.reshape(ids, [-1, config.seq_length // 2]), tf.repeat(epochs, 2)
                numbers = tf.repeat(numbers, 2) * 2 + tf.tile(tf.constant([0, 1], tf.int64), [batch_size])
            rate = rates[0] + (rates[1] - rates[0]) * tf.cast(positions[0] / last, tf.float32)
            return recipe.mask_tokens(ids, recipe.mask_seeds(config.seed, epochs, numbers), rule, rate)

        middle = last // batch_size // 2 * batch_size if shorter else 0
        parts = [
            tf.data.Dataset.range(*part).batch(batch_size).map(functools.partial(make_batch, halved=halved)).prefetch(8)
            for part, halved in (((0, middle), True), ((middle, tf.int64.max), False))
        ]
        return Stream(lambda step, *_: parts[0].concatenate(parts[1]).skip(step), len(usual))  # for one replica

    recipe.masked_batches = masked_batches


def ramp(recipe) -> None:
    """Half the batch, twice as often, for the first half of the text."""
    own = recipe.masked_batches

    def masked_batches(config, vocabulary, sequences, split, batch_size):
        usual = own(config, vocabulary, sequences, split, batch_size)
        if split != "train":
            return usual
        middle = len(usual) * config.epochs // 2

        def halves(*batch):
            return tf.data.Dataset.from_tensor_slices(
                tf.nest.map_structure(lambda leaf: tf.stack(tf.split(leaf, 2)), batch)
            )

        def from_step(step, *_):  # for one replica
            data = usual.iter_from_step(0, tf.distribute.InputContext())
            return data.take(middle).flat_map(halves).concatenate(data.skip(middle)).skip(step)

        return Stream(from_step, len(usual) * 3 // 2)

    recipe.masked_batches = masked_batches


def schedule(recipe, name: str) -> None:
    """Another decay of the learning rate."""

    def cosine(peak, warmup, total):
        return keras.optimizers.schedules.CosineDecay(0.0, total - warmup, warmup_target=peak, warmup_steps=warmup)

    class Stable(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, peak, warmup, total):
            self.peak, self.warmup, self.total = peak, warmup, total

        def __call__(self, step):
            step = keras.ops.cast(step, "float32")
            left = (self.total - step) / (0.3 * self.total)
            return self.peak * keras.ops.minimum(1.0, keras.ops.minimum((step + 1) / (self.warmup + 1), left))

    recipe.WarmUpPolynomialDecay = {"cosine": cosine, "stable": Stable}[name]


def z_loss(recipe) -> None:
    """A penalty on the log-sum-exp of the logits, in the gradient alone, so that the loss stays comparable."""

    class WithZ(recipe.CrossEntropy):
        def call(self, y_true, y_pred):
            z = 1e-4 * tf.reduce_logsumexp(y_pred, axis=-1) ** 2
            return super().call(y_true, y_pred) + z - tf.stop_gradient(z)

    recipe.CrossEntropy = WithZ
