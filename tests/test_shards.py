"""Shards hold every token, are whole or absent, and are read in an order that depends on nobody who reads."""

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from common.data import shard_reader, shard_writer
from common.data import tokens as tokens_module
from common.data.byte_pairs import train_byte_pairs
from common.data.corpora import open_corpus
from common.data.shard_reader import decode_sequences, read_shards, steps_in_shards
from common.data.shard_writer import write_shards
from common.data.shards import Shards, find_shards, fingerprint, open_shards
from common.data.tokens import write_tokens
from common.data.wordpiece import train_wordpieces
from keras_replicas.errors import UserError
from tests.conftest import ROOT

MADE_FROM = {"corpus": "hash", "seq_length": 16}


@pytest.fixture(scope="module")
def corpus(wikitext):
    return open_corpus(str(wikitext))


@pytest.fixture(scope="module")
def vocabulary(corpus):
    return train_wordpieces(corpus["train"], 300)


@pytest.fixture(scope="module")
def written(corpus, vocabulary, tmp_path_factory):
    """Shards from blocks of a few documents each, so that there are many."""
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "BLOCK", 30_000)
        write_shards(corpus, vocabulary, 16, 6, str(folder / "data"), str(folder / "scratch"), MADE_FROM)
    assert not (folder / "scratch").exists()
    return open_shards(str(folder / "data"))


def ids_of(written, split, seq_length=16):
    records = [
        record
        for shard in written.files(split)
        for record in tf.data.TFRecordDataset(f"{written.folder}/{shard['file']}")
    ]
    return decode_sequences(tf.stack(records), seq_length, 0).numpy()


@pytest.mark.parametrize("train", [train_wordpieces, train_byte_pairs])
def test_shards_hold_every_token_in_order(train, written, corpus, tmp_path):
    vocabulary = train(corpus["train"], 300)
    if train is train_byte_pairs:
        write_shards(corpus, vocabulary, 16, 6, str(tmp_path / "data"), str(tmp_path / "scratch"), MADE_FROM)
        written = open_shards(str(tmp_path / "data"))
    assert written.vocabulary == vocabulary
    tokenizer, special = vocabulary.tokenizer(), vocabulary.special
    start, end = (vocabulary.pieces.index(piece) for piece in (special.start, special.end))
    for split, documents in corpus.items():
        counted = written.manifest["splits"][split]
        texts = [tokenizer.encode(document, add_special_tokens=False).ids for document in documents()]
        row = [token for text in texts for token in [*text, end]]
        ids = ids_of(written, split)
        assert (ids[:, 0] == start).all() and (ids[:, -1] == end).all()
        assert ids[:, 1:-1].ravel().tolist() == row[: len(ids) * 14]
        assert (counted["documents"], counted["tokens"]) == (len(texts), len(row) - len(texts))
        assert counted["tokens"] + counted["documents"] == counted["sequences"] * 14 + counted["dropped_tokens"]
        assert 0 <= counted["dropped_tokens"] < 14 and len(ids) == counted["sequences"]
        if split == "train":
            assert written.token_counts().tolist() == np.bincount(row, minlength=len(vocabulary.pieces)).tolist()
    for shard in written.files("train"):
        index, count, sequences = shard["file"].removesuffix(".tfrecord").split("-", 1)[1].replace("of-", "").split("-")
        assert int(index) < int(count) == 6 and int(sequences) == shard["sequences"]


def test_written_again_it_is_the_same_and_complete_it_is_not_touched(
    written, corpus, vocabulary, tmp_path, monkeypatch
):
    """With blocks of another size, in other processes, and after a death between two shards."""
    data, scratch = str(tmp_path / "data"), str(tmp_path / "scratch")
    arguments = (corpus, vocabulary, 16, 6, data, scratch, MADE_FROM)

    def die(path, sequences):
        if "train-00003" in path:
            raise KeyboardInterrupt
        really_write(path, sequences)

    really_write = shard_writer._write_records
    monkeypatch.setattr(shard_writer, "_write_records", die)
    with pytest.raises(KeyboardInterrupt):
        write_shards(*arguments)
    assert find_shards(data, MADE_FROM) is None and len(list(Path(data).glob("*.tfrecord"))) == 3
    monkeypatch.undo()
    monkeypatch.setattr(tokens_module, "_in_a_process", None)  # what was tokenised before is kept
    with pytest.raises(TypeError):  # but not validation, which had not begun
        write_shards(*arguments)
    assert len(list(Path(data).glob("*.tfrecord"))) == 6
    monkeypatch.undo()
    write_shards(*arguments)
    theirs = Path(written.folder)
    assert {path.name: path.read_bytes() for path in Path(data).iterdir()} == {
        path.name: path.read_bytes() for path in theirs.iterdir()
    }
    assert find_shards(data, MADE_FROM).manifest == written.manifest


