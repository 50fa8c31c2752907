"""Encoded examples: what a batch holds, for every family of models, and which examples come when."""

import io

import keras
import keras_hub
import numpy as np
import pytest
import sentencepiece
import tensorflow as tf

from common.data.byte_pairs import train_byte_pairs
from common.data.examples import EncodedTexts
from common.data.labelled import Examples, LabelledTexts
from keras_replicas import data_parallel, make_strategy

HUB = keras_hub.models
WORDS = ["the", "a", "cat", "dog", "sees", "hears", "old", "young", "and"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"[unused{n}]" for n in range(2**15)), *WORDS]  # large ids


def sentences(count, longest, seed=0):
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(longest))) for _ in range(count)]


def sentence_pieces(texts, size, *special, **options):
    """The content of a vocabulary's file; the special tokens are for padding, unknown, start and end."""
    model, names = io.BytesIO(), ("pad", "unk", "bos", "eos")
    options |= {f"{name}_id": number for number, name in enumerate(names)}
    options |= {f"{name}_piece": piece for name, piece in zip(names, special, strict=True)}
    options |= {"vocab_size": size, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **options)
    return model.getvalue()


def tokenizer_of(family):
    if family == "Roberta":
        return train_byte_pairs(lambda: iter(sentences(99, 9)), "examples", 280)
    if family in ("Bert", "DistilBert"):
        return getattr(HUB, f"{family}Tokenizer")(PIECES, lowercase=True)
    padding = ("<pad>", "<unk>") if family == "Albert" else ("[PAD]", "[UNK]")
    pieces = sentence_pieces(sentences(99, 9), 40, *padding, "[CLS]", "[SEP]", user_defined_symbols="[MASK]")
    return getattr(HUB, f"{family}Tokenizer")(pieces)


def encoded(texts, length, labels=None, classes=("no", "yes"), family="Bert"):
    texts = [(text,) if isinstance(text, str) else text for text in texts]
    splits = {"train": Examples(texts, labels, [""] * len(texts))}
    preprocessor = getattr(HUB, f"{family}TextClassifierPreprocessor")(tokenizer_of(family), sequence_length=length)
    return EncodedTexts(LabelledTexts(list(classes), splits), preprocessor)


def parts(batches, step=0, count=None, replicas=1):
    """For each step, each replica's part, which reads alone."""
    contexts = [tf.distribute.InputContext(replicas, i, replicas) for i in range(replicas)]
    read = [batches.iter_from_step(step, context).take(count or len(batches)) for context in contexts]
    return list(zip(*read, strict=True))


def labels_of(step):
    """The labels of a step's examples; here each example's number."""
    return np.concatenate([y[weight == 1] for _, y, weight in step]).tolist()


def test_what_the_model_sees_of_each_text_has_no_padding():
    first, second = encoded([("the cat", "a dog"), ("the cat", "a dog " * 20)], 8).seen("train")
    ids = {piece: number for number, piece in enumerate(PIECES)}
    start, end, *words = (ids[piece] for piece in ("[CLS]", "[SEP]", "the", "cat", "a", "dog"))
    assert first == [[start, *words[:2], end], [*words[2:], end]]
    assert second == [[start, *words[:2], end], [*words[2:], words[2], end]]


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "Albert", "DebertaV3"])
def test_inputs_are_what_the_preprocessor_makes(family, columns):
    texts = [*zip(*(sentences(40, 30, seed) for seed in range(columns)), strict=True)]
    texts.append(("the old <pad> cat",) * columns)
    data = encoded(texts, 24, family=family)
    theirs = data.preprocessor(x=tuple(map(list, zip(*texts, strict=True))))
    assert data.inputs["train"].keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(data.inputs["train"][name], np.asarray(values), err_msg=name)
    ((x,),) = parts(data.batches("train", 41))[0]
    assert x.keys() == theirs.keys() and all(values.dtype == tf.int32 for values in x.values())
    np.testing.assert_array_equal(x["token_ids"], theirs["token_ids"])


@pytest.mark.parametrize(("multiple", "lengths"), [(1, [11, 33, 92]), (8, [16, 40, 96])])  # on CPUs, on GPUs
def test_a_part_is_as_long_as_the_batchs_longest_example(multiple, lengths, monkeypatch):
    monkeypatch.setattr("common.data.examples.MULTIPLE", multiple)
    steps = parts(encoded(["cat " * n for n in (1, 9, 30, 31, 90, 2)], 120, [0] * 6).batches("train", 2), replicas=2)
    assert [[x["token_ids"].shape[1] for x, _, _ in step] for step in steps] == [[length] * 2 for length in lengths]


