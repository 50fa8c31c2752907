"""Rows hold every token, are whole or refused, and are read in an order that does not depend on who reads."""

import functools
import itertools
import json
import shutil
from unittest import mock

import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from common.data import row_folders
from common.data import rows as rows_module
from common.data.byte_pairs import train_byte_pairs
from common.data.corpora import Corpus, open_corpus
from common.data.row_folders import holds_examples, keep_in, open_folder
from common.data.rows import RowBatches, corpus_rows, fingerprint, open_rows, text_rows, write_rows
from common.data.vocabulary import encode, train_wordpieces
from keras_replicas import UserError
from tests.conftest import files_in

pytestmark = pytest.mark.usefixtures("cache")
LENGTH = 40
kept_in = functools.partial(functools.partial, keep_in)  # in a folder
TEXTS = [np.arange(1, 4), np.arange(0), np.arange(4, 12), np.arange(12, 13)]


@pytest.fixture(scope="module")
def corpus(wikitext):
    """A few articles of each split."""
    splits = {split: list(texts())[:3] for split, texts in open_corpus(str(wikitext)).splits.items()}
    return Corpus({split: functools.partial(iter, texts) for split, texts in splits.items()}, "a few articles")


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_wordpieces(corpus.splits["train"], corpus.fingerprint, 300)


def in_shards_of(rows, monkeypatch, length=LENGTH):
    monkeypatch.setattr(rows_module, "SHARD_BYTES", rows * (16 + 4 * (1 + length)) + 3)


def written(folder, rows, tokenizer, length=LENGTH):
    write_rows(folder, {"train": rows, "validation": [np.array([1])], "test": []}, length, tokenizer, {"a": 1})
    return open_rows(folder)


