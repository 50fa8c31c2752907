"""Presets, runs and files from strangers are refused in one line, and nothing of theirs is run or followed."""

import ast
import functools
import gzip
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import struct
import sys
from contextlib import nullcontext
from pathlib import Path

import keras_hub
import numpy as np
import pyarrow.parquet
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

from common.data.byte_pairs import train_byte_pairs
from common.data.rows import write_rows
from common.model.causal_lm import make_causal_lm, make_preprocessor
from common.model.presets import save_task
from common.run_folder import open_run
from keras_replicas import UserError
from keras_replicas.checkpoint_files import CheckpointFiles
from keras_replicas.fit_state import to_bytes
from recipes._export import export
from recipes.bert_mlm import Config
from tests.conftest import ROOT, files_in
from tests.hostile import COMMAND, LYING, Watch, code, entry, hdf5, linked, named, part, safetensors
from tests.hub import URI
from tests.test_publish import hub  # noqa: F401

HUB, PRODUCT = keras_hub.models, ("keras_replicas", "common", "recipes")
TRAINS = "--model", "nano", "--batch-size", "4", "--max-steps", "2", "--replicas", "1"
BERT = "run", "bert_mlm", "--seq-length", "16", "--vocabulary-size", "300", *TRAINS
# What users call, with IT in place of the folder that they were given.
FILL = "fill-mask", "--preset", "IT", "a [MASK]"
GENERATE = "generate", "--preset", "IT", "--tokens", "1", "the"
CLASSIFY = "classify", "--preset", "IT", "a text"
EXPORT = "export", "IT", "IT.new"
PRESET = "run", "bert_mlm", "--seq-length", "16", *TRAINS[2:], "--dry-run", "--corpus", "TEXT", "--preset", "IT"
ROWS = "run", "causal_lm", *TRAINS, "--dry-run", "--data", "IT"
RUN = *BERT, "--corpus", "TEXT", "--workdir", "IT"
PARQUET = *BERT, "--dry-run", "--corpus", "IT/corpus.parquet"
CORPUS = *BERT, "--dry-run", "--corpus", "IT/corpus.txt"
CARD = *BERT, "--dry-run", "--corpus", "hf://IT/corpus"
VOCABULARY = *BERT, "--dry-run", "--corpus", "TEXT", "--vocabulary", "IT/vocabulary.txt"
TABLE = "classify", "--preset", "IT/../classifier", "--data", "IT/table.tsv", "--text-columns", "text"


