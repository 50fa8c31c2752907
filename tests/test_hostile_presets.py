"""Presets, runs and files from strangers are refused in one line, and nothing of theirs is run or followed."""

import ast
import json
import os
import shutil

import h5py
import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

import keras_replicas as kr
from common.data.byte_pairs import train_byte_pairs
from common.data.rows import open_rows, write_rows
from common.model.causal_lm import make_causal_lm, make_preprocessor
from common.model.presets import save_task
from recipes._export import export
from tests import hostile
from tests.conftest import ROOT
from tests.hostile import Watch, command, edit, hdf5, safetensors, sparse

IT = "IT"  # the copy of a base that a case changes, in the words of a command
SIZES = "--model", "nano", "--vocabulary-size", "300", "--batch-size", "4", "--seq-length", "16", "--max-steps", "2"
FILL = "fill-mask", "--preset", IT, "a [MASK]"
GENERATE = "generate", "--preset", IT, "--tokens", "1", "the"
CLASSIFY = "classify", "--preset", IT, "a text"
ROWS = "run", "causal_lm", "--data", IT, *SIZES[:2], "--batch-size", "2", "--dry-run", "--replicas", "1"
RUN = "run", "bert_mlm", "--corpus", "WIKITEXT", *SIZES, "--replicas", "1", "--workdir", IT
CORPUS = "run", "bert_mlm", *SIZES, "--dry-run", "--replicas", "1", "--corpus"


def documents():
    return iter((ROOT / "LICENSE").read_text().split("\n\n"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory, wikitext):
    """The folder of each kind of thing that a user may be given."""
    home = tmp_path_factory.mktemp("bases")
    with pytest.MonkeyPatch.context() as patch:
        words = [str(wikitext) if word == "WIKITEXT" else str(home / "run") if word == IT else word for word in RUN]
        patch.setattr("sys.argv", ["recipes", *words])
        hostile.runpy.run_path(str(ROOT / "recipes/__main__.py"), run_name="__main__")
    shutil.copytree(home / "run/preset", home / "mlm")
    tokenizer = train_byte_pairs(documents, "licence", 300)
    preprocessor = make_preprocessor("", tokenizer, 32)
    gpt2 = make_causal_lm("", "nano", preprocessor, 0.0)
    save_task(gpt2, preprocessor, home / "gpt2")
    shutil.copytree(home / "gpt2", home / "divided")
    (home / "divided/model.weights.h5").unlink()
    gpt2.backbone.save_weights(home / "divided/model.weights.json", max_shard_size=1)
    export(str(home / "gpt2"), home / "hf")
    shutil.copytree(home / "hf", home / "hf_divided")
    (home / "hf_divided/model.safetensors").rename(home / "hf_divided/model-00001-of-00001.safetensors")
    tensors = load_file(home / "hf/model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (home / "hf_divided/model.safetensors.index.json").write_text(json.dumps(index))
    words = keras_hub.models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"])
    bert = keras_hub.models.BertBackbone(7, 1, 1, 64, 64, max_sequence_length=512)
    own = keras_hub.models.BertTextClassifierPreprocessor(words, sequence_length=16)
    save_task(keras_hub.models.BertTextClassifier(bert, 2, own), own, home / "classifier")
    (home / "classifier/labels.json").write_text(json.dumps({"classes": ["no", "yes"], "texts": 1}))
    ids = [np.arange(5, 38, dtype=np.int32)] * 6
    write_rows(home / "rows", {"train": ids, "validation": ids}, 33, tokenizer, {})
    (home / "examples").mkdir()
    model = {"type": "BPE", "vocab": dict(tokenizer.vocabulary), "merges": [*tokenizer.merges]}
    (home / "examples/tokenizer.json").write_text(json.dumps({"model": model}))
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=range(5, 38)))
    found = tf.train.Example(features=tf.train.Features(feature={"input_ids": feature})).SerializeToString()
    for name in ("train.tfrecord", "valid.tfrecord"):
        with tf.io.TFRecordWriter(str(home / "examples" / name)) as writer:
            [writer.write(found) for _ in range(6)]
    (home / "files").mkdir()
    shutil.copy(home / "mlm/assets/tokenizer/vocabulary.txt", home / "files")
    (home / "files/corpus").mkdir()
    for name in ("corpus.txt", "corpus/train.txt"):
        shutil.copy(wikitext / "wiki.train.tokens", home / "files" / name)
    (home / "files/table.tsv").write_text("text\na text\n")
    return home