def rows_of(numbers, seed=0):
    """Rows of these numbers of ids."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 300, number).astype(np.int32) for number in numbers]


def read(rows, examples, **options):
    return [part.numpy() for part in rows.read(tf.constant(examples, tf.int64), **options)]


@pytest.mark.parametrize("number", [1, 4, 5, 9])
def test_a_row_has_the_ids_that_were_written_whichever_shard_it_is_in(number, tokenizer, tmp_path, monkeypatch):
    in_shards_of(4, monkeypatch)
    given = rows_of(np.arange(number) * 7 % LENGTH + 1)
    splits = written(tmp_path / "rows", given, tokenizer)
    rows = splits["train"]
    assert [*splits] == ["train", "validation"] and len(rows) == number and rows.length == LENGTH
    assert len(list(tmp_path.glob("rows/train-*.tfrecord"))) == -(-number // 4)
    order = [*reversed(range(number)), -1, 0]
    ids, is_token, is_label = read(rows, order)
    assert ids.shape == (number + 2, LENGTH) and ids.dtype == np.int32 and (is_token == is_label).all()
    for example, row, tokens in zip(order, ids, is_token, strict=True):
        expected = given[example] if example >= 0 else []
        assert row[tokens].tolist() == list(expected) and (row[~tokens] == 0).all()
        assert tokens[: len(expected)].all()
    assert rows.counts(300).tolist() == np.bincount(np.concatenate(given), minlength=300).tolist()


def test_any_reader_of_tfrecords_reads_the_shards(tokenizer, tmp_path, monkeypatch):
    in_shards_of(2, monkeypatch)
    given = rows_of([3, 40, 7])
    written(tmp_path, given, tokenizer)
    paths = [str(path) for path in sorted(tmp_path.glob("train-*.tfrecord"))]
    records = [np.frombuffer(record.numpy(), np.int32) for record in tf.data.TFRecordDataset(paths)]
    assert [record[0] for record in records] == [3, 40, 7]
    for record, row in zip(records, given, strict=True):
        assert record[1:].tolist() == [*row, *[-1] * (LENGTH - len(row))]


@pytest.mark.parametrize(("longest", "length"), [(1, 32), (32, 32), (33, 64), (65, 70), (70, 70)])
def test_padding_is_cut_to_a_multiple_of_32(longest, length, tokenizer, tmp_path):
    rows = written(tmp_path, rows_of([longest, 1, 70]), tokenizer, 70)["train"]
    whole, trimmed = read(rows, [1, -1, 0]), read(rows, [1, -1, 0], trim=True)
    assert trimmed[0].shape == (3, length)
    for all_, cut in zip(whole, trimmed, strict=True):
        np.testing.assert_array_equal(all_[:, :length], cut)
    assert read(rows, [-1, -1], trim=True)[0].shape == (2, 32)  # of a replica without examples


def test_a_split_without_rows_is_refused_unless_it_is_the_test_split(tokenizer, tmp_path):
    for split in ("train", "validation"):
        with pytest.raises(UserError, match=f"no text is left for the split {split}: give more text"):
            write_rows(tmp_path, {"train": rows_of([3]), "validation": rows_of([3])} | {split: []}, 9, tokenizer, {})
    with pytest.raises(UserError, match="has no rows of text"):
        open_rows(tmp_path)


def test_the_texts_are_one_row_that_is_cut():
    around = [*text_rows(TEXTS, 8, before=(90,), after=(91, 92))]
    assert np.concatenate(around).tolist() == [90, 1, 2, 3, 91, 92, 90, *range(4, 12), 91, 92, 90, 12, 91, 92]
    assert [len(row) for row in around] == [8, 8, 5]


@pytest.mark.parametrize("total", [1, 2, 5, 8, 9, 70_000, 140_001])
@pytest.mark.parametrize(("length", "overlap"), [(5, 1), (64, 0), (64, 3)])
def test_every_token_is_in_a_row_once_but_for_the_overlap(length, overlap, total):
    ids = np.arange(total, dtype=np.int32)
    rows = [*text_rows(np.array_split(ids, max(total // 1000, 1)), length, overlap=overlap)]
    assert all(len(row) == length for row in rows[:-1]) and all(len(row) > overlap for row in rows)
    for row, following in zip(rows, rows[1:], strict=False):
        assert row[len(row) - overlap :].tolist() == following[:overlap].tolist()
    if total > overlap:  # else nothing follows the overlap
        assert np.concatenate([rows[0][:overlap], *(row[overlap:] for row in rows)]).tolist() == ids.tolist()


@pytest.mark.parametrize("train", [train_wordpieces, train_byte_pairs])
def test_the_rows_of_a_corpus_hold_every_token(train, corpus):
    tokenizer = train(corpus.splits["train"], corpus.fingerprint, 300)
    end = tokenizer.end_token_id
    splits = corpus_rows(corpus, tokenizer, LENGTH, after=(end,))
    assert [*splits] == ["train", "validation", "test"]
    for split, rows in splits.items():
        ids, is_token, _ = read(rows, np.arange(len(rows)))
        expected = [number for text in encode(corpus.splits[split](), tokenizer) for number in [*text, end]]
        assert ids[is_token].tolist() == expected and is_token[:-1].all()


def test_without_packing_each_line_is_a_row(corpus, tokenizer, capsys):
    lines = [line for text in corpus.splits["validation"]() for line in text.splitlines()]
    blank = Corpus(dict.fromkeys(corpus.splits, lambda: iter(["\n \n".join(lines)])), "with blank lines")
    rows = corpus_rows(blank, tokenizer, 9, pack=False, after=(3,))["validation"]
    ids, is_token, _ = read(rows, np.arange(len(rows)))
    for row, tokens, expected in zip(ids, is_token, encode(lines, tokenizer), strict=True):
        assert row[tokens].tolist() == expected[:9].tolist()
    assert rows.not_seen["unknown_fraction"] == np.mean(np.concatenate([*encode(lines, tokenizer)]) == 1) > 0
    assert f"validation has {is_token.sum()} tokens: too few" in capsys.readouterr().out


def test_rows_come_from_the_cache_the_second_time(corpus, tokenizer, monkeypatch, cache):
    first = corpus_rows(corpus, tokenizer, LENGTH)
    monkeypatch.setattr(rows_module, "encode", None)
    again = train_wordpieces(corpus.splits["train"], corpus.fingerprint, 300)  # another instance
    assert corpus_rows(corpus, again, LENGTH)["train"].checksum == first["train"].checksum
    for changed in ({"length": 41}, {"overlap": 1}, {"after": (3,)}, {"before": (2,)}, {"pack": False}):
        with pytest.raises(TypeError):
            corpus_rows(corpus, again, **{"length": LENGTH} | changed)
    with pytest.raises(TypeError):
        corpus_rows(Corpus(corpus.splits, "another"), again, LENGTH)
    assert len(list(cache.glob("*-rows"))) == 1


def test_a_fingerprint_is_of_what_determines_the_ids(corpus, tokenizer):
    again = train_wordpieces(corpus.splits["train"], corpus.fingerprint, 300)
    other = train_wordpieces(corpus.splits["train"], corpus.fingerprint, 299)
    pairs = train_byte_pairs(corpus.splits["train"], corpus.fingerprint, 300)
    cased = type(tokenizer)(tokenizer.get_vocabulary(), lowercase=False)
    assert fingerprint(again) == fingerprint(tokenizer)
    assert len({fingerprint(each) for each in (tokenizer, other, pairs, cased)}) == 4
    before, config = fingerprint(pairs), pairs.get_config()  # whose special tokens are in the order of a set
    assert len(config["unsplittable_tokens"]) > 1
    config["unsplittable_tokens"].reverse()
    pairs.get_config = lambda: config
    assert fingerprint(pairs) == before


@pytest.mark.parametrize("remote", [False, True])
def test_a_folder_of_rows_is_kept_and_refused_for_others(remote, corpus, tokenizer, tmp_path, monkeypatch, cache):
    folder = ("file://" if remote else "") + str(tmp_path / "data[1]/deeper/")
    made = corpus_rows(corpus, tokenizer, LENGTH, keep=kept_in(folder))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "data[1]").rglob("*")}
    assert (manifest := tmp_path / "data[1]/deeper/manifest.json") in files
    for path in cache.glob("*-rows"):
        shutil.rmtree(path)
    monkeypatch.setattr(rows_module, "encode", None)
    opened, again = open_folder(folder)
    for found in (corpus_rows(corpus, tokenizer, LENGTH, keep=kept_in(folder)), opened):
        assert {split: rows.checksum for split, rows in found.items()} == {s: rows.checksum for s, rows in made.items()}
        np.testing.assert_array_equal(read(found["train"], [0, 5])[0], read(made["train"], [0, 5])[0])
    assert fingerprint(again) == fingerprint(tokenizer)
    with pytest.raises(UserError, match="has rows of another corpus, tokenizer or length: give another folder"):
        corpus_rows(corpus, tokenizer, LENGTH + 1, keep=kept_in(folder))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data[1]").rglob("*")} == files
    manifest.write_text(manifest.read_text() + "\n")
    open_folder(folder)
    assert len(list(cache.glob("*-rows"))) == 2 * remote  # copies of the remote one, before and after this change


def test_a_folder_that_was_not_finished_is_written_anew(corpus, tokenizer, tmp_path, monkeypatch):
    whole, half = tmp_path / "whole", tmp_path / "half"
    copy = mock.Mock(wraps=tf.io.gfile.copy)
    monkeypatch.setattr(tf.io.gfile, "copy", copy)
    corpus_rows(corpus, tokenizer, LENGTH, keep=kept_in(str(whole)))
    assert copy.call_args.args[1] == str(whole / "manifest.json")  # without it, the folder is not finished
    (half / "tokenizer").mkdir(parents=True)
    (half / "train-00000.tfrecord").write_bytes(b"half")
    corpus_rows(corpus, tokenizer, LENGTH, keep=kept_in(str(half)))
    assert files_in(half) == files_in(whole)


@pytest.mark.parametrize("name", ["notes.txt", "vocab.txt", "manifest.json"])
def test_a_folder_of_other_files_is_not_written_to(name, corpus, tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    for each in (name, "train-00000.tfrecord"):
        (tmp_path / "data" / each).write_text('["mine"]')
    with pytest.raises(UserError, match="data (holds|has rows of another)"):
        corpus_rows(corpus, tokenizer, LENGTH, keep=kept_in(str(tmp_path / "data")))
    with pytest.raises(UserError, match="data has no rows of text"):
        open_folder(str(tmp_path / "data"))
    assert {path.read_text() for path in (tmp_path / "data").iterdir()} == {'["mine"]'}


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "gone", "manifest", "tokenizer"])
def test_a_damaged_folder_is_refused(damage, tokenizer, tmp_path):
    folder = tmp_path / "rows"
    written(folder, rows_of([40, 7]), tokenizer)
    shard = folder / "train-00000.tfrecord"
    content = shard.read_bytes()
    damaged = {"cut": content[:-180], "changed": content[:-99] + b"x" + content[-98:], "empty": b""}
    if damage in damaged:
        shard.write_bytes(damaged[damage])
    elif damage == "tokenizer":
        (folder / "tokenizer/tokenizer.json").write_text("{")
    else:
        (shard if damage == "gone" else folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="damaged: remove the folder|has no (rows|tokenizer|manifest)"):
        open_folder(str(folder))


def test_a_file_system_that_does_not_answer_is_told_of(corpus, tokenizer):
    for use in (open_folder, lambda folder: corpus_rows(corpus, tokenizer, LENGTH, keep=kept_in(folder))):
        with pytest.raises(UserError, match="^cannot use s3://bucket/rows .File system scheme 's3' not im"):
            use("s3://bucket/rows")
    with pytest.raises(UserError, match="^cannot use /proc/rows .*: give another folder"):
        corpus_rows(corpus, tokenizer, LENGTH, keep=kept_in("/proc/rows"))


def test_progress_is_shown_if_it_takes_long(tokenizer, tmp_path, monkeypatch, capfd):
    written(tmp_path / "quick", rows_of([3] * 4), tokenizer)
    assert "tokens of" not in capfd.readouterr().err
    monkeypatch.setattr("tqdm.std.time", itertools.count(0, 2).__next__)  # a clock, on which all takes 2 seconds
    written(tmp_path / "slow", rows_of([3] * 4), tokenizer)
    err = capfd.readouterr().err
    assert "tokens of train: " in err and "rows" in err


def test_the_order_is_the_same_for_any_number_of_replicas_and_begins_anywhere(tokenizer, tmp_path):
    rows = written(tmp_path, rows_of([5] * 20), tokenizer)["train"]

    def steps(first=0, replicas=1, **changes):
        """The examples of four steps, whichever replica has them."""
        batches = RowBatches(rows, lambda _, examples: examples, 6, **{"shuffle": True, "seed": 3} | changes)
        found = batches.iter_from_step(first, tf.distribute.InputContext(1, 0, replicas)).take(4 * replicas)
        return [sorted(step) for step in np.reshape([*found], [4, -1])]

    whole = steps()
    assert sorted(sum(whole, [])) == [*[-1] * 4, *range(20)]
    for first, replicas in itertools.product((0, 1, 5), (2, 3)):
        assert steps(first, replicas) == steps(first)
    assert steps(1)[:3] == whole[1:] and whole not in (steps(4), steps(seed=4))
    assert steps(shuffle=False)[0] == [0, 1, 2, 3, 4, 5]


def test_workers_and_resumed_runs_are_told_apart_by_the_rows(tokenizer, tmp_path):
    def facts(name, given):
        rows = written(tmp_path / name, given, tokenizer)["train"]
        return RowBatches(rows, rows.read, 2, shuffle=True, seed=0).fingerprint()

    given = rows_of([5, 6, 7])
    other = [given[0], given[1], given[2][::-1]]
    assert facts("a", given) == facts("b", given) != facts("c", other)


def examples(folder, texts, tokenizer, name="input_ids", suffix=".tfrecord"):
    """Files as BERT's pipelines write them: [CLS], a text, [SEP], and padding."""
    folder.mkdir(parents=True)
    start, end, pad = tokenizer.start_token_id, tokenizer.end_token_id, tokenizer.pad_token_id
    kind = tf.io.TFRecordOptions("GZIP" if suffix.endswith(".gz") else "")
    for split, part in (("bert_train-0", texts[:5]), ("bert_train-1", texts[5:8]), ("pretraining_valid", texts[8:])):
        with tf.io.TFRecordWriter(str(folder / (split + suffix)), kind) as writer:
            for ids in part:
                feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[start, *ids, end, *[pad] * 9]))
                found = tf.train.Example(features=tf.train.Features(feature={name: feature}))
                writer.write(found.SerializeToString())


