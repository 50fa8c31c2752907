# SPDX-License-Identifier: Apache-2.0
"""Techniques for which `bert_mlm` has no option: each replaces a function or a class that the recipe uses."""

import dataclasses
import functools
import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras_hub.src.models.bert import bert_masked_lm

from common.training import adamw as our_adamw


def adamw(recipe) -> None:
    """AdamW in place of Muon."""
    recipe.muon = our_adamw


def muon(recipe, **settings) -> None:
    """The recipe's optimizer with other settings: see its arguments."""
    recipe.muon = functools.partial(recipe.muon, **settings)


def muon_class(recipe, **settings) -> None:
    """The recipe's optimizer with settings of its class, which the recipe does not choose."""
    module = sys.modules[recipe.muon.__module__]
    ours = module.Muon
    module.Muon = lambda *args, **kwargs: ours(*args, **kwargs | settings)


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


def mask_rates(recipe, first: float, last: float) -> None:
    """A mask rate that changes linearly from epoch to epoch; that of the evaluation stays."""
    own = recipe.masked_batches

    def masked_batches(config, tokenizer, rows, batch_size, training):
        def make_batch(epochs, examples):
            ids, is_token, _ = rows.read(examples)
            seeds = recipe.mask_seeds(config.seed, epochs, examples)
            done = tf.cast(tf.reduce_max(epochs), tf.float32) / (config.epochs - 1)
            return recipe.mask_tokens(ids, is_token, seeds, tokenizer, first + (last - first) * done)

        if not training:
            return own(config, tokenizer, rows, batch_size, training)
        return rows.batches(make_batch, batch_size, shuffle=True, seed=config.seed)

    recipe.masked_batches = masked_batches


def short_first(recipe, **options) -> None:
    """Sequences of another length, as many tokens in a step, in the first half of the run."""
    _begin_with(recipe, lambda config: dataclasses.replace(config, **options), lambda batch_size: batch_size * 2, 1)


def ramp(recipe) -> None:
    """Half the batch, twice as often, for the first half of the text."""
    _begin_with(recipe, lambda config: config, lambda batch_size: batch_size // 2, 2)


def _begin_with(recipe, config_of: Callable, batch_size_of: Callable, times: int) -> None:
    """Trains on other batches in place of the first half, `times` as many; for one replica."""
    own = recipe.make_datasets

    def make_datasets(config, batch_size):
        tokenizer, batches = own(config, batch_size)
        usual = batches["train"]
        other = own(config_of(config), batch_size_of(batch_size))[1]["train"]
        middle = len(usual) * config.epochs // 2

        class Joined(type(usual)):
            def __len__(self):
                return (len(usual) * config.epochs + middle * (times - 1)) // config.epochs

            def iter_from_step(self, step, context):
                rest = usual.iter_from_step(middle, context)
                return other.iter_from_step(0, context).take(middle * times).concatenate(rest).skip(step)

        joined = Joined.__new__(Joined)
        joined.__dict__ |= vars(usual)
        return tokenizer, batches | {"train": joined}

    recipe.make_datasets = make_datasets


def schedule(recipe, name: str) -> None:
    """Another decay of the learning rate."""

    def cosine(peak, total, warmup):
        steps = int(warmup * total)
        return keras.optimizers.schedules.CosineDecay(0.0, total - steps, warmup_target=peak, warmup_steps=steps)

    class Stable(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, peak, total, warmup):
            self.peak, self.warmup, self.total = peak, int(warmup * total), total

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