def placed(file, thing):
    """A change of a preset's JSON file, to which a thing that Keras would make is added where it makes its parts."""

    def change(folder, outside, is_hostile):
        def add(content):
            content["config"]["preprocessor" if file == "task.json" else "tokenizer"] = thing(outside)

        if is_hostile:
            edit(folder / file, add)

    return change


def layer(name, module="keras.layers", **config):
    return {"module": module, "class_name": name, "config": config, "registered_name": None}


def function(module, name):
    return {"module": module, "class_name": "function", "config": name, "registered_name": name}


def set_to(file, key, value):
    """A change of one entry of a JSON file's `config`, or of the whole if the key is empty."""

    def change(folder, outside, is_hostile):
        new = value(outside) if callable(value) else value
        if is_hostile:
            edit(folder / file, lambda content: content.get("config", content).update({key: new}))

    return change


def of_file(name, change):
    return lambda folder, outside, is_hostile: change(folder / name, outside, is_hostile)


def linked(name, is_folder=False):
    """A link that leaves the folder, in place of what its twin has there, or a link to the same within it."""

    def change(folder, outside, is_hostile):
        target = outside / "target" if is_hostile else folder / f"own{(folder / name).suffix}"
        if (folder / name).exists():
            shutil.move(folder / name, target)
        elif is_folder:
            target.mkdir()
        else:
            target.write_text("")
        if is_hostile or not is_folder:
            (folder / name).symlink_to(target)
        else:
            shutil.move(target, folder / name)

    return change


def only_hostile(act):
    return lambda folder, outside, is_hostile: act(folder, outside) if is_hostile else None


def either(name, content, twin):
    """A file with this content, as one name or another."""

    def change(folder, outside, is_hostile):
        (folder / (name if is_hostile else twin)).write_bytes(content(outside))

    return change


def fifo(folder, outside):
    (folder / "assets/tokenizer/vocabulary.json").unlink()
    os.mkfifo(folder / "assets/tokenizer/vocabulary.json")


def index_names_another(name):
    def change(folder, outside):
        for path in [*folder.glob("*.safetensors"), *folder.glob("model_*.h5")]:
            shutil.copy(path, outside / path.name)
        away = f"../../outside/{path.name}"
        weights = json.loads((folder / name).read_text())["weight_map"]
        new = {key: [away] if isinstance(value, list) else away for key, value in weights.items()}
        edit(folder / name, lambda content: content.update(weight_map=new))

    return only_hostile(change)


def rows_of_another_place(folder, outside):
    shutil.copy(folder / "train-00000.tfrecord", outside / "x-00000.tfrecord")
    edit(folder / "manifest.json", lambda c: c["splits"].update({"../../outside/x": c["splits"]["train"]}))


def ids_of_none(folder, outside):
    tokenizer = train_byte_pairs(documents, "licence", 300)
    ids = [np.full(33, 2**31 - 1, np.int32)] * 6
    write_rows(folder, {"train": ids, "validation": ids}, 33, tokenizer, {})
    open_rows(folder)


def more_rows(folder, outside):
    edit(folder / "manifest.json", lambda content: content["splits"]["train"].update(rows=10**14))


def lying_record(folder, outside):
    (folder / "train.tfrecord").write_bytes(hostile.record(10**13, b"x" * 100))


def zipped_record(folder, outside):
    for name in ("train", "valid"):
        (folder / f"{name}.tfrecord").unlink()
        (folder / f"{name}.tfrecord.gz").write_bytes(hostile.zipped(2**28))


def card(folder, outside, is_hostile):
    """A data set whose card names its files."""
    shutil.copy(folder / "corpus/train.txt", outside / "secret.txt")
    named = f"{outside}/secret.txt" if is_hostile else "train.txt"
    (folder / "corpus/README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {named}\n---\n")


def state_file(folder, outside, is_hostile):
    name = "checkpoint" if is_hostile else ".checkpoint"
    (folder / f"checkpoints/{name}").write_text(f'model_checkpoint_path: "{outside}/ckpt-9"\n')


