"""Models uploaded while a run trains, by the real `hf upload` and KerasHub, to a Hub of our own on loopback."""

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest
from huggingface_hub import constants

from common.model.masked_lm import masked_lm_from_size
from common.model.publish import Publish, card
from common.model.push_target import check_push_to
from common.model.saving import save_task
from keras_replicas import data_parallel, make_strategy
from tests.hub import URI, StandIn, use

ROOT = Path(__file__).parent.parent
TOKENIZER = keras_hub.models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(95))])
PREPROCESSOR = keras_hub.models.BertMaskedLMPreprocessor(TOKENIZER, sequence_length=16)


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with StandIn() as hub:
        use(hub.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub
        hub.silent = False
        hub.shutdown()


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """A small preset, which `publisher` copies instead of saving one."""
    folder = tmp_path_factory.mktemp("preset") / "preset"
    save_task(masked_lm_from_size("nano", TOKENIZER, 0.0, 16), PREPROCESSOR, folder, "the last card")
    return folder


@pytest.fixture
def publisher(preset, tmp_path):
    """A callback that copies a preset instead of saving one."""
    return Publish(URI, False, tmp_path / "snapshot", lambda folder: shutil.copytree(preset, folder))


def test_each_epochs_model_arrives_with_its_card(hub, tmp_path):
    with make_strategy(2).scope():
        model = data_parallel(masked_lm_from_size("nano", TOKENIZER, 0.0, 16))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, weighted_metrics=["accuracy"])
    x, y, weights = PREPROCESSOR([" ".join(map(str, range(14)))] * 8)
    publish = Publish(URI, False, tmp_path / "snapshot", lambda folder: save_task(model, PREPROCESSOR, folder))
    arrived = []

    class Wait(keras.callbacks.Callback):  # so that the next snapshot finds no upload at hand
        def on_epoch_end(self, epoch, logs=None):
            publish.upload.wait(100)
            arrived.append((hub.files, files_in(tmp_path / "snapshot"), logs))

    model.fit(x, y, sample_weight=weights, epochs=2, verbose=0, callbacks=[publish, Wait()])
    assert len(hub.commits) == len(arrived) == 2
    for number, (files, folder, logs) in enumerate(arrived, start=1):
        assert files == folder
        text = files["README.md"].decode()
        assert text.startswith("---\nlibrary_name: keras-hub\n") and f"after epoch {number} of a model" in text
        for name in ("loss", "accuracy"):
            assert f"| {name} | {logs[name]:.4g} |" in text
    assert arrived[0][0]["model.weights.h5"] != arrived[1][0]["model.weights.h5"]
    loaded = keras_hub.models.BertMaskedLM.from_preset(URI, compile=False)
    for ours, theirs in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(theirs), err_msg=ours.path)


@pytest.mark.parametrize("public", [False, True])
def test_a_new_repository_is_private_unless_asked_for_otherwise(public, hub, preset, tmp_path, capfd):
    preset = shutil.copytree(preset, tmp_path / "preset")
    (preset / "my notes.txt").write_text("not the run's, and not uploaded")
    Publish(URI, public, tmp_path / "snapshot", None).finish(preset)
    assert hub.public is public and hub.files["README.md"] == b"the last card"
    assert hub.files.keys() == files_in(preset).keys() - {"my notes.txt"}
    assert capfd.readouterr() == (f"\nuploading to {URI}\n", "")


def test_a_failed_upload_is_a_line_and_the_next_one_is_tried(hub, publisher, preset, capfd):
    hub.failures = 1
    publisher.on_epoch_end(0)
    publisher.upload.wait(100)
    publisher.on_epoch_end(1)
    out, err = capfd.readouterr()
    (line,) = out.strip().splitlines()
    assert "A snapshot was not uploaded (Error: " in line and "500" in line and not err
    publisher.upload.wait(100)
    assert hub.files.keys() == files_in(preset).keys()
    hub.failures = 1
    publisher.finish(preset)
    told = capfd.readouterr().out.splitlines()
    assert told[2].startswith("The run is complete, but not uploaded (Error: ") and "500" in told[2]
    hf, *words = told[3].split()
    assert hf == "hf" and words == ["upload", "someone/some-bert", str(preset), "--private"]
    subprocess.run([sys.executable, "-m", "huggingface_hub.cli.hf", *words], check=True)
    assert hub.files == files_in(preset)