@pytest.mark.parametrize(
    ("kind", "name", "suffix"),
    [
        ("remote vocab.txt", "input_ids", ".tfrecord"),
        ("WordPiece", "token_ids", ".tfrecord-00000-of-00001.gz"),
        ("BPE", "token_ids", ".tfrecord"),
    ],
)
def test_shards_of_examples_are_converted_once(kind, name, suffix, corpus, tmp_path, monkeypatch, cache):
    train = train_byte_pairs if kind == "BPE" else train_wordpieces
    tokenizer, folder = train(corpus.splits["train"], corpus.fingerprint, 300), tmp_path / "data"
    lines = [line for text in corpus.splits["train"]() for line in text.splitlines()]
    texts = [ids[:20].tolist() for ids in encode(lines[:10], tokenizer)]
    texts[3] = []  # and no row
    examples(folder, texts, tokenizer, name, suffix)
    ids = {piece: number for number, piece in enumerate(tokenizer.get_vocabulary())}
    (folder / f"bert_train-1{suffix}").rename(folder / f"latest_train-1{suffix}")
    if kind == "remote vocab.txt":
        (folder / "vocab.txt").write_text("\n".join(ids) + "\n")
        for path in folder.iterdir():
            tf.io.gfile.copy(str(path), f"ram://examples/{path.name}")
        folder = "ram://examples/"
    else:
        merges = {"merges": [pair.split() for pair in tokenizer.merges]} if kind == "BPE" else {}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": kind, "vocab": ids} | merges}))
    assert holds_examples(str(folder))
    with pytest.raises(UserError, match="have 20 tokens, not 19: take longer sequences"):
        open_folder(str(folder), 19)
    splits, again = open_folder(str(folder), 20)
    assert [*splits] == ["train", "validation"]
    for split, expected in (("train", [*filter(None, texts[:8])]), ("validation", texts[8:])):
        found, is_token, _ = read(splits[split], np.arange(len(splits[split])))
        assert [row[tokens].tolist() for row, tokens in zip(found, is_token, strict=True)] == expected
    assert splits["train"].length == max(map(len, texts))
    assert type(again) is type(tokenizer) and again(["the licence"]) == tokenizer(["the licence"])
    monkeypatch.setattr(row_folders, "write_rows", None)
    assert open_folder(str(folder))[0]["train"].checksum == splits["train"].checksum
    assert len(list(cache.glob("*-rows"))) == 1
    if kind != "remote vocab.txt":  # a shard is known by its time, a tokenizer by its content
        path = folder / ("tokenizer.json" if kind == "BPE" else f"latest_train-1{suffix}")
        path.write_bytes(path.read_bytes().replace(b'["e", "r"], ', b""))
        shutil.copystat(__file__, path)
        with pytest.raises(TypeError):
            open_folder(str(folder))