def checkpoints_elsewhere(folder, outside, is_hostile):
    """A link to a scratch disk, which is somebody's home if it is hostile."""
    scratch = folder.with_name("scratch")
    shutil.move(folder / "checkpoints", scratch)
    (outside / "notes_temp").mkdir()
    (folder / "checkpoints").symlink_to(outside if is_hostile else scratch)


def big(name):
    return only_hostile(lambda folder, outside: sparse(folder / name))


def nested(folder, outside):
    (folder / "preprocessor.json").write_text("[" * 10**6)


CASES = {
    "a Lambda": ("gpt2", GENERATE, placed("task.json", lambda o: layer("Lambda", function=hostile.payload(o))), "keras.layers.Lambda"),
    "a function of Keras": ("gpt2", GENERATE, placed("task.json", lambda o: function("keras.utils", "get_file")), "keras.utils.function"),
    "a switch of Keras": ("gpt2", GENERATE, placed("task.json", lambda o: function("keras.config", "enable_unsafe_deserialization")), "keras.config"),
    "a module": ("gpt2", GENERATE, placed("task.json", lambda o: layer("system", "os", command="true")), "os.system"),
    "a module with a registered name": ("classifier", CLASSIFY, placed("preprocessor.json", lambda o: layer("x", "os") | {"registered_name": "keras_hub>BertBackbone"}), "os.x"),
    "TorchModuleWrapper": ("gpt2", ("export", IT, "DEST"), placed("task.json", lambda o: layer("TorchModuleWrapper", module=hostile.payload(o))), "TorchModuleWrapper"),
    "TFSMLayer": ("gpt2", GENERATE, placed("task.json", lambda o: layer("TFSMLayer", filepath=str(o))), "TFSMLayer"),
    "StringLookup": ("classifier", CLASSIFY, placed("preprocessor.json", lambda o: layer("StringLookup", vocabulary=str(o / "target"))), "StringLookup"),
    "a vocabulary's path": ("mlm", FILL, set_to("tokenizer.json", "vocabulary", lambda o: str(o / "target")), "has a path in place of"),
    "a name that is a path": ("mlm", FILL, set_to("config.json", "name", "../../outside/x"), "has a path in place of"),
    "a wide model": ("mlm", FILL, set_to("config.json", "hidden_dim", 10**6), "much larger than its weights"),
    "a deep model": ("mlm", FILL, set_to("config.json", "num_layers", 10**5), "much larger than its weights"),
    "a wide model of transformers": ("hf", GENERATE, set_to("config.json", "n_embd", 10**6), "much larger than its weights"),
    "deep JSON": ("gpt2", GENERATE, only_hostile(nested), "is no JSON .maximum recursion depth"),
    "long JSON": ("gpt2", ROWS[:2] + ("--preset", IT, "--corpus", "WIKITEXT", *SIZES[4:], "--dry-run"), big("config.json"), "is no file of at most"),
    "HDF5 of a whole model": ("mlm", FILL, of_file("model.weights.h5", hdf5("whole")), "is a whole model"),
    **{
        f"HDF5 with {kind}": ("mlm", FILL, of_file("model.weights.h5", hdf5(kind)), "which is no array of numbers in this")
        for kind in ("external storage", "soft link", "external link", "virtual", "shape bomb", "zip bomb")
    },
    "an archive": ("gpt2", GENERATE, either("model.keras", lambda o: b"PK", "model.txt"), "model.keras is no part of a preset"),
    "a pickle": ("gpt2", GENERATE, either("weights.npy", hostile.pickled, "weights.txt"), "weights.npy is no part of a preset"),
    "a link to a file": ("gpt2", GENERATE, linked("assets/tokenizer/vocabulary.json"), "is a link that leaves it"),
    "a link to a folder": ("gpt2", GENERATE, linked("assets/tokenizer", True), "is a link that leaves it"),
    "a link to a file of weights": ("classifier", CLASSIFY, linked("task.weights.h5"), "is a link that leaves it"),
    "a pipe": ("gpt2", GENERATE, only_hostile(fifo), "vocabulary.json is no file"),
    "divided weights elsewhere": ("divided", GENERATE, index_names_another("model.weights.json"), "no file of weights beside it"),
    "divided safetensors elsewhere": ("hf_divided", GENERATE, index_names_another("model.safetensors.index.json"), "no file of weights beside it"),
    "a long header": ("hf", GENERATE, of_file("model.safetensors", safetensors(lambda header, size: 2**40)), "header"),
    "tensors that overlap": ("hf", GENERATE, of_file("model.safetensors", safetensors(hostile.overlap)), "offset"),
    "a dtype that lies": ("hf", GENERATE, of_file("model.safetensors", safetensors(hostile.lie)), "info"),
    "labels of another model": ("classifier", CLASSIFY, set_to("labels.json", "classes", ["no"]), "are not those of its 2 outputs"),
    "a split elsewhere": ("rows", ROWS, only_hostile(rows_of_another_place), "has no rows of text, or not all"),
    "more rows than there are": ("rows", ROWS, only_hostile(more_rows), "which are not 100000000000000 rows"),
    "endless rows": ("rows", ROWS, set_to("manifest.json", "length", 10**9), "rows of 1000000000 tokens"),
    "ids of no token": ("rows", ROWS, only_hostile(ids_of_none), "an id that is none of the 300"),
    "rows with a Lambda": ("rows", ROWS, only_hostile(lambda folder, outside: edit(folder / "tokenizer/tokenizer.json", lambda c: layer("Lambda"))), "no tokenizer|Lambda"),
    "a record's length": ("examples", ROWS, only_hostile(lying_record), "a record of 10,000,000,000,000 bytes"),
    "a compressed record": ("examples", ROWS, only_hostile(zipped_record), "a record of 268,435,456 bytes"),
    "a card that names a file elsewhere": ("files", (*CORPUS, "hf://IT/corpus"), card, "none of its own files"),
    "a corpus without lines": ("files", (*CORPUS, "IT/corpus.txt"), big("corpus.txt"), "line 1 is not UTF-8 text"),
    "a table without lines": ("files", ("classify", "--preset", "CLASSIFIER", "--data", "IT/table.tsv", "--text-columns", "text"), big("table.tsv"), "without the end of a line"),
    "a vocabulary without lines": ("files", (*CORPUS, "WIKITEXT", "--vocabulary", "IT/vocabulary.txt"), big("vocabulary.txt"), "it has 2,147,483,648 bytes"),
    **{f"a run's long {name}": ("run", RUN, big(name), "is no file of at most") for name in ("results.json", "steps.jsonl", "config.json")},
    **{
        f"a run's link {name}": ("run", RUN, linked(name), "is a link, and could lead anywhere")
        for name in ("config.json", "results.json", "steps.jsonl", "upload.log", "preset/config.json", "checkpoints/ckpt-2.index")
    },
    **{f"a run's link to a folder {name}": ("run", RUN, linked(name, True), "is a link, and") for name in ("preset", "tensorboard", "best", "predictions")},
    "an index of checkpoints elsewhere": ("run", RUN, state_file, "checkpoint is no checkpoint: remove it"),
    "checkpoints that are a home": ("run", RUN, checkpoints_elsewhere, "is no checkpoint: remove it"),
}
SLOW = set()


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_it_is_refused_in_one_line_and_its_benign_twin_loads(name, bases, wikitext, tmp_path, monkeypatch, capfd):
    base, words, change, told = CASES[name]
    memory = {}
    for is_hostile in (False, True):
        inside, outside = tmp_path / str(is_hostile), tmp_path / str(is_hostile) / "outside"
        outside.mkdir(parents=True)
        (outside / "target").write_text("secret\n") if base not in ("gpt2", "run") else None
        folder = inside / "strangers/it"
        shutil.copytree(bases / base, folder)
        change(folder, outside, is_hostile)
        own = {"IT": folder, "WIKITEXT": wikitext, "DEST": inside / "new", "CLASSIFIER": bases / "classifier"}
        given = [str(own[word]) if word in own else word.replace("IT/", f"{folder}/") for word in words]
        with Watch(outside, inside / "strangers") as watch:
            status, out, err = command(monkeypatch, capfd, *given)
        memory[is_hostile] = watch.memory
        if not is_hostile:
            assert status == 0, err
    assert (status, err.count("\n"), err[:7]) == (2, 1, "error: "), (out, err)
    assert hostile.re.search(told, err), err
    assert not watch.done and not (outside / "run").exists()
    assert memory[True] < memory[False] + 2**30