def command(*words):
    """`python -m recipes` in this process; its exit status."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", ["recipes", *map(str, words)])
        patch.setattr("common.log.print_plan", lambda *_: {})  # of a dry run, which else trains some steps
        runpy.run_path(str(ROOT / "recipes/__main__.py"), run_name="__main__")
        raise SystemExit(0)
    signal.signal(signal.SIGINT, on_ctrl_c)
    return end.value.code


def given(words, folder, text):
    return [text if word == "TEXT" else re.sub(r"\bIT\b", str(folder), word) for word in words]


@functools.cache
def byte_pairs():
    text = (ROOT / "LICENSE").read_text().split("\n\n")
    return train_byte_pairs(lambda: iter(text), "licence", 300)


def write_ids(folder, *ids):
    rows = [np.array(ids, np.int32)] * 6
    write_rows(folder, {"train": rows, "validation": rows}, 33, byte_pairs(), {})


@pytest.fixture(scope="module")
def bases(tmp_path_factory, wikitext):
    """A folder of each kind that a user may be given, all good."""
    home = tmp_path_factory.mktemp("bases")
    assert command(*given(RUN, home / "run", str(wikitext))) == 0
    shutil.copytree(home / "run/preset", home / "mlm")
    preprocessor = make_preprocessor("", byte_pairs(), 32)
    gpt2 = make_causal_lm("", "nano", preprocessor, 0.0)
    save_task(gpt2, preprocessor, home / "gpt2")
    shutil.copytree(home / "gpt2", home / "divided")
    (home / "divided/model.weights.h5").unlink()
    gpt2.backbone.save_weights(home / "divided/model.weights.json", max_shard_size=1)
    export(str(home / "gpt2"), home / "hf")
    shutil.copytree(home / "hf", home / "hf_divided")
    (home / "hf_divided/model.safetensors").rename(home / "hf_divided/model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(home / "hf/model.safetensors"), "model-00001-of-00001.safetensors")}
    (home / "hf_divided/model.safetensors.index.json").write_text(json.dumps(index))
    words = HUB.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"])
    own = HUB.BertTextClassifierPreprocessor(words, sequence_length=16)
    bert = HUB.BertBackbone(7, 1, 1, 64, 64, max_sequence_length=512)
    save_task(HUB.BertTextClassifier(bert, 2, own), own, home / "classifier")
    (home / "classifier/labels.json").write_text(json.dumps({"classes": ["no", "yes"], "texts": 1}))
    write_ids(home / "rows", *range(5, 38))
    (home / "examples").mkdir()
    model = {"type": "BPE", "vocab": dict(byte_pairs().vocabulary), "merges": [*byte_pairs().merges]}
    (home / "examples/tokenizer.json").write_text(json.dumps({"model": model}))
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=range(5, 38)))
    example = tf.train.Example(features=tf.train.Features(feature={"input_ids": feature})).SerializeToString()
    for name in ("train", "valid"):
        with tf.io.TFRecordWriter(str(home / f"examples/{name}.tfrecord")) as writer:
            [writer.write(example) for _ in range(6)]
    (home / "files/corpus").mkdir(parents=True)
    for name in ("corpus.txt", "corpus/train.txt"):
        shutil.copy(wikitext / "wiki.train.tokens", home / "files" / name)
    (home / "files/corpus/README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: train.txt\n---\n"
    )
    (home / "files/table.tsv").write_text("text\na text\n")
    shutil.copy(home / "mlm/assets/tokenizer/vocabulary.txt", home / "files")
    return home


def shards_elsewhere(folder, outside):
    for path in [*folder.glob("model-*"), *folder.glob("model_*")]:
        shutil.move(path, outside)
    (index,) = [*folder.glob("model.*.json")]
    index.write_text(re.sub(r'"(model[-_][^"]*)"', r'"../outside/\1"', index.read_text()))


def split_elsewhere(folder, outside):
    shutil.move(folder / "train-00000.tfrecord", outside / "x-00000.tfrecord")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"train"', '"../outside/x"'))


def zipped_record(folder, outside):
    for name in ("train", "valid"):
        (folder / f"{name}.tfrecord").unlink()
        (folder / f"{name}.tfrecord.gz").write_bytes(gzip.compress(struct.pack("<Qi", 2**28, 0) + bytes(2**28 + 4), 1))


def card_elsewhere(folder, outside):
    shutil.copy(folder / "corpus/train.txt", outside / "secret.txt")
    card = folder / "corpus/README.md"
    card.write_text(card.read_text().replace("train.txt", f"{outside}/secret.txt"))


def repeated(length):
    """After some others, 2,000 rows have one text of this length, which is in the file once."""

    def act(folder, outside):
        texts = [*(f"Text {number}." for number in range(40)), ("ab " * length)[:length]]
        column = pyarrow.DictionaryArray.from_arrays(np.minimum(np.arange(2040), 40), texts)
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), folder / "corpus.parquet", compression="zstd")

    return act


def checkpoints_at(place):
    """The run's checkpoints are a link to a scratch disk or, in a hostile run, to a home with other files."""

    def act(folder, outside):
        there = outside if place == "home" else folder.parent / "scratch"
        shutil.copytree(folder / "checkpoints", there, dirs_exist_ok=True)
        shutil.rmtree(folder / "checkpoints")
        (folder / "checkpoints").symlink_to(there)
        (there / ("notes_temp" if place == "home" else "ckpt-9_temp")).mkdir()

    return act


def pipe(folder, outside):
    (folder / OWN).unlink()
    os.mkfifo(folder / OWN)


def lie(tensors):
    tensors[0]["dtype"] = "F64"


def overlap(tensors):
    tensors[1]["data_offsets"] = [place - 4 for place in tensors[1]["data_offsets"]]


WIDE, LINK = "much larger than its weights", "is a link, and could lead anywhere"
ELSEWHERE = "no file of weights beside it"
HDF5, LONG = "no array of numbers in this file", "has more than [0-9,]+ bytes"
KINDS = ("external storage", "a soft link", "an external link", "a virtual dataset", "a shape bomb", "a zip bomb")
FILES = ("config.json", "results.json", "steps.jsonl", "upload.log", "preset/config.json", "checkpoints/ckpt-2.index")
OWN, KERAS = "assets/tokenizer/vocabulary.json", "keras.layers"
LAYER = b'{"module": "keras.layers", "class_name": "Dense", "config": {"units": 40000}}'


def wide_attention(folder, outside):
    for key, value in {"num_layers": 2900, "hidden_dim": 2880, "intermediate_dim": 1}.items():
        entry("config.json", key, value)(folder, outside)