def test_padding_that_is_a_token_of_text_is_told(tmp_path, capsys, cache):
    vocabulary, merges = {"!": 0, "a": 1, "<|endoftext|>": 2, "aa": 3}, ["a a"]
    examples(tmp_path / "data", [[1, 0]] * 10, keras_hub.models.GPT2Tokenizer(vocabulary, merges))
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    (tmp_path / "data/tokenizer.json").write_text(json.dumps({"model": model}))
    assert open_folder(str(tmp_path / "data"))[0]["train"].length == 2
    assert "bert_train-0.tfrecord has texts that end in '!': it is left out, as padding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("no tokenizer", "data has no manifest.json of rows, and neither vocab.txt nor tokenizer.json of examples"),
        ("tokenizer", r"tokenizer.json is no tokenizer of BERT, RoBERTa or GPT-2 \('model'\)"),
        ("validation", r"has no rows of text, and no \*train\*.tfrecord\* with \*valid\*"),
        ("ids", "have no ids, or ids that their tokenizer lacks"),
        ("negative", "have no ids, or ids that their tokenizer lacks"),
        ("feature", "have no ids, or ids that their tokenizer lacks"),
        ("record", "cannot use .*data .*: give another folder"),
        ("torn", "cannot use .*data .*ended before.*: give another folder"),
        ("both", "has examples with both token_ids and input_ids: keep one of them"),
        ("gap", "its 300 tokens do not have the ids 0 to 299"),
    ],
)
def test_what_is_wrong_with_examples_is_told(wrong, told, tokenizer, tmp_path):
    folder = tmp_path / "data"
    texts = [[299, {"ids": 300, "negative": -7}.get(wrong, 5)]] * 10
    examples(
        folder, texts, tokenizer, "ids" if wrong == "feature" else "input_ids", ".tfrecord" + ".gz" * (wrong == "torn")
    )
    if wrong == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    elif wrong == "gap":
        ids = {piece: number + (number > 9) for number, piece in enumerate(tokenizer.get_vocabulary())}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordPiece", "vocab": ids}}))
    elif wrong != "no tokenizer":
        (folder / "vocab.txt").write_text("\n".join(tokenizer.get_vocabulary()))
    if wrong == "validation":
        (folder / "pretraining_valid.tfrecord").unlink()
    if wrong == "record":
        (folder / "pretraining_valid.tfrecord").write_bytes(b"no record" * 9)
    if wrong == "torn":
        (torn := folder / "bert_train-0.tfrecord.gz").write_bytes(torn.read_bytes()[:-20])
    if wrong == "both":
        ids = tf.train.Feature(int64_list=tf.train.Int64List(value=[5, 6]))
        found = tf.train.Example(features=tf.train.Features(feature={"input_ids": ids, "token_ids": ids}))
        with tf.io.TFRecordWriter(str(folder / "bert_train-0.tfrecord")) as writer:
            writer.write(found.SerializeToString())
    with pytest.raises(UserError, match=told):
        open_folder(str(folder))