def test_an_upload_that_hangs_holds_up_nothing(hub, publisher, preset, capfd, tmp_path):
    hub.silent = True
    publisher.on_epoch_end(0)
    first = publisher.upload
    publisher.on_epoch_end(1)  # for which there is no turn
    assert publisher.upload is first and first.poll() is None
    publisher.patience = 1
    publisher.finish(preset)
    assert first.poll() is not None and publisher.upload.poll() is not None
    assert "complete, but not uploaded (no answer in 1 s). To try again:\n    hf upload" in capfd.readouterr().out
    script = (
        "import pathlib, shutil; from common.model.publish import Publish\n"
        f"publish = Publish({URI!r}, False, pathlib.Path({str(tmp_path / 'other')!r}), "
        f"lambda folder: shutil.copytree({str(preset)!r}, folder))\n"
        "publish.on_epoch_end(0); print(publish.upload.pid, flush=True); raise SystemExit(143)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 143 and not Path("/proc", done.stdout.strip()).exists()


def test_without_a_uri_or_not_by_the_chief_nothing_is_done(tmp_path, monkeypatch):
    workers = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    for uri in ("", URI):
        callback = Publish(uri, False, tmp_path / "snapshot", None)
        callback.on_epoch_end(0, {})
        callback.finish(None)
        assert not list(tmp_path.iterdir()) and not callback.upload
        monkeypatch.setenv("TF_CONFIG", json.dumps(workers))


def test_a_snapshot_is_whole_or_not_there(hub, publisher, tmp_path, monkeypatch, capsys):
    def fill_the_disk(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publisher, "save", fill_the_disk)
        publisher.on_epoch_end(2)
    assert "snapshot of epoch 3 could not be written ([Errno 28] No space left on device)." in capsys.readouterr().out
    assert not publisher.upload and not (tmp_path / "snapshot").exists()
    publisher.on_epoch_end(3)
    publisher.upload.wait(100)
    assert hub.files == files_in(tmp_path / "snapshot")


def test_the_card_has_the_runs_figures_nothing_private_and_a_line_that_loads_it(preset):
    values = {"data": "/home/me/texts", "steps": 1700, "val_loss": 5.5499, "val_unigram_loss": 6.0912}
    values |= {"learning_rate": 2.82e-05, "versions": {"python": "3.11.9"}, "start": "hf://someone/bert"}
    text = card(URI, "fill-mask", "A BERT of random weights.", values)
    assert text.startswith(
        "---\nlibrary_name: keras-hub\npipeline_tag: fill-mask\ntags:\n- keras\n---\n\n# some-bert\n\nA B"
    )
    for row in (
        "| data | texts |",
        "| steps | 1,700 |",
        "| val loss | 5.55 |",
        "| val unigram loss | 6.091 |",
        "| learning rate | 2.82e-05 |",
        "| versions | python 3.11.9 |",
        "| start | hf://someone/bert |",
    ):
        assert f"\n{row}\n" in text
    assert "/home" not in text and "Losses are in nats" in text
    assert "\n# mine\n" in card("runs/mine/preset", "text-generation", "", {})
    scope = {}
    exec(text.split("```python\n")[1].split("```")[0].replace(URI, str(preset)), scope)
    assert isinstance(scope["model"], keras_hub.models.BertMaskedLM)


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("someone/bert", "models are pushed to hf://user/name"),
        ("kaggle://someone/bert/keras/tiny", "models are pushed to hf://user/name"),
        ("hf://bert", "models are pushed to hf://user/name"),
        ("hf://someone/bert/tiny", "models are pushed to hf://user/name"),
        ("hf://someone/my bert", "alphanumeric"),
        (URI, "run `hf auth login`, or set HF_TOKEN"),
        ("", "needs a repository to be pushed to"),
    ],
)
def test_where_models_go_is_checked(uri, told, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        check_push_to(uri, public=not uri)
    assert "\n" not in str(error.value) and "--" not in str(error.value)


def test_a_good_place_to_go_passes_without_tensorflow(monkeypatch, no_tensorflow):
    words = "import sys; from common.model.push_target import check_push_to as c; c(''); c('hf://a/b')"
    environ = no_tensorflow | {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_token"}
    subprocess.run([sys.executable, "-c", words], cwd=ROOT, env=environ, check=True)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        check_push_to(URI)
