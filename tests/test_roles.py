import hashlib
import json
import re
from collections import Counter

import keras_hub
import numpy as np

from common.classification_scores import classifier_results
from common.data.examples import EncodedTexts
from common.data.labelled import Examples, LabelledTexts, role_pairs

PAIRS = role_pairs()


def words(text):
    return re.findall(r"\w+", text.lower())


def event(pair):
    _, agent, verb, _, patient = words(pair[0])
    return verb, *sorted([agent, patient])


def test_the_label_is_true():
    for first, second, label in PAIRS["train"]:
        _, agent, verb, _, patient = words(first)
        assert verb in second
        assert label == (words(second)[1] == patient and words(second)[-1] == agent)


def test_no_event_comes_twice_within_a_split_or_across_both_and_the_pairs_are_always_the_same():
    train, validation = ([event(pair) for pair in PAIRS[split]] for split in ("train", "validation"))
    assert set(Counter(train + validation).values()) == {2}  # its two pairs
    assert set(train).isdisjoint(validation)
    assert role_pairs() == PAIRS
    assert hashlib.sha256(json.dumps(PAIRS).encode()).hexdigest()[:16] == "c8982ede7c22772b"


def test_words_tell_nothing():
    labels = {split: [pair[2] for pair in pairs] for split, pairs in PAIRS.items()}
    splits = {s: Examples([pair[:2] for pair in pairs], labels[s], []) for s, pairs in PAIRS.items()}
    pieces = sorted({word for pairs in PAIRS.values() for pair in pairs for word in words(pair[1] + pair[0])})
    tokenizer = keras_hub.models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces], lowercase=True)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=32)
    data = EncodedTexts(LabelledTexts(["0", "1"], splits), preprocessor)
    results = classifier_results(data, {"validation": np.zeros((1000, 2))})
    # To the last pair: those of an event are the same to such a classifier, and one of them is right.
    assert [results[f"val_{name}_accuracy"] for name in ("majority", "bag_of_words")] == [0.5] * 2
