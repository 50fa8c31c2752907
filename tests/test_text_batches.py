import dataclasses

import numpy as np
import pytest

from common.data.labelled import Examples, LabelledTexts
from common.data.text_batches import EncodedTexts, in_order
from common.data.wordpiece import WordPieces
from common.model.classifier import make_preprocessor
from common.training.scaling import Scaled
from keras_replicas.errors import UserError

WORDS = ["the", "a", "cat", "dog", "sees", "hears", "old", "young", "and"]
VOCABULARY = WordPieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS], lowercase=True, strip_accents=True)


def sentences(count, longest, seed=0):
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(1, longest))) for _ in range(count)]


def encoded(texts, seq_length, labels=None, split="train", classes=("no", "yes")):
    texts = LabelledTexts(list(classes), {split: Examples(texts, labels, list(map(str, range(len(texts)))))}, "")
    return EncodedTexts.of(texts, make_preprocessor("", VOCABULARY, seq_length))


@pytest.mark.parametrize("columns", [1, 2])
def test_a_batch_has_what_the_preprocessor_makes_of_its_texts(columns):
    texts = list(zip(*(sentences(200, 30, seed) for seed in range(columns)), strict=True))
    data = encoded(texts, 24)
    (x, examples), *none = list(data.batches("train", Scaled(200, 200), range(1)))
    assert sorted(examples.numpy()) == list(range(200)) and not none
    for row, example in enumerate(examples.numpy()):
        theirs = data.preprocessor(x=texts[example])
        assert x.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_array_equal(x[name][row], np.array(values).astype(np.int32), err_msg=name)


def test_few_lengths_are_multiples_of_32():
    texts = [("cat " * length,) for length in (1, 9, 20, 31, 50, 90)]
    data = dataclasses.replace(encoded(texts, 120), few_lengths=True)
    lengths = [x["token_ids"].shape[1] for x, _ in data.batches("train", Scaled(1, 1), range(6))]
    assert lengths == [32, 32, 32, 64, 64, 96]


def test_a_gap_in_the_padding_mask_is_a_part_of_the_text():
    """As the literal name of RoBERTa's padding leaves one."""
    data = encoded([("cat",), ("dog dog dog dog",)], 16)
    data.inputs["train"]["padding_mask"][1, 1:4] = 0
    ((x, _),) = data.batches("train", Scaled(2, 2), range(1))
    assert x["token_ids"].shape == (2, 8) and x["padding_mask"][1].numpy().tolist() == [1, 0, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(("columns", "least"), [(1, 3), (2, 5)])
def test_a_length_without_room_for_a_token_of_each_text_is_refused(columns, least):
    texts = [("cat dog",) * columns]
    with pytest.raises(UserError, match=f"--seq-length {least - 1} has no room .* Give at least {least}"):
        encoded(texts, least - 1)
    assert encoded(texts, least).inputs["train"]["padding_mask"].sum() == least


def test_a_batch_is_as_long_as_its_longest_example_on_every_replica():
    texts = [("cat",)] * 7 + [(" ".join(["dog"] * 40),)] + [("cat",)] * 8
    for shard in range(2):
        batches = encoded(texts, 128).batches("train", Scaled(4, 8), range(2), num_shards=2, shard=shard)
        assert [x["token_ids"].shape[1] for x, _ in batches] == [4, 44]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_each_example_comes_once_an_epoch_in_another_order_each(replicas):
    labels = list(range(30))
    data = encoded([(text,) for text in sentences(30, 20)], 32, labels)
    epochs = [range(4), range(4, 8)]  # of 8 examples
    orders = []
    for steps in epochs:
        shards = [
            data.batches("train", Scaled(8 // replicas, 8), steps, 7, replicas, shard) for shard in range(replicas)
        ]
        of_step = [np.concatenate([examples for _, examples in batch]) for batch in zip(*shards, strict=True)]
        orders.append([sorted(examples) for examples in of_step])
        used = np.concatenate(of_step)
        assert sorted(used[used >= 0]) == labels and sum(used < 0) == 2
    assert orders[0] != orders[1]
    assert data.steps("train", Scaled(8 // replicas, 8)) == 4 and data.sizes() == {"train": 30}
    whole = data.batches("train", Scaled(8, 8), range(8), 7)
    assert [sorted(examples.numpy()) for _, examples in whole] == orders[0] + orders[1]
    for x, y, weight in data.labelled_batches("train", Scaled(8, 8), range(8), 7):
        for ids, label, used in zip(x["token_ids"], y, weight, strict=True):
            assert not used or (ids.numpy() == data.inputs["train"]["token_ids"][label][: len(ids)]).all()


def test_rows_come_back_in_the_examples_order():
    import tensorflow as tf

    batches = [(tf.constant([2, -1]), tf.constant([[2.0], [9.0]])), (tf.constant([1, 0]), tf.constant([[1.0], [0.0]]))]
    assert in_order(batches, 3).tolist() == [[0.0], [1.0], [2.0]]


def test_a_checksum_is_of_the_texts_and_of_the_labels():
    def checksum(text, label):
        return encoded([(text,), ("dog",)], 8, [label, 1]).checksums()["train"]

    assert checksum("cat", 0) == checksum("cat", 0)
    assert len({checksum("cat", 0), checksum("cat", 1), checksum("old cat", 0)}) == 3


def test_numbers_are_labels_as_they_are():
    def data(number):
        return encoded([("cat",), ("dog",), ("a",)], 8, [0.5, -2.0, number], classes=())

    ((_, y, weight),) = data(3.75).labelled_batches("train", Scaled(4, 4), range(1))
    assert (
        y.dtype.is_floating and y.numpy()[:3].tolist() == [0.5, -2.0, 3.75] and weight.numpy().tolist() == [1, 1, 1, 0]
    )
    assert data(3.75).checksums() == data(3.75).checksums() != data(3.5).checksums()


def test_a_checksum_of_a_split_without_labels_is_of_its_texts():
    def checksum(text):
        return encoded([(text,)], 8, split="test").checksums()["test"]

    assert checksum("cat") != checksum("dog")
