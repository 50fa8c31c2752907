# SPDX-License-Identifier: Apache-2.0
"""What language models of every kind share: an optimizer, Muon; metrics, with the unigram baseline; a report."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from .data.rows import RowBatches
from .log import Scores, Told, one_epoch
from .training import BETA_2, EPSILON, NOT_DECAYED, adam_step

HEADS = ["logits", "mlm_head"]  # in the paths of the output layers of KerasHub's tasks
STACK = 2**23  # numbers in a stack of matrices, about; a step of Muon takes several times its memory
MARGIN = 0.03  # a model must beat its unigram baseline by more nats, or the report warns

# In a vocabulary of byte pairs, whose alphabet has a letter for each byte, those of white space, and of the bytes of a
# UTF-8 character after its first; and SentencePiece's letter for a space.
NOT_COUNTED = {*"ĠĊĉč", *map(chr, range(161, 192)), *map(chr, range(290, 324)), "\u2581"}


def muon(schedule, weight_decay: float = 0.01, clip_norm: float | None = 1.0) -> keras.optimizers.Optimizer:
    """Muon for the kernels of hidden layers, and `training.adamw` for the rest, with 0.4 times the learning rate.

    Gradients are clipped to the global norm `clip_norm`, as BERT's and GPT-3's. Call it in the strategy's scope.
    """
    adam = {"adam_lr_ratio": 0.4, "adam_weight_decay": weight_decay, "adam_beta_2": BETA_2, "epsilon": EPSILON}
    optimizer = Muon(schedule, weight_decay=weight_decay, exclude_layers=HEADS, global_clipnorm=clip_norm, **adam)
    optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
    return optimizer


class Muon(keras.optimizers.Muon):
    """Muon for the kernels of hidden layers, and AdamW for embeddings, output layers, biases and norms.

    A step moves a kernel's matrix along its momentum with all singular values brought near 1, by five Newton-Schulz
    iterations (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/). Its root mean square is 0.2 times the
    learning rate, about AdamW's, so that one rate and one weight decay serve both (Liu et al. 2025, arXiv:2502.16982).

    Keras's own leaves kernels of more than two dimensions to AdamW, those of KerasHub's attention among them. Here each
    head is a matrix of its own, by `matrix_axes`. Made where layers compute in bfloat16, its iterations use it, too, as
    Jordan's do. Under a strategy, it needs `data_parallel` or `apply_summed`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.in_bfloat16 = keras.config.dtype_policy().compute_dtype == "bfloat16"  # which Keras keeps per thread

    def _should_use_adamw(self, variable):
        if not variable.path.endswith("kernel"):  # a bias of attention has two dimensions
            return True
        return super()._should_use_adamw(SimpleNamespace(path=variable.path, shape=variable.shape[:2]))

    def _distributed_tf_update_step(self, distribution, grads_and_vars, learning_rate):
        """Updates all matrices of one shape together, in one stack; Keras updates them one by one."""
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
        for shape, pairs in stacks.items():
            stack, at_once = tf.concat([matrices for _, matrices in pairs], axis=0), max(1, STACK // math.prod(shape))
            stack = tf.cast(stack, tf.bfloat16 if self.in_bfloat16 else stack.dtype)
            pieces = [stack[start : start + at_once] for start in range(0, stack.shape[0], at_once)]
            update = tf.concat([self.zeropower_via_newtonschulz5(piece, self.ns_steps) for piece in pieces], axis=0)
            update = tf.cast(update, pairs[0][0].dtype) * (learning_rate * self.rms_rate * math.sqrt(max(shape)))
            updates = tf.split(update, [matrices.shape[0] for _, matrices in pairs])
            for (variable, _), update in zip(pairs, updates, strict=True):
                axes = matrix_axes(variable.shape)
                update = tf.reshape(update, [variable.shape[axis] for axis in axes])
                self.assign_sub(variable, tf.transpose(update, np.argsort(axes)))

    def _adamw_update_step(self, gradient, variable, learning_rate, m, v):
        adam_step(self, gradient, variable, learning_rate, m, v, self.adam_beta_1, self.adam_beta_2)


def matrix_axes(shape: Sequence[int]) -> list[int]:
    """The axes of a kernel, ordered to make it a stack of matrices, [..., rows, columns], with rows <= columns.

    Of three axes, as in attention, the second counts heads if the first is the longest: [width, heads, width of a
    head]. Otherwise the first does: [heads, width of a head, width], or [heads, width, width of a head]. In a
    convolution, all axes but the last two count positions.
    """
    axes = [1, 0, 2] if len(shape) == 3 and shape[0] == max(shape) else list(range(len(shape)))
    return [*axes[:-2], *sorted(axes[-2:], key=lambda axis: (shape[axis], axis))]


def language_model_scores(
    split: str, scores: dict[str, float], batches: RowBatches, train: RowBatches, tokenizer: Any
) -> dict[str, float]:
    """Entries `val_loss` (for the split `validation`), `val_perplexity` and so on; losses in nats per token.

    The `scores` are the split's `loss` and `accuracy`. Of its batches, (x, y, sample_weight), the ids in y with a
    weight are the tokens to predict; the rows of `train` are counted for the baseline.

    `bits_per_character` is the loss in bits, divided by the mean number of characters, without white space, in a token
    to predict. It compares vocabularies of one kind, though roughly: with a smaller one, a masked token has more of its
    own word as context, and word pieces count the letters of normalised text.
    """
    targets = np.concatenate([np.asarray(y)[np.asarray(weight) > 0] for _, y, weight in one_epoch(batches)])
    pieces = [tokenizer.id_to_token(index) for index in range(tokenizer.vocabulary_size())]
    if isinstance(tokenizer, keras_hub.models.BertTokenizer):
        characters = np.array([len(piece.removeprefix("##")) for piece in pieces])
    else:
        characters = np.array([sum(letter not in NOT_COUNTED for letter in piece) for piece in pieces])
    characters[tokenizer.special_token_ids] = 0  # they are no text
    entries = scores | {
        "perplexity": math.exp(min(scores["loss"], 700)),
        "bits_per_character": scores["loss"] / math.log(2) / np.mean(characters[targets]),
        "unigram_loss": unigram_loss(train.rows.counts(len(pieces)), targets),
    }
    prefix = "val" if split == "validation" else split
    return {f"{prefix}_{name}": float(value) for name, value in entries.items()}


def unigram_loss(counts: np.ndarray, targets: np.ndarray) -> float:
    """The unigram baseline: mean loss, in nats, of predicting each target by how often each id occurs in training.

    No model without context does better. Token t's probability is (count(t) + 1) / (tokens + vocabulary size): add-one
    smoothing, for tokens that never occur in training (Jurafsky and Martin, "Speech and Language Processing", ch. 3).
    """
    log_probability = np.log((counts + 1) / (counts.sum() + len(counts)))
    return float(-log_probability[targets].mean())


def told_of(split: str, scores: Scores) -> Told:
    """For `report`, which warns if the model does not beat the unigram baseline."""
    loss, unigram = scores["loss"], scores["unigram_loss"]
    difference = f"{abs(unigram - loss):.3f} nats {'better' if loss < unigram else 'worse'}"
    lines = [
        (f"{split} loss", f"{loss:.3f}, perplexity {scores['perplexity']:.1f}"),
        ("  unigram baseline", f"{unigram:.3f}: the model is {difference}"),
        (f"{split} accuracy", f"{scores['accuracy']:.1%}"),
        ("  bits per character", f"{scores['bits_per_character']:.3f}"),
    ]
    return lines, loss < unigram - MARGIN  # NaN never is
