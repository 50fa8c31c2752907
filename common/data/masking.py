# SPDX-License-Identifier: Apache-2.0
"""Masked-language-model inputs and labels, by BERT's rule (Devlin et al. 2018, arXiv:1810.04805, section 3.1)."""

import keras_hub
import tensorflow as tf

from .vocabulary import unknown_id

EVALUATION_RATE = 0.15  # BERT's, whatever the rate in training, so that any two models' losses can be compared


@tf.autograph.experimental.do_not_convert  # AutoGraph finds nothing to convert, and takes its time
def mask_tokens(
    ids: tf.Tensor, is_token: tf.Tensor, seeds: tf.Tensor, tokenizer: keras_hub.models.Tokenizer, rate: float
):
    """Puts a start and an end token around each text, chooses tokens, hides them, and keeps them as labels.

    Of n tokens that may be chosen, round(rate * n) are, at least one: 80 % become [MASK], 10 % a random token, and 10 %
    stay. Unknown words, which teach nothing, and the start and end of a text are never chosen. A sequence's
    masks are a pure function of its tokens and its seed, regardless of padding.

    Args:
        ids, is_token: texts, int32 and bool [batch, length], without start and end, from `rows.Rows.read`.
        seeds: int64 [batch, 2], from `mask_seeds`.
        tokenizer: BERT's or RoBERTa's.

    Returns `(x, y, sample_weight)` for `BertMaskedLM` or `RobertaMaskedLM`, with slots = round(rate * (length + 2)), or
    one: x has int32 `token_ids`, `padding_mask` and, for BERT, `segment_ids` [batch, length + 2], and `mask_positions`
    [batch, slots]; y is the chosen tokens' ids, int32 [batch, slots]; sample_weight is 1.0, or 0.0 for an unused slot.
    """
    never = [unknown_id(tokenizer), tokenizer.start_token_id, tokenizer.end_token_id, tokenizer.pad_token_id]
    may_be_chosen = tf.pad(is_token & tf.reduce_all(ids[..., None] != tf.constant(never), axis=-1), [[0, 0], [1, 1]])
    ids, count = tf.pad(ids, [[0, 0], [1, 1]]), tf.reduce_sum(tf.cast(is_token, tf.int32), axis=1, keepdims=True)
    length = tf.shape(ids)[1]
    index = tf.range(length)
    ids = tf.where(index == 0, tokenizer.start_token_id, tf.where(index == count + 1, tokenizer.end_token_id, ids))
    is_token = (index < count + 2) & (count > 0)
    ids = tf.where(is_token, ids, tokenizer.pad_token_id)

    # A position's numbers must not depend on the length: a sequence is padded according to its neighbours in the batch.
    noise = tf.reshape(uniform_noise(seeds, 3 * length), [-1, length, 3])
    priority, choice, replacement = tf.unstack(noise, axis=2)
    candidates = tf.reduce_sum(tf.cast(may_be_chosen, tf.int32), axis=1, keepdims=True)
    number = tf.minimum(_share(rate, candidates), candidates)
    order = tf.argsort(tf.where(may_be_chosen, priority, 2.0), axis=1)  # the chosen come first
    random_ids = tf.cast(replacement * tokenizer.vocabulary_size(), tf.int32)
    hidden = tf.where(choice < 0.8, tokenizer.mask_token_id, tf.where(choice < 0.9, random_ids, ids))
    token_ids = tf.where(tf.argsort(order, axis=1) < number, hidden, ids)

    slots = _share(rate, length)
    used = tf.range(slots) < number
    positions = tf.where(used, order[:, :slots], 0)
    labels = tf.where(used, tf.gather(ids, positions, batch_dims=1), tokenizer.pad_token_id)
    x = {"token_ids": token_ids, "padding_mask": tf.cast(is_token, tf.int32), "mask_positions": positions}
    if isinstance(tokenizer, keras_hub.models.BertTokenizer):
        x["segment_ids"] = tf.zeros_like(ids)
    return x, labels, tf.cast(used, tf.float32)


def mask_seeds(seed: int, epochs: tf.Tensor | None, examples: tf.Tensor) -> tf.Tensor:
    """Seeds for `mask_tokens`, int64 [batch, 2], that give new masks in every epoch.

    The seed is the run's, below 2^32; `epochs` and `examples` are int64 [batch]. Without epochs, masks never change.
    """
    epochs = tf.fill(tf.shape(examples), tf.constant(-1, tf.int64)) if epochs is None else epochs
    # As int64 has a sign, the seeds from 2^31 on are negative numbers.
    return tf.stack([(seed - 2**32 * (seed >= 2**31)) * 2**32 + epochs, examples], axis=1)


def uniform_noise(seeds: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """Numbers in [0, 1) for each of many seeds at once, by SplitMix64 (Steele, Lea and Flood 2014).

    TensorFlow's stateless generators take one seed per call, and a loop of calls costs more than the rest of masking.
    Takes seeds, int64 [batch, 2]; returns float32 [batch, count], multiples of 2^-24.
    """

    def shifted(z: tf.Tensor, bits: int) -> tf.Tensor:
        return z ^ tf.bitwise.right_shift(z, tf.constant(bits, tf.uint64))

    def mixed(z: tf.Tensor) -> tf.Tensor:
        z = shifted(z, 30) * tf.constant(0xBF58476D1CE4E5B9, tf.uint64)
        return shifted(shifted(z, 27) * tf.constant(0x94D049BB133111EB, tf.uint64), 31)

    first, second = tf.unstack(tf.bitcast(seeds, tf.uint64)[:, None], axis=2)
    steps = tf.cast(tf.range(1, count + 1), tf.uint64) * tf.constant(0x9E3779B97F4A7C15, tf.uint64)
    numbers = mixed(mixed(mixed(first) + second) + steps)
    return tf.cast(tf.bitwise.right_shift(numbers, tf.constant(40, tf.uint64)), tf.float32) * 2.0**-24


def _share(rate: float, number: tf.Tensor) -> tf.Tensor:
    """Of a number of tokens, how many are chosen."""
    return tf.maximum(tf.cast(tf.round(rate * tf.cast(number, tf.float32)), tf.int32), 1)
