import numpy as np
import pytest
import tensorflow as tf

from common.data.byte_pairs import train_byte_pairs
from common.model.saving import keras_tokenizer

TEXTS = ["The quick brown fox jumps over the lazy dog; it wasn't impressed.", "In 2024 foo(bar) </s> </s> was 12345.6"]
AWKWARD = [
    *TEXTS,
    "",
    "\n\n",
    "one line\n\nand, after an empty one, another  with   spaces\t",
    "Café naïve Zürich 中文 日本語 🙂🙃 👩‍👩‍👧",
    "x" * 3000,
    "about <mask>, <pad> and <s>",
    "\u00a0no break\u3000wide",
]


@pytest.fixture(scope="module")
def vocabulary():
    return train_byte_pairs(lambda: iter(TEXTS * 3), 400)


def test_a_trained_vocabulary_begins_with_robertas_special_tokens(vocabulary):
    assert vocabulary.pieces[:5] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert 261 < len(vocabulary.pieces) <= 400 and len(set(vocabulary.pieces)) == len(vocabulary.pieces)


@pytest.mark.parametrize("text", AWKWARD, ids=range(len(AWKWARD)))
def test_keras_hub_gives_the_same_ids_and_nothing_is_lost(text, vocabulary):
    tokenizer = vocabulary.tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if "<" not in text:  # KerasHub takes special tokens' names for the tokens
        assert np.asarray(keras_tokenizer(vocabulary)(text)).tolist() == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_keras_hub_splits_otherwise_in_a_pipeline(vocabulary):
    """The day it does not, the docstring of common/data/byte_pairs.py and this test can go."""
    text, keras = "foo(bar)", keras_tokenizer(vocabulary)
    in_pipeline = next(iter(tf.data.Dataset.from_tensors(text).map(keras)))
    assert np.asarray(in_pipeline).tolist() != np.asarray(keras(text)).tolist()


def test_only_the_unknown_word_is_special_in_a_text(vocabulary):
    tokenizer = vocabulary.tokenizer()
    assert tokenizer.encode("[UNK]", add_special_tokens=False).ids == [3]
    ids = tokenizer.encode("<s> </s> <mask> <pad>", add_special_tokens=False).ids
    assert not {0, 1, 2, 4} & set(ids)
    assert not {"<s>", "</s>"} & {merge.replace(" ", "") for merge in vocabulary.merges}
