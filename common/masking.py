# SPDX-License-Identifier: Apache-2.0
"""Masked-language-model inputs and labels, by BERT's rule (Devlin et al. 2018, arXiv:1810.04805, section 3.1)."""

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class MaskingRule:
    """What is masked, and with what.

    Args:
        vocabulary_size: ids from which a random token is drawn.
        mask_id: id of [MASK].
        pad_id: id of [PAD].
        never_masked: ids that are never chosen: [PAD], [CLS], [SEP], and [UNK], which teaches nothing.
        rate: share of a sequence's tokens that are chosen.
    """

    vocabulary_size: int
    mask_id: int
    pad_id: int
    never_masked: tuple[int, ...]
    rate: float = 0.15

    @classmethod
    def for_pieces(cls, pieces: list[str], rate: float) -> "MaskingRule":
        """The rule for WordPieces, a list from id to piece with BERT's special tokens."""
        ids = {token: pieces.index(token) for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}
        mask_id = ids.pop("[MASK]")
        return cls(len(pieces), mask_id, ids["[PAD]"], tuple(ids.values()), rate)


def mask_tokens(ids: tf.Tensor, seeds: tf.Tensor, rule: MaskingRule):
    """Chooses tokens, hides them, and keeps them as labels.

    Of the chosen, 80 % become [MASK], 10 % a random token, 10 % stay. A sequence with n tokens that may be chosen has
    round(rate * n) chosen, at least one. The result is a pure function of each sequence and its seed.

    Args:
        ids: int32 [batch, length], padded with `rule.pad_id`.
        seeds: int64 [batch, 2], one for each sequence.
        rule: what is masked, and with what.

    Returns:
        `(x, y, sample_weight)` for `BertMaskedLM` with slots = round(rate * length), at least one: x has int32
        `token_ids`, `segment_ids` and `padding_mask` [batch, length] and `mask_positions` [batch, slots]; y is the
        chosen tokens' ids, int32 [batch, slots]; sample_weight is 1.0 for a chosen token and 0.0 for an unused slot.
    """
    length = tf.shape(ids)[1]
    slots = tf.maximum(_round(rule.rate * tf.cast(length, tf.float32)), 1)
    noise = tf.map_fn(
        lambda seed: tf.random.stateless_uniform([3, length], seed), seeds, fn_output_signature=tf.float32
    )

    may_be_chosen = tf.reduce_all(ids[..., None] != tf.constant(rule.never_masked), axis=-1)
    candidates = tf.reduce_sum(tf.cast(may_be_chosen, tf.int32), axis=1)
    chosen = tf.minimum(tf.maximum(_round(rule.rate * tf.cast(candidates, tf.float32)), 1), candidates)
    order = tf.argsort(tf.where(may_be_chosen, noise[:, 0], 2.0), axis=1)[:, :slots]  # the chosen come first
    used = tf.range(slots) < chosen[:, None]
    positions = tf.where(used, order, 0)
    labels = tf.where(used, tf.gather(ids, positions, batch_dims=1), rule.pad_id)

    how = tf.gather(noise[:, 1], order, batch_dims=1)
    random_ids = tf.cast(tf.gather(noise[:, 2], order, batch_dims=1) * rule.vocabulary_size, tf.int32)
    hidden = tf.where(how < 0.8, rule.mask_id, tf.where(how < 0.9, random_ids, labels))
    # An unused slot writes to position `length`, which is cut off.
    rows = tf.broadcast_to(tf.range(tf.shape(ids)[0])[:, None], tf.shape(order))
    target = tf.stack([rows, tf.where(used, order, length)], axis=-1)
    token_ids = tf.tensor_scatter_nd_update(tf.pad(ids, [[0, 0], [0, 1]]), target, hidden)[:, :length]

    x = {
        "token_ids": token_ids,
        "segment_ids": tf.zeros_like(ids),
        "padding_mask": tf.cast(ids != rule.pad_id, tf.int32),
        "mask_positions": positions,
    }
    return x, labels, tf.cast(used, tf.float32)


def _round(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.round(x), tf.int32)
