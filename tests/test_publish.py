"""Models uploaded while a run trains, by the real huggingface_hub and KerasHub, to a Hub of our own on loopback."""

import ast
import errno
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import keras
import keras_hub
import numpy as np
import pytest
from huggingface_hub import constants

from common.data.wordpiece import WordPieces
from common.model.causal_card import CAUSAL, causal_card
from common.model.masked_card import MASKED, masked_card
from common.model.model_card import snapshot_card
from common.model.publish import Publish
from common.model.push_target import check_push_to
from common.model.saving import save_preset
from common.run.callbacks import FitLog
from keras_replicas.errors import UserError
from recipes import bert_mlm
from tests.hub import URI, StandIn, use

ROOT = Path(__file__).parent.parent


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wait_for(condition, seconds=1200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def hub():
    with StandIn() as hub:
        yield hub
        hub.shutdown()


@pytest.fixture
def to_hub(hub, monkeypatch, tmp_path):
    use(hub.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return hub


def fit(small, callbacks, epochs=2):
    """Trains on two replicas, two steps an epoch, as bert_mlm does; what saves the model, and the last epoch's logs."""
    config = bert_mlm.Config(**small | {"epochs": epochs})
    strategy = bert_mlm.make_strategy(2)
    vocabulary, sequences = bert_mlm.make_datasets(config)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = bert_mlm.build_model(config, vocabulary, 1e-3)

    def batches(split):
        few = {name: part[:32] for name, part in sequences.items()}
        return bert_mlm.masked_batches(config, vocabulary, few, split, 16)

    Path(config.workdir).mkdir()
    save = functools.partial(save_preset, model, vocabulary, 32)
    log = FitLog(Path(config.workdir), 2, 2 * epochs, {})
    history = model.fit(
        batches("train"),
        epochs=epochs,
        steps_per_epoch=2,
        validation_data=batches("validation"),
        validation_steps=2,
        callbacks=[log, *callbacks(Path(config.workdir), save)],
        verbose=0,
        shuffle=False,
    ).history
    return model, save, {name: values[-1] for name, values in history.items()}


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """A small preset, which `publisher` copies instead of saving one."""
    folder = tmp_path_factory.mktemp("preset") / "preset"
    vocabulary = WordPieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(295))], True, True)
    model = bert_mlm.masked_lm_from_size("nano", vocabulary, 0.0, 32)
    save_preset(model, vocabulary, 32, folder)
    (folder / "README.md").write_text("the last card")
    return folder


@pytest.fixture
def publisher(preset, tmp_path):
    """A callback whose model is at the step that `step.steps_done` says, and a function that ends an epoch there."""

    def save(folder, card):
        shutil.copytree(preset, folder)
        (folder / "README.md").write_text(card)

    callback = Publish(URI, False, tmp_path, save, MASKED)
    callback.set_model(SimpleNamespace(steps_done=0))

    def end_epoch(step):
        callback.model.steps_done = step
        callback.on_train_batch_end(0)
        callback.on_epoch_end(0, {"loss": step / 8})

    return callback, end_epoch


@pytest.mark.slow
def test_each_epochs_model_arrives_with_its_card(to_hub, small):
    arrived = []

    class Wait(keras.callbacks.Callback):  # so that the next snapshot finds no upload at hand
        def on_epoch_end(self, epoch, logs=None):
            wait_for(lambda: len(to_hub.commits) == epoch + 1)
            arrived.append(to_hub.files)

    model, save, logs = fit(small, lambda workdir, save: [Publish(URI, False, workdir, save, MASKED), Wait()])
    snapshots = [Path(small["workdir"]) / "snapshots" / f"step-{step}" for step in (2, 4)]
    assert "README.md" in to_hub.commits[0]
    for files, folder in zip(arrived, snapshots, strict=True):
        assert files == files_in(folder)
    assert arrived[0]["model.weights.h5"] != arrived[1]["model.weights.h5"]
    card = arrived[1]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: keras-hub\npipeline_tag: fill-mask\n") and "at step 4" in card
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert f"| {name} | {logs[name]:.4f} |" in card
    loaded = keras_hub.models.BertMaskedLM.from_preset(URI, compile=False)
    for ours, theirs in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(theirs), err_msg=ours.path)