def cut_first_shard(data):
    shard = min(data.glob("train-00000-*"))
    records = list(tf.data.TFRecordDataset(str(shard)))
    with tf.io.TFRecordWriter(str(shard)) as writer:  # at the end of a record
        for record in records[:-1]:
            writer.write(record.numpy())


@pytest.mark.parametrize("complete", [True, False])
def test_a_shard_that_a_power_cut_damaged_is_written_again(complete, written, corpus, vocabulary, tmp_path):
    """A file may then be empty, cut or have other bytes; in a complete folder, it is empty or not there."""
    data = tmp_path / "data"
    shutil.copytree(written.folder, data)
    whole = {path.name: path.read_bytes() for path in data.iterdir()}
    empty, gone, cut, changed = sorted(data.glob("train-*.tfrecord"))[1:5]
    empty.write_bytes(b"")
    gone.unlink()
    if not complete:
        cut_first_shard(data)
        cut.write_bytes(cut.read_bytes()[:-5])
        changed.write_bytes(changed.read_bytes()[:-9] + b"x" + changed.read_bytes()[-8:])
        begun = {name: value for name, value in written.manifest.items() if name != "splits"}
        (data / "manifest.json").write_text(json.dumps(begun))
    write_shards(corpus, vocabulary, 16, 6, str(data), str(tmp_path / "scratch"), MADE_FROM)
    assert {path.name: path.read_bytes() for path in data.iterdir()} == whole


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "other", "no array"])
def test_token_counts_that_are_damaged_are_written_again(damage, written, corpus, vocabulary, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(written.folder, data)
    counts = data / "train-counts.npy"
    whole = counts.read_bytes()
    damaged = {"empty": b"", "cut": whole[:-8], "other": whole[:-8] + b"12345678", "no array": b"counts"}
    counts.write_bytes(damaged[damage]) if damage in damaged else counts.unlink()
    assert find_shards(str(data), MADE_FROM) is None
    if damage == "gone":  # the others are written as it is
        write_shards(corpus, vocabulary, 16, 6, str(data), str(tmp_path / "scratch"), MADE_FROM)
        assert counts.read_bytes() == whole and find_shards(str(data), MADE_FROM)


def test_a_test_split_of_less_than_a_sequence_is_left_out(corpus, vocabulary, tmp_path, capsys):
    few = corpus | {"test": lambda: iter(["one two"])}
    write_shards(few, vocabulary, 16, 6, str(tmp_path / "data"), str(tmp_path / "scratch"), MADE_FROM)
    assert list(find_shards(str(tmp_path / "data"), MADE_FROM).sizes()) == ["train", "validation"]
    assert "test: too little text for one sequence; this split is left out\n" in capsys.readouterr().out
    assert not (tmp_path / "scratch").exists()


def test_a_block_whose_text_is_cut_short_is_not_written(vocabulary, tmp_path):
    work = json.dumps(
        {"texts": ["one", "two"], "tokenizer": vocabulary.tokenizer().to_str(), "end": 2, "path": str(tmp_path / "0")}
    )
    for given, files in ((work[:-20], []), (work, ["0-2.ids"])):
        done = subprocess.run(
            [sys.executable, "-P", tokens_module.__file__], input=given, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert [path.name for path in tmp_path.iterdir()] == files


def test_texts_without_a_token_have_no_end(vocabulary, tmp_path):
    row = write_tokens(iter(["one", "", "two"]), vocabulary.tokenizer(), 2, tmp_path)
    assert row.documents == 2 and row[0 : row.length].tolist().count(2) == 2


@pytest.mark.slow
def test_the_order_is_a_function_of_seed_epoch_and_position(written):
    batch, files = 35, written.files("train")
    size = sum(shard["sequences"] for shard in files)

    def order(**options):
        row = read_shards(written, "train", batch, 2, **options)
        return [(int(epoch), int(example)) for epoch, example, _ in row.as_numpy_iterator()]

    whole = order(shuffle_seed=5)
    places = steps_in_shards(files, batch) * batch
    assert len(whole) == 2 * places and places - size < 6 + batch
    epochs = [[example for epoch, example in whole if epoch == number] for number in (0, 1)]
    for examples in epochs:
        assert sorted(example for example in examples if example >= 0) == list(range(size))
    assert epochs[0] != epochs[1] and order(shuffle_seed=6) != whole
    # Neighbours in a random order are a third of the size apart on average.
    in_order = np.array([example for example in epochs[0] if example >= 0])
    assert abs(np.diff(in_order)).mean() > size / 4
    for readers in (2, 3):
        parts = [order(shuffle_seed=5, num_readers=readers, reader=reader) for reader in range(readers)]
        assert all(parts[at % readers][at // readers] == place for at, place in enumerate(whole))
    assert order(shuffle_seed=5, num_readers=5, reader=4) == whole[4::5]  # who divide neither 6 lanes nor 1
    step = steps_in_shards(files, batch) + 3
    assert order(shuffle_seed=5, first_step=step) == whole[step * batch :]
    assert order(shuffle_seed=5, first_step=step, num_readers=2, reader=1) == whole[step * batch :][1::2]


def test_every_lane_drawer_and_epoch_has_an_order_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_reader, "DRAWER", 16)
    files = [{"file": f"{lane}.tfrecord", "sequences": 64} for lane in range(2)]
    for file in files:
        with tf.io.TFRecordWriter(str(tmp_path / file["file"])) as writer:
            for number in range(64):
                writer.write(str(number))
    written = Shards(str(tmp_path), None, {"splits": {"train": {"shards": files}}})
    row = read_shards(written, "train", 2, 2, shuffle_seed=5)
    numbers = np.array([int(record) for _, _, record in row.as_numpy_iterator()])
    drawers = numbers.reshape(2, 64, 2).transpose(0, 2, 1).reshape(2 * 2 * 4, 16)  # position p is in lane p mod 2
    assert (np.sort(drawers) == np.arange(64).reshape(4, 16).tolist() * 4).all()
    assert len({tuple(order % 16) for order in drawers}) == len(drawers)


def test_records_and_places_without_one(written):
    ids = ids_of(written, "validation")
    for epoch, examples, records in read_shards(written, "validation", 64, 1).batch(64):
        decoded = decode_sequences(records, 16, pad_id=9).numpy()
        for example, row in zip(examples.numpy(), decoded, strict=True):
            np.testing.assert_array_equal(row, ids[example] if example >= 0 else [9] * 16)
        assert not epoch.numpy().any()


def test_the_number_of_shards_follows_from_the_size(corpus, vocabulary, tmp_path, monkeypatch):
    arguments = ({"train": corpus["validation"]}, vocabulary, 16, 0)
    write_shards(*arguments, str(tmp_path / "few"), str(tmp_path / "scratch"), MADE_FROM)
    assert len(open_shards(str(tmp_path / "few")).files("train")) == 8
    monkeypatch.setattr(shard_writer, "SHARD_TOKENS", 500)
    write_shards(*arguments, str(tmp_path / "many"), str(tmp_path / "scratch"), MADE_FROM)
    many = open_shards(str(tmp_path / "many"))
    tokens = many.manifest["splits"]["train"]["tokens"] + many.manifest["splits"]["train"]["documents"]
    assert len(many.files("train")) == -(-tokens // 500)
    monkeypatch.undo()
    write_shards({"train": lambda: ["one two"]}, *arguments[1:], str(tmp_path / "none"), str(tmp_path / "s"), MADE_FROM)
    assert [shard["sequences"] for shard in open_shards(str(tmp_path / "none")).files("train")] == [0]


def test_what_is_damaged_or_strange_is_told_of(written, corpus, vocabulary, tmp_path):
    data = tmp_path / "data[1]"  # which as a pattern is another folder
    data.mkdir()
    (data / "other.tfrecord").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds .tfrecord files of another tokenizer. Remove them, or give another"):
        write_shards(corpus, vocabulary, 16, 6, str(data), str(tmp_path / "scratch"), MADE_FROM)
    (data / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match="manifest.json is damaged. Remove"):
        find_shards(str(data), MADE_FROM)
    for path in Path(written.folder).iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    assert find_shards(str(data), MADE_FROM)
    (data / "tokenizer.json").write_text((data / "tokenizer.json").read_text().replace("the", "thE"))
    with pytest.raises(UserError, match=r"tokenizer.json does not match the shards beside it"):
        find_shards(str(data), MADE_FROM)


@pytest.mark.parametrize("name", ["tokenizer.json", "train-counts.npy"])
def test_a_file_by_the_name_of_one_of_the_shards_is_not_overwritten(name, corpus, vocabulary, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text("mine")
    with pytest.raises(UserError, match=f"data holds {name}, but no manifest.json of shards. Give another --data"):
        write_shards(corpus, vocabulary, 16, 6, str(tmp_path / "data"), str(tmp_path / "scratch"), MADE_FROM)
    assert (tmp_path / "data" / name).read_text() == "mine"


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_split_of_words_that_the_vocabulary_lacks_is_refused_before_training(split, corpus, vocabulary, tmp_path):
    texts = corpus | {split: lambda: ["今日は 良い 天気 " * 30]}
    with pytest.raises(UserError, match=f"^the vocabulary, .*, has none of the words of {split}. Give text of the"):
        write_shards(texts, vocabulary, 16, 6, str(tmp_path / "data"), str(tmp_path / "scratch"), MADE_FROM)


def test_a_file_system_that_tensorflow_lacks_is_told_of():
    with pytest.raises(UserError, match="^TensorFlow cannot open s3://bucket/data/manifest.json. For gs:// there is a"):
        find_shards("s3://bucket/data", MADE_FROM)


def test_a_data_set_of_the_hub_is_streamed(tmp_path):
    rows = [{"text": f"Row {i} of a text.\nIts second line."} for i in range(200)]
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = open_corpus(f"hf://{folder}")
    train, validation = (list(corpus[split]()) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(row["text"] for row in rows) and len(train) > len(validation) > 5
    assert list(corpus["train"]()) == train
    before = fingerprint(f"hf://{folder}")
    assert fingerprint(f"hf://{folder}") == before
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"words": "no text"}) for _ in range(9)))
    assert fingerprint(f"hf://{folder}") != before
    with pytest.raises(UserError, match="has no column text; it has words"):
        list(open_corpus(f"hf://{folder}")["train"]())
    with pytest.raises(UserError, match="must be hf://user/name or hf://user/name/configuration"):
        open_corpus("hf://name")
    with pytest.raises(UserError, match="cannot fetch user/name from the Hugging Face Hub"):
        open_corpus("hf://user/name")


def test_a_fingerprint_follows_every_byte(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path / "a.txt")) != before == fingerprint(str(tmp_path))
    (tmp_path / "b.txt").write_text("twO")
    assert fingerprint(str(tmp_path)) != before


def test_tokenising_does_not_load_tensorflow():
    code = "import common.data.tokens, sys; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# In a mount namespace of its own: a small disk, and then room is made.
FULL_DISK = """
mount -t tmpfs -o size=250k none {disk} && {command}; echo "status $?"
mount -o remount,size=1g {disk} && {command} && cp -r {disk}/run/data {copy}
"""
MAKE_DATASETS = """
import sys
from common.run.command_line import run
from recipes.bert_from_scratch import Config, make_datasets
run(make_datasets, Config(corpus=sys.argv[1], workdir=sys.argv[2], vocabulary_size=300, seq_length=16, shards=6))
"""


@pytest.mark.slow
def test_two_processes_at_once_write_one_set_of_shards(wikitext, written, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train-00000-of-00006-1.tfrecord.0123456789ab.unfinished").write_text("of a process that was killed")
    (data / "folder.unfinished").mkdir()
    mine = {data / name: f"mine: {name}" for name in (".lock", "novel.unfinished", "notes.txt")}
    for path, text in mine.items():
        path.write_text(text)
    code = MAKE_DATASETS.replace("workdir=", "data=sys.argv[3], workdir=")
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(wikitext), str(tmp_path / name), str(data)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in "ab"
    ]
    told = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert sorted(output.count("tokenising train") for output in told) == [0, 1]
    assert find_shards(str(data), {}) and not list(data.glob("train*.unfinished"))
    assert {path: path.read_text() for path in mine} == mine and (data / "folder.unfinished").is_dir()
    for shard in written.files("train"):
        assert (data / shard["file"]).read_bytes() == (Path(written.folder) / shard["file"]).read_bytes()


@pytest.mark.slow
def test_without_locks_two_processes_write_the_same_bytes(corpus, vocabulary, written, tmp_path, monkeypatch):
    """As on gs://: the other process has written all of it while this one was at its third shard."""
    monkeypatch.setattr(shard_writer, "_locked", lambda folder: contextlib.nullcontext())
    really_write, data = shard_writer._write_records, str(tmp_path / "data")

    def write(path, sequences):
        really_write(path, sequences)
        if "train-00002" in path and not (tmp_path / "other").exists():
            monkeypatch.setattr(shard_writer, "UNFINISHED", ".other.unfinished")
            write_shards(corpus, vocabulary, 16, 6, data, str(tmp_path / "other"), MADE_FROM)
            monkeypatch.setattr(shard_writer, "UNFINISHED", ".this.unfinished")

    monkeypatch.setattr(shard_writer, "_write_records", write)
    write_shards(corpus, vocabulary, 16, 6, data, str(tmp_path / "this"), MADE_FROM)
    assert find_shards(data, MADE_FROM).manifest == written.manifest


@pytest.mark.slow
def test_a_full_disk_is_told_of_and_then_it_goes_on(wikitext, written, tmp_path):
    """Full of shards."""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    command = shlex.join([sys.executable, "-c", MAKE_DATASETS, str(wikitext), str(disk / "run")])
    script = FULL_DISK.format(disk=disk, copy=copy, command=command)
    done = subprocess.run(["unshare", "--mount", "bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "status 1\n" in done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"error: [Errno 28] No space left on device: '{disk}/run/data/train-")
    for shard in written.files("train"):
        assert (copy / shard["file"]).read_bytes() == (Path(written.folder) / shard["file"]).read_bytes()