NONE = {"rows": 10**14, "checksum": 0}
# By base and command: what is hostile, the change that makes it so, what is told and, if the base itself is none, the
# change that makes the benign twin.
CASES = {
    ("gpt2", GENERATE): {
        "Lambda": (part("task.json", KERAS, "Lambda", None, {"function": code()}), "keras.layers.Lambda"),
        "a function": (part("task.json", "keras.utils", "function", "get_file", "get_file"), "keras.utils.function"),
        "a switch": (part("task.json", "keras.config", "function", 0, "enable_unsafe_deserialization"), "keras.conf"),
        "a module": (part("task.json", "os", "system", None, {"command": "true"}), "os.system"),
        "TFSMLayer": (part("task.json", KERAS, "TFSMLayer", None, {"filepath": "OUTSIDE"}), "keras.layers.TFSMLayer"),
        "deep JSON": (named("preprocessor.json", b"[" * 10**6), "cannot read .*preprocessor.json .maximum recursion"),
        "an archive": (named("model.keras", b"PK"), "model.keras does not belong", named("model.txt", b"PK")),
        "a pickle": (named("w.npy", COMMAND.dumps()), "w.npy does not belong", named("w.txt", COMMAND.dumps())),
        "a link to a file": (linked(OWN), LINK, linked(OWN, within=True)),
        "a link to a folder": (linked("assets/tokenizer"), LINK),
        "a pipe": (pipe, "vocabulary.json in .* is neither a file nor a folder"),
    },
    ("gpt2", EXPORT): {"Torch": (part("task.json", KERAS, "TorchModuleWrapper", None, {"module": code()}), "Wrapper")},
    ("classifier", CLASSIFY): {
        "a registered name": (part("preprocessor.json", "os", "x", "keras_hub>BertBackbone"), "os.x"),
        "a lookup": (part("preprocessor.json", KERAS, "StringLookup", None, {"vocabulary": "OUTSIDE"}), "StringLookup"),
        "linked weights": (linked("task.weights.h5"), LINK),
        "other labels": (entry("labels.json", "classes", ["no"]), "is not that of its model, which has 2 outputs"),
    },
    ("mlm", FILL): {
        "a path of a vocabulary": (entry("tokenizer.json", "vocabulary", "OUTSIDE/x"), "has a path where"),
        "a path as a name": (entry("config.json", "name", "../../outside/x"), "has a path where"),
        "a wide model": (entry("config.json", "hidden_dim", 10**6), WIDE),
        "a deep model": (entry("config.json", "num_layers", 10**5), WIDE),
        "a model of wide attention": (wide_attention, WIDE),
        "a whole model": (hdf5("a whole model"), "is a whole model, not weights alone"),
        **{kind: (hdf5(kind), HDF5) for kind in KINDS},
        **{f"{kind} in a nested group": (hdf5(kind, "assets/deep/vars/0"), HDF5) for kind in KINDS[-2:]},
    },
    ("mlm", PRESET): {
        "long JSON": (named("config.json", size=2**22 + 1), LONG),
        "JSON of many parts": (named("tokenizer.json", b"[" + b"{}," * 2**20 + b"{}]"), "objects and lists"),
    },
    ("divided", GENERATE): {"divided weights": (shards_elsewhere, ELSEWHERE)},
    ("hf_divided", GENERATE): {"divided safetensors": (shards_elsewhere, ELSEWHERE)},
    ("hf", GENERATE): {
        "a wide model of transformers": (entry("config.json", "n_embd", 10**6), WIDE),
        "a long header": (safetensors(lambda tensors: 2**40), "header too large"),
        "overlapping tensors": (safetensors(overlap), "invalid offset"),
        "a dtype that lies": (safetensors(lie), "invalid shape, data type, or offset"),
    },
    ("rows", ROWS): {
        "a split elsewhere": (split_elsewhere, "has no rows of text, or not all"),
        "more rows than there are": (entry("manifest.json", "splits", {"train": NONE}), "not those of 100000000000000"),
        "endless rows": (entry("manifest.json", "length", 10**9), "rows of 1000000000 tokens"),
        "ids of no token": (lambda folder, outside: write_ids(folder, 300), "an id that is not in their tokenizer"),
        "a Lambda": (part("tokenizer/tokenizer.json", KERAS, "Lambda"), "keras.layers.Lambda"),
        "an unregistered layer": (named("tokenizer/tokenizer.json", LAYER), "keras.layers.Dense"),
    },
    ("examples", ROWS): {
        "a record that lies": (named("train.tfrecord", LYING + b"x" * 99), "a record of 10,000,000,000,000 "),
        "a zipped record": (zipped_record, "record of 268,435,456 bytes"),
    },
    ("files", CARD): {"a card": (card_elsewhere, "a file outside of it")},
    ("files", CORPUS): {"a corpus": (named("corpus.txt", size=2**30), "line 1 is not UTF-8 text")},
    ("files", PARQUET): {"a parquet bomb": (repeated(2**24 + 1), "has 16,777,217 characters", repeated(99))},
    ("files", TABLE): {"a table": (named("table.tsv", size=2**31), "bytes without the end of a line")},
    ("files", VOCABULARY): {"a vocabulary": (named("vocabulary.txt", size=2**31), "it has 2,147,483,648 bytes")},
    ("run", RUN): {
        **{f"long {name}": (named(name, size=2**31), LONG) for name in FILES[:3]},
        **{f"linked {name}": (linked(name), LINK) for name in (*FILES, "preset", "tensorboard")},
        "an index": (named("checkpoints/checkpoint", b'model_checkpoint_path: "/x"'), "checkpoint is not a checkpoint"),
        "a home": (checkpoints_at("home"), "notes_temp is not a checkpoint: remove it", checkpoints_at("scratch")),
    },
}
SLOW = CARD, CORPUS, PARQUET, TABLE, VOCABULARY  # each trains, or reads much
PARAMETERS = [
    pytest.param(*base, name, id=f"{base[1][0]}: {name}", marks=[pytest.mark.slow] * (base[1] in SLOW))
    for base in CASES
    for name in CASES[base]
]
_twins: dict[tuple, int] = {}  # the memory of each command on a base that is not changed


