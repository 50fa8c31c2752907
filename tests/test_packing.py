import numpy as np
import pytest
import tensorflow as tf

from common.data.packing import count_tokens, make_sequences, read_sequences
from common.data.wordpiece import WordPieces, train_wordpieces

DOCUMENTS = ["One fish, two fish.\nRed fish, blue fish.", "", "Black fish.", "Old fish " * 40]
VOCABULARY = train_wordpieces(lambda: DOCUMENTS, 100)
TOKENIZER = VOCABULARY.tokenizer()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, CLS, SEP = (TOKENIZER.token_to_id(token) for token in ("[PAD]", "[CLS]", "[SEP]"))


def test_packing_loses_no_token_and_pads_the_last_sequence_only():
    sequences = make_sequences(lambda: iter(DOCUMENTS), VOCABULARY, seq_length=16, pack=True).numpy()
    assert (sequences[:, 0] == CLS).all()
    assert (sequences[:-1, -1] == SEP).all()
    last = sequences[-1][sequences[-1] != PAD]
    assert last[-1] == SEP and (sequences[:-1] != PAD).all()
    body = np.concatenate([sequences[:-1, 1:-1].ravel(), last[1:-1]])
    texts = [TOKENIZER.encode(document, add_special_tokens=False).ids for document in DOCUMENTS if document]
    assert body.tolist() == [token for text in texts for token in [*text, SEP]]


def test_one_line_a_sequence():
    sequences = make_sequences(lambda: iter(DOCUMENTS), VOCABULARY, seq_length=16, pack=False).numpy()
    lines = [line for document in DOCUMENTS for line in document.splitlines()]
    for row, line in zip(sequences, lines, strict=True):
        ids = TOKENIZER.encode(line, add_special_tokens=False).ids[:14]
        assert row[row != PAD].tolist() == [CLS, *ids, SEP]


def test_sequences_come_from_the_cache_the_second_time(monkeypatch):
    arguments = {"vocabulary": VOCABULARY, "seq_length": 8, "pack": True}
    first = make_sequences(lambda: iter(["fish"] * 9), **arguments).numpy()
    monkeypatch.setattr("common.data.packing._packed", None)
    assert (make_sequences(lambda: iter(["fish"] * 9), **arguments).numpy() == first).all()
    with pytest.raises(TypeError):
        make_sequences(lambda: iter(["fish"] * 10), **arguments)


def test_reading_fills_and_trims():
    sequences = np.zeros((3, 128), np.uint16)
    sequences[0, :20], sequences[1, :40], sequences[2, :128] = 7, 8, 9
    sequences = tf.constant(sequences)
    ids = read_sequences(sequences, tf.constant([1, 0, -1], tf.int64), pad_id=0, trim=True)
    assert ids.shape == (3, 64) and np.count_nonzero(ids, axis=1).tolist() == [40, 20, 0]
    assert read_sequences(sequences, tf.constant([0], tf.int64), pad_id=0, trim=False).shape == (1, 128)
    assert read_sequences(sequences, tf.constant([2], tf.int64), pad_id=0, trim=True).shape == (1, 128)


@pytest.mark.parametrize(
    ("longest", "length"),
    [(1, 32), (32, 32), (33, 64), (65, 128), (128, 128), (129, 256), (257, 512), (512, 512), (513, 600)],
)
def test_padding_is_cut_to_the_next_bucket(longest, length):
    sequences = np.zeros((2, 600), np.uint16)
    sequences[0, :longest], sequences[1, 0] = 7, 7
    ids = read_sequences(tf.constant(sequences), tf.constant([0, 1], tf.int64), pad_id=0, trim=True)
    assert ids.shape == (2, length)


def test_tokens_are_counted_without_padding():
    splits = {"train": tf.constant([[1, 2, 0], [3, 0, 0]]), "validation": tf.constant([[5, 5, 5]])}
    vocabulary = WordPieces([*WordPieces.special, "a"], lowercase=True, strip_accents=True)
    assert count_tokens(splits, vocabulary) == {"train": (2, 3), "validation": (1, 3)}


@pytest.mark.parametrize(("pieces", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.int32)])
def test_ids_take_two_bytes_where_they_fit(pieces, dtype):
    words = [chr(ord("a") + i % 26) + str(i) for i in range(pieces - len(SPECIAL))]
    vocabulary = WordPieces([*SPECIAL, *words], lowercase=True, strip_accents=True)
    sequences = make_sequences(lambda: iter([words[-1]]), vocabulary, seq_length=3, pack=False).numpy()
    assert sequences.dtype == dtype and sequences[0, 1] == pieces - 1
