import numpy as np
import pytest
import tensorflow as tf

from common.data.masking import MaskingRule, mask_tokens, uniform_noise
from common.data.wordpiece import WordPieces

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(995))]
RULE = MaskingRule.of(WordPieces(VOCABULARY, lowercase=True, strip_accents=True))


def batch(rows=200, length=128, tokens=126):
    ids = np.zeros((rows, length), np.int32)
    ids[:, 0], ids[:, tokens + 1] = 2, 3
    ids[:, 1 : tokens + 1] = np.random.default_rng(0).integers(5, 1000, (rows, tokens))
    return ids


def seeds(epoch, rows=200):
    return tf.stack([tf.fill([rows], tf.constant(epoch, tf.int64)), tf.range(rows, dtype=tf.int64)], axis=1)


def test_what_is_chosen_and_what_becomes_of_it():
    ids = batch()
    x, y, weight = (tf.nest.map_structure(np.asarray, part) for part in mask_tokens(tf.constant(ids), seeds(0), RULE))
    positions = x["mask_positions"]
    assert positions.shape == y.shape == weight.shape == (200, 19)  # 15 % of 128 and of 126 is 19
    assert (weight == 1).all()
    assert all(len(set(row)) == 19 for row in positions)
    assert (np.take_along_axis(ids, positions, 1) == y).all()
    assert (y >= 5).all()  # never a special token
    unchosen = np.ones_like(ids, bool)
    np.put_along_axis(unchosen, positions, False, 1)
    assert (x["token_ids"][unchosen] == ids[unchosen]).all()

    now = np.take_along_axis(x["token_ids"], positions, 1)
    assert np.mean(now == 4) == pytest.approx(0.8, abs=0.02)
    assert np.mean(now == y) == pytest.approx(0.1, abs=0.02)
    assert np.mean((now != 4) & (now != y)) == pytest.approx(0.1, abs=0.02)
    assert np.bincount(positions.ravel(), minlength=128)[1:127].std() < 10  # every position alike: mean 30, sd 5


def test_padding_and_special_tokens():
    ids = batch(rows=3, tokens=10)
    ids[1] = 0  # a place filled with no example
    ids[2, 1:6] = 1  # [UNK]
    x, y, weight = mask_tokens(tf.constant(ids), seeds(0, 3), RULE)
    assert np.sum(weight, axis=1).tolist() == [2, 0, 1]
    assert np.sum(x["padding_mask"], axis=1).tolist() == [12, 0, 12]
    assert (np.asarray(x["token_ids"][1]) == 0).all()
    assert np.asarray(x["mask_positions"])[2, 0] > 5


def test_masks_are_a_function_of_epoch_and_example_alone():
    ids = tf.constant(batch())
    everything = mask_tokens(ids, seeds(0), RULE)
    part = mask_tokens(ids[50:60], seeds(0)[50:60], RULE)
    tf.nest.map_structure(lambda a, b: np.testing.assert_array_equal(a[50:60], b), everything, part)
    other_epoch = mask_tokens(ids, seeds(1), RULE)
    assert (np.asarray(everything[0]["mask_positions"]) != np.asarray(other_epoch[0]["mask_positions"])).any(1).all()


@pytest.mark.parametrize("length", [48, 64, 128])
def test_masks_are_the_same_however_far_a_sequence_is_padded(length):
    """What stands beside a sequence decides how far it is padded, and that is another on another number of replicas."""
    ids = batch(length=32, tokens=30)
    ids[::2, 11:] = 0  # shorter ones
    (x, y, weight), (longer_x, longer_y, longer_weight) = (
        mask_tokens(tf.pad(ids, [[0, 0], [0, padded - 32]]), seeds(0), RULE) for padded in (32, length)
    )
    slots = y.shape[1]
    assert longer_y.shape[1] == round(0.15 * length) and np.sum(weight) > 200 * 2
    for name in ("token_ids", "padding_mask", "segment_ids"):
        np.testing.assert_array_equal(longer_x[name][:, :32], x[name])
        assert np.sum(longer_x[name][:, 32:]) == 0
    for ours, theirs in [(longer_x["mask_positions"], x["mask_positions"]), (longer_y, y), (longer_weight, weight)]:
        np.testing.assert_array_equal(ours[:, :slots], theirs)
        assert np.sum(ours[:, slots:]) == 0


def test_noise_is_splitmix64():
    # The generator's first numbers from the state 0, which is what the seeds (0, 0) make; published with its code.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    noise = uniform_noise(tf.constant([[0, 0], [0, 1], [1, 0]], tf.int64), 1000).numpy()
    np.testing.assert_array_equal(noise[0, :3], [np.float32((number >> 40) * 2.0**-24) for number in published])
    assert noise.dtype == np.float32 and noise.min() >= 0 and noise.max() < 1
    assert abs(noise.mean(axis=1) - 0.5).max() < 0.03
    assert abs(np.corrcoef(noise) - np.eye(3)).max() < 0.1