@pytest.mark.parametrize(("base", "words", "name"), PARAMETERS)
def test_it_is_refused_in_one_line_and_its_benign_twin_loads(base, words, name, bases, wikitext, tmp_path, capfd):
    change, told, *twin = CASES[base, words][name]

    def loaded(change, home):
        (home / "outside").mkdir(parents=True)
        for each in (base, "classifier"):
            shutil.copytree(bases / each, home / each, dirs_exist_ok=True)
        change(home / base, home / "outside")
        capfd.readouterr()
        with Watch(home / "outside", home / base) as watch:
            status = command(*given(words, home / base, str(wikitext)))
        return status, capfd.readouterr().err, watch

    if twin or (base, words) not in _twins:
        status, err, watch = loaded(*twin or [lambda folder, outside: None], tmp_path / "twin")
        assert status == 0, err
        _twins.setdefault((base, words), watch.memory)
    status, err, watch = loaded(change, tmp_path / "hostile")
    assert (status, err.count("\n"), err[:7], watch.done) == (2, 1, "error: ", []), err
    assert re.search(told, err), err
    assert watch.memory < _twins[base, words] + 2**30


def test_links_of_the_hubs_cache_and_of_a_users_own_folder_load(bases, tmp_path, capfd):
    folder = tmp_path / "models--someone--bert/snapshots/0123"
    for path in filter(Path.is_file, (bases / "mlm").rglob("*")):
        place, blob = folder / path.relative_to(bases / "mlm"), tmp_path / f"models--someone--bert/blobs/{path.name}"
        place.parent.mkdir(parents=True, exist_ok=True)
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(path, blob)
        place.symlink_to(os.path.relpath(blob, place.parent))
    (tmp_path / "link").symlink_to(folder)
    assert command(*given(FILL, tmp_path / "link", "")) == 0
    blob.unlink()
    blob.symlink_to("/etc/hostname")
    assert command(*given(FILL, tmp_path / "link", "")) == 2 and LINK in capfd.readouterr().err


