import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from common.data.masking import mask_seeds, mask_tokens, uniform_noise

WORDS = [f"word{i}" for i in range(995)]
BERT = keras_hub.models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
IDS = {word: i for i, word in enumerate([*SPECIAL, "w", "o", "wo", *WORDS[3:]])}
ROBERTA = keras_hub.models.RobertaTokenizer(IDS, ["w o"])


def batch(rows=200, length=126, tokens=126):
    ids = np.zeros((rows, length), np.int32)
    ids[:, :tokens] = np.random.default_rng(0).integers(5, 1000, (rows, tokens))
    return ids, np.tile(np.arange(length) < tokens, (rows, 1))


def masked(ids, is_token, epoch=0, rate=0.15, tokenizer=BERT, examples=None, seed=0):
    examples = tf.range(len(ids), dtype=tf.int64) if examples is None else tf.constant(examples, tf.int64)
    seeds = mask_seeds(seed, tf.fill(tf.shape(examples), tf.constant(epoch, tf.int64)), examples)
    found = mask_tokens(tf.constant(ids), tf.constant(is_token), seeds, tokenizer, rate)
    return tf.nest.map_structure(np.asarray, found)


@pytest.mark.parametrize("tokenizer", [BERT, ROBERTA])
def test_what_is_chosen_and_what_becomes_of_it(tokenizer):
    texts, is_token = batch()
    x, y, weight = masked(texts, is_token, tokenizer=tokenizer)
    ids = np.pad(texts, [[0, 0], [1, 1]])
    ids[:, 0], ids[:, -1] = tokenizer.start_token_id, tokenizer.end_token_id
    positions = x["mask_positions"]
    assert positions.shape == y.shape == weight.shape == (200, 19)  # 15 % of 128 and of 126 is 19
    assert (weight == 1).all() and (x["padding_mask"] == 1).all()
    assert all(len(set(row)) == 19 for row in positions)
    assert (np.take_along_axis(ids, positions, 1) == y).all()
    assert (y >= 5).all()  # never a special token
    unchosen = np.ones_like(ids, bool)
    np.put_along_axis(unchosen, positions, False, 1)
    assert (x["token_ids"][unchosen] == ids[unchosen]).all()

    now = np.take_along_axis(x["token_ids"], positions, 1)
    assert np.mean(now == tokenizer.mask_token_id) == pytest.approx(0.8, abs=0.02)
    assert np.mean(now == y) == pytest.approx(0.1, abs=0.02)
    assert np.bincount(positions.ravel(), minlength=128)[1:127].std() < 10  # every position alike: mean 30, sd 5
    names = {"token_ids", "padding_mask", "mask_positions"} | ({"segment_ids"} if tokenizer is BERT else set())
    assert x.keys() == names and all(value.dtype == np.int32 for value in [y, *x.values()])


def test_padding_and_special_tokens_and_a_batch_without_any_text():
    ids, is_token = batch(rows=3, length=20, tokens=10)
    is_token[1] = False  # a place filled with no example
    ids[2, :5], ids[0, :9] = BERT.token_to_id("[UNK]"), [BERT.end_token_id] * 4 + [BERT.pad_token_id] * 5  # in texts
    x, y, weight = masked(ids, is_token)
    assert np.sum(weight, axis=1).tolist() == [1, 0, 1] and y[0, 0] >= 5
    assert np.sum(x["padding_mask"], axis=1).tolist() == [12, 0, 12]
    assert (x["token_ids"][1] == 0).all() and (y[weight == 0] == 0).all()
    assert x["mask_positions"][2, 0] > 5
    assert (x["token_ids"][::2, 0] == 2).all() and (x["token_ids"][::2, 11] == 3).all()
    _, _, weight = masked(np.full([2, 9], 3, np.int32), np.ones([2, 9], bool), tokenizer=ROBERTA)  # <unk> alone
    assert not weight.any()
    x, _, weight = masked(*batch(rows=2, length=32, tokens=0))
    assert x["token_ids"].shape == (2, 34) and not weight.any()


def test_masks_are_a_function_of_seed_epoch_and_example_alone():
    ids, is_token = batch()
    everything = masked(ids, is_token)
    part = masked(ids[50:60], is_token[50:60], examples=range(50, 60))
    tf.nest.map_structure(lambda a, b: np.testing.assert_array_equal(a[50:60], b), everything, part)
    changes = {}, {"epoch": 1}, {"seed": 1}, {"seed": 2**32 - 1}
    found = [masked(ids, is_token, **change)[0]["mask_positions"] for change in changes]
    assert all((found[i] != found[i - j]).any(1).all() for i in range(4) for j in (1, 2))


@pytest.mark.parametrize("length", [46, 62, 126])
def test_masks_are_the_same_however_far_a_sequence_is_padded(length):
    """What stands beside a sequence decides how far it is padded, and that is another on another number of replicas."""
    ids, is_token = batch(length=30, tokens=30)
    is_token[::2, 10:] = False  # shorter ones
    (x, y, weight), (longer_x, longer_y, longer_weight) = (
        masked(*(np.pad(part, [[0, 0], [0, padded - 30]]) for part in (ids, is_token))) for padded in (30, length)
    )
    slots = y.shape[1]
    assert longer_y.shape[1] == round(0.15 * (length + 2)) and np.sum(weight) > 200 * 2
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