@pytest.mark.parametrize("public", [False, True])
def test_a_new_repository_is_private_unless_asked_for_otherwise(public, to_hub, publisher, preset, tmp_path):
    callback, end_epoch = publisher
    callback.public = public
    preset = shutil.copytree(preset, tmp_path / "preset")
    (preset / "my notes.txt").write_text("not the run's, and not uploaded")
    end_epoch(1)
    callback._thread.join()
    callback.finish(preset)
    assert to_hub.files["README.md"] == b"the last card" and to_hub.public is public
    assert to_hub.files.keys() == files_in(preset).keys() - {"my notes.txt"}


def test_a_failed_upload_is_a_line_and_the_end_tries_again(to_hub, publisher, preset, capfd):
    callback, end_epoch = publisher
    to_hub.failures = 1
    end_epoch(1)
    callback._thread.join()
    callback.on_train_batch_end(0)
    callback.on_train_batch_end(0)
    out, err = capfd.readouterr()
    (line,) = out.strip().splitlines()
    assert "step-1 was not uploaded (HfHubHTTPError: " in line and "500" in line and not err
    callback.finish(preset)
    assert to_hub.files == files_in(preset) and to_hub.files["README.md"] == b"the last card"
    assert capfd.readouterr() == (f"\nuploading to {URI}\n", "")


def test_without_a_uri_nothing_is_done(tmp_path):
    callback = Publish("", False, tmp_path / "run", None, MASKED)
    with callback:
        callback.on_train_batch_end(0)
        callback.on_epoch_end(0, {})
    callback.finish(None)
    assert not list(tmp_path.iterdir())


def test_only_the_chief_saves_and_uploads(tmp_path, monkeypatch):
    workers = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(workers))
    callback = Publish(URI, False, tmp_path / "run", None, MASKED)
    callback.on_epoch_end(0, {})
    callback.finish(None)
    assert not list(tmp_path.iterdir())


def test_a_snapshot_is_whole_or_not_there(to_hub, publisher, preset, tmp_path, monkeypatch, capsys):
    callback, end_epoch = publisher

    def fill_the_disk(folder, card):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(callback, "_save", fill_the_disk)
        end_epoch(3)
    assert "snapshot of step 3 could not be written ([Errno 28] No space left on device)." in capsys.readouterr().out
    assert callback._thread is None and not list((tmp_path / "snapshots").glob("step-*"))
    end_epoch(4)
    assert {path.name for path in (tmp_path / "snapshots").iterdir()} == {"step-4"}
    callback._thread.join()
    assert files_in(tmp_path / "snapshots/step-4").keys() == files_in(preset).keys() == to_hub.files.keys()


RESULTS = {
    "steps": 1700,
    "replicas": 2,
    "workers": 1,
    "global_batch_size": 32,
    "seconds": 58.3,
    "tokens_per_second": 49343.2,
    "learning_rate": {"first": 2.82e-05, "peak": 2e-3, "last": 3.17e-06},
    "train_loss": 5.2451,
    "val_loss": 5.5499,
    "val_accuracy": 0.1467,
    "val_perplexity": 257.21,
    "val_unigram_loss": 6.0912,
    "versions": {"python": "3.11.9", "keras": "3.15.0"},
    "hardware": {"cpu": "Some CPU", "cores": 2, "gpus": []},
    "config": {"workdir": "/home/me/run", "corpus": "/home/me/texts", "vocabulary": "/home/me/vocab.txt", "seed": 7}
    | {"push_to": URI, "architecture": "bert", "model": "tiny", "max_steps": 0},
}