SPOKEN = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", *(f"\x1b[{number}m" for number in range(294))]
SHOWN = {
    "mlm": (FILL, named("assets/tokenizer/vocabulary.txt", "\n".join(SPOKEN).encode())),
    "classifier": (CLASSIFY, entry("labels.json", "classes", ["\x1b]0;x\x07", "yes"])),
    "run": (RUN, entry("results.json", "workdir", "\x1b[2J")),
}


@pytest.mark.parametrize("base", SHOWN)
def test_what_a_terminal_would_obey_is_not_shown(base, bases, wikitext, tmp_path, capfd):
    words, change = SHOWN[base]
    change(shutil.copytree(bases / base, tmp_path / base), tmp_path)
    assert command(*given(words, tmp_path / base, str(wikitext))) == 0
    shown = "".join(capfd.readouterr())
    assert "\x1b" not in shown and "\ufffd" in shown


def states():
    """Of a checkpoint's state: a pickle in it, a zip bomb, and something else."""
    text = np.frombuffer(b'{"step": {"__array__": 0}}', np.uint8)
    for write, array in ((np.savez, COMMAND), (np.savez_compressed, np.zeros(2**24))):
        write(file := io.BytesIO(), array, json=text)
        yield file.getvalue()
    yield b"PK"


def test_the_state_in_a_checkpoint_is_not_unpickled(tmp_path, tmp_path_factory):
    files = CheckpointFiles(tmp_path, 3)
    for number, content in enumerate([to_bytes({"step": np.ones(3)}), *states()]):
        tf.train.Checkpoint(state=tf.Variable(content)).write(str(tmp_path / f"ckpt-{number}"))
        told = pytest.raises(UserError, match=r"library \(it holds no state of a fit") if number else nullcontext()
        with Watch(tmp_path_factory.mktemp("none"), tmp_path) as watch, told:
            files.read_state(f"ckpt-{number}")
        assert not watch.done and watch.memory < 2**30


def test_a_preset_of_the_hub_may_be_pinned_and_is_looked_at_too(bases, hub, tmp_path, capfd):  # noqa: F811
    good = files_in(bases / "mlm")
    hub.commits = [good, good | {"config.json": json.dumps({"registered_name": "x", "class_name": "Lambda"}).encode()}]
    assert command(*given(FILL, f"{URI}@{hub.names[0]}", "")) == 0
    assert command(*given(FILL, URI, "")) == 2 and "config.json names None.Lambda" in capfd.readouterr().err
    (tmp_path / "text.txt").write_text("A text.")
    fixed = Config(preset=f"{URI}@{hub.names[0]}", corpus=str(tmp_path / "text.txt")).fixed("bert_mlm")
    assert fixed["commit of preset"] == hub.names[0]
    assert fixed["sha256 of preset/config.json"] == hashlib.sha256(good["config.json"]).hexdigest()


def test_a_name_of_kerashubs_own_is_looked_at_too(bases, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path))
    handle = HUB.Backbone.presets["bert_tiny_en_uncased"]["kaggle_handle"].removeprefix("kaggle://")
    place = shutil.copytree(bases / "mlm", tmp_path / "models" / handle)
    place.with_name(f"{place.name}.complete").touch()
    assert command(*FILL[:2], "bert_tiny_en_uncased", FILL[3]) == 0
    entry("config.json", "hidden_dim", 10**6)(place, tmp_path)
    assert command(*FILL[:2], "bert_tiny_en_uncased", FILL[3]) == 2 and WIDE in capfd.readouterr().err


def test_what_a_run_has_read_is_on_record_and_other_bytes_are_refused(bases, tmp_path):
    inputs = json.loads((bases / "run/results.json").read_text())["inputs"]
    assert inputs.keys() == {f"sha256 of corpus/wiki.{split}.tokens" for split in ("train", "valid", "test")}
    (tmp_path / "words.txt").write_text("a")
    config = Config(vocabulary=str(tmp_path / "words.txt"))
    with open_run(str(tmp_path / "run"), config.fixed("bert_mlm")):
        (tmp_path / "run/steps.jsonl").write_text("")
    (tmp_path / "words.txt").write_text("b")
    told = "other options: sha256 of vocabulary/words.txt '[0-9a-f]{64}', not '[0-9a-f]{64}'. Give another folder"
    with pytest.raises(UserError, match=told):
        open_run(str(tmp_path / "run"), config.fixed("bert_mlm"))


RUNS = re.compile(r"(^|\.)(eval|exec|extractall|yaml\.load|torch\.load)$|(^|[ .])(pickle|marshal|dill|yaml)\b")
FLAGS = ("shell", "allow_pickle")
PLANTED = "", "eval(x)", "from pickle import load", "zip.extractall()", "run(shell=True)", "torch.load(x)"


def unsafe(root):
    """Where the product runs, or unpacks to anywhere, what a file holds."""
    for path in (file for folder in PRODUCT for file in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            told = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else call
            flags = [word.arg for word in node.keywords if ast.unparse(word.value) != "False"] if call else []
            if RUNS.search(told) or {*FLAGS} & {*flags}:
                yield path.name


@pytest.mark.parametrize("planted", PLANTED)
def test_the_product_has_nothing_that_runs_what_a_file_holds(planted, tmp_path):
    for folder in PRODUCT:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "common/planted.py").write_text(planted)
    assert [*unsafe(tmp_path)] == ["planted.py"] * bool(planted)