def test_a_gap_in_the_mask_is_a_part_of_the_text():
    """As the literal name of RoBERTa's padding leaves one."""
    data = encoded(["<pad> " * 40 + "cat"], 99, family="Roberta")
    assert data.inputs["train"]["token_ids"][0].tolist().count(1) > 40
    ((x,),) = parts(data.batches("train", 1))[0]
    assert x["padding_mask"].numpy().sum() == data.inputs["train"]["padding_mask"].sum()


@pytest.mark.parametrize(("columns", "least"), [(1, 3), (2, 5)])
def test_a_length_without_room_for_a_token_of_each_text_is_refused(columns, least):
    texts = [("cat dog",) * columns]
    with pytest.raises(ValueError, match=f"needs {least} tokens or more"):
        encoded(texts, least - 1)
    assert encoded(texts, least).inputs["train"]["padding_mask"].sum() == least


@pytest.mark.parametrize(("number", "batch", "replicas"), [(30, 8, 1), (30, 8, 2), (30, 7, 2), (30, 6, 4), (5, 2, 4)])
def test_each_epoch_has_every_example_once_alike_for_any_replicas_and_from_any_step(number, batch, replicas):
    data = encoded(sentences(number, 40), 64, [*range(number)])
    batches = data.batches("train", batch, shuffle_seed=7)
    steps = len(batches)
    whole = [labels_of(step) for step in parts(batches, 0, 2 * steps)]
    assert steps == -(-number // batch) and all(whole)
    first, second = sum(whole[:steps], []), sum(whole[steps:], [])
    assert sorted(first) == sorted(second) == [*range(number)] and first != second
    assert whole != [labels_of(step) for step in parts(data.batches("train", batch, 8), 0, 2 * steps)]
    for start in (1, steps + 1):  # in the middle of each epoch
        divided = parts(batches, start, 2 * steps - start, replicas)
        assert [sorted(labels_of(step)) for step in divided] == [sorted(step) for step in whole[start:]]
    for x, y, weight in [part for step in divided for part in step]:
        assert len(y) == -(-batch // replicas)
        ids = data.inputs["train"]["token_ids"][y.numpy()][:, : x["token_ids"].shape[1]]
        np.testing.assert_array_equal(x["token_ids"], ids * (weight.numpy() == 1)[:, None])
        assert not x["padding_mask"].numpy()[weight == 0].any()


def test_similar_lengths_share_a_batch_in_a_random_order_with_other_company_in_each_epoch():
    """Some 200 batches of lengths as of real sentences."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(3, 0.6, 3201).astype(int) + 3, 128)
    batches = encoded(["cat " * (length - 2) for length in lengths], 128).batches("train", 16, 0)
    epochs = [[row[row >= 0] for row in batches._steps(tf.constant(n, tf.int64)).numpy()] for n in range(2)]
    assert 1 - lengths.sum() / sum(lengths[step].max() * len(step) for step in epochs[0]) < 0.06
    means = [[lengths[step].mean() for step in epoch] for epoch in epochs]
    assert np.abs(np.corrcoef([*means, np.arange(201)]) - np.eye(3)).max() < 0.3
    pairs = [{(a, b) for step in epoch for a in step for b in step if a < b} for epoch in epochs]
    assert len(pairs[0] & pairs[1]) / len(pairs[0]) < 0.25


def test_predict_gives_a_row_for_each_example_in_the_splits_order():
    """With 8 in a batch, the last one leaves a replica without examples; 7 are not the same for each."""
    data = encoded(sentences(33, 70), 64, [0, 1] * 16 + [1])
    keras.utils.set_random_seed(0)
    size = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8, "max_sequence_length": 64}
    plain = HUB.BertTextClassifier(HUB.BertBackbone(len(PIECES), **size), 2, preprocessor=None)
    expected = plain({name: values.astype("int32") for name, values in data.inputs["train"].items()})
    for replicas, batch in ((1, 8), (2, 8), (2, 7)):
        with make_strategy(replicas).scope():
            model = data_parallel(keras.models.clone_model(plain))
        model.set_weights(plain.get_weights())
        for seed in (None, 5):
            found = model.predict(data.batches("train", batch, seed), verbose=0)
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_workers_with_other_texts_or_labels_are_told_apart_and_numbers_are_labels():
    facts = []
    for text, label in [("cat", 0.5), ("cat", 0.25), ("old cat", 0.5), ("cat", 0.5)]:
        batches = encoded([text, "dog"], 8, [label, 1], classes=()).batches("train", 4)
        facts.append(str(batches.fingerprint()))
    assert len({*facts}) == 3 and facts[0] == facts[3]
    ((_, y, weight),) = parts(batches)[0]
    assert y.dtype.is_floating and y.numpy().tolist() == [0.5, 1] and weight.numpy().tolist() == [1, 1]