def test_the_card_has_the_runs_figures_and_nothing_private():
    card = masked_card(RESULTS)
    assert card.startswith("---\nlibrary_name: keras-hub\npipeline_tag: fill-mask\ntags:\n- masked-language-modeling\n")
    for text in (
        "in the form of BERT, trained from random weights on\n`texts` for 1,700 steps",
        "| steps | 1,700 of 32 sequences |",
        "| replicas, workers | 2, 1 |",
        "| learning rate | first 2.82e-05, peak 2.00e-03, last 3.17e-06 |",
        "| training loss | 5.245, mean of the last epoch |",
        "| validation loss | 5.550, perplexity 257.2 |",
        "| validation loss of the unigram baseline | 6.091 |",
        "| validation accuracy | 14.7% |",
        "| time | 58 s, 49,343 tokens/s |",
        "| hardware | Some CPU, 2 cores |",
        "| versions | python 3.11.9, keras 3.15.0 |",
        "| configuration | architecture bert, model tiny, seed 7 |",
    ):
        assert text in card
    assert "/home" not in card and "test loss" not in card
    scores = {f"test_{name}": RESULTS[f"val_{name}"] for name in ("loss", "accuracy", "perplexity", "unigram_loss")}
    gpus = {"cpu": "Some CPU", "cores": 2, "gpus": ["A100", "A100"]}
    card = masked_card(RESULTS | scores | {"hardware": gpus})
    assert "| test loss | 5.550, perplexity 257.2 |" in card and "| hardware | A100, A100 |" in card


def test_the_card_of_a_causal_model_says_what_it_began_from():
    own = {"preset": "/home/me/base", "lora_rank": 8, "data": "", "model": None, "learning_rate": 1e-3}
    results = RESULTS | {"val_bigram_loss": 5.7, "config": RESULTS["config"] | own}
    card = causal_card(results)
    assert card.startswith("---\nlibrary_name: keras-hub\npipeline_tag: text-generation\ntags:\n- causal-language-m")
    for text in (
        "trained from `base` by LoRA on `texts`\nfor 1,700 steps",
        "| validation loss of the bigram baseline | 5.700 |",
        "lora_rank 8",
        f'CausalLM.from_preset("{URI}")',
    ):
        assert text in card
    assert "/home" not in card and "vocabulary_size" not in card
    own |= {"preset": "hf://someone/gpt2", "lora_rank": None, "data": "/home/me/answers.jsonl"}
    card = causal_card(results | {"config": results["config"] | own})
    assert "trained from `hf://someone/gpt2` on `answers.jsonl`\n" in card
    card = causal_card(results | {"config": results["config"] | own | {"preset": ""}})
    assert "trained from random weights on" in card
    capped = own | {"preset": "", "data": "", "vocabulary_size": 300, "epochs": 3}
    card = causal_card(results | {"config": results["config"] | capped})
    assert "vocabulary_size 300" in card and "epochs 3" in card
    capped |= {"max_steps": 6, "push_to": "", "workdir": "runs/mine/"}  # fewer than three epochs, it may be
    card = causal_card(results | {"config": results["config"] | capped})
    assert "epochs" not in card and "\n# mine\n" in card and '("runs/mine/preset")' in card
    assert "\n# preset\n" in snapshot_card(CAUSAL, "hf://someone/preset", 3, {})
    assert "of a causal language model that is still" in snapshot_card(CAUSAL, URI, 3, {})


def test_the_cards_snippet_runs(preset, capsys):
    snippet = masked_card(RESULTS).split("```python\n")[1].split("```")[0]
    exec(snippet.replace(URI, str(preset)), {})
    assert len(ast.literal_eval(capsys.readouterr().out)) == 5


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("someone/bert", "--push-to must be hf://user/name"),
        ("kaggle://someone/bert/keras/tiny", "--push-to must be hf://user/name"),
        ("hf://bert", "--push-to must be hf://user/name"),
        ("hf://someone/bert/tiny", "--push-to must be hf://user/name"),
        ("hf://someone/my bert", "alphanumeric"),
        (URI, "run `hf auth login`, or set HF_TOKEN"),
    ],
)
def test_where_models_go_is_checked(uri, told, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match=re.escape(told)) as error:
        check_push_to(uri)
    assert "\n" not in str(error.value)


def test_a_good_place_to_go_passes(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    check_push_to(URI)
    check_push_to("")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        check_push_to(URI)


def test_the_check_needs_no_tensorflow():
    words = "import sys; from common.model.push_target import check_push_to as c; c('hf://a/b'); print(*sys.modules)"
    environ = os.environ | {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_token"}
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert "huggingface_hub" in done.stdout.split() and not {"tensorflow", "keras"} & set(done.stdout.split())
