"""Models uploaded while a run trains, by the real `hf upload` and KerasHub, to a Hub of our own on loopback."""

import errno
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest
from huggingface_hub import constants

from common.model import publish as publishing
from common.model.masked_lm import masked_lm_from_size
from common.model.presets import save_task
from common.model.publish import Publish
from common.model.sizes import check_push_to
from keras_replicas import Batches, UserError, data_parallel, make_strategy
from keras_replicas.cluster import worker_config
from tests.conftest import assert_same, files_in, python, wait_until
from tests.hub import URI, StandIn

TOKENIZER = keras_hub.models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(95))])
PREPROCESSOR = keras_hub.models.BertMaskedLMPreprocessor(TOKENIZER, sequence_length=16)


def figures(card):
    return json.loads(card.split("```json\n")[1].split("```")[0])


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """One that this process's huggingface_hub, which has read its environment, uses, and those that it starts."""
    with StandIn() as hub:
        address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_token", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        yield hub
        hub.silent = False
        hub.shutdown()


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preset") / "preset"
    save_task(masked_lm_from_size("nano", TOKENIZER, 0.0, 16), PREPROCESSOR, folder)
    return folder


@pytest.fixture
def publisher(preset, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "save_task", lambda *given: shutil.copytree(preset, given[2], dirs_exist_ok=True))
    return Publish(URI, False, tmp_path, PREPROCESSOR)


def test_each_epochs_model_arrives_with_its_card(hub, tmp_path):
    with make_strategy(2).scope():
        model = data_parallel(masked_lm_from_size("nano", TOKENIZER, 0.0, 16))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, weighted_metrics=["accuracy"])
    examples = PREPROCESSOR([" ".join(map(str, range(14)))] * 8)
    data = Batches(keras.tree.map_structure(np.array, examples), 8)
    publish = Publish(URI, False, tmp_path, PREPROCESSOR)
    arrived = []

    class Wait(keras.callbacks.Callback):  # so that the next snapshot finds no upload at hand
        def on_epoch_end(self, epoch, logs=None):
            publish.upload.wait(100)
            arrived.append((hub.files, files_in(tmp_path / "snapshot"), logs))

    model.fit(data, epochs=2, verbose=0, callbacks=[publish, Wait()])
    assert len(hub.commits) == len(arrived) == 2
    for number, (files, folder, logs) in enumerate(arrived, start=1):
        assert files == folder
        text = files["README.md"].decode()
        assert text.startswith("---\nlibrary_name: keras-hub\n")
        assert figures(text) == pytest.approx({"in training, after epoch": number} | logs)
    assert arrived[0][0]["model.weights.h5"] != arrived[1][0]["model.weights.h5"]
    loaded = keras_hub.models.BertMaskedLM.from_preset(URI, compile=False)
    assert_same(model.get_weights(), loaded.get_weights())


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.usefixtures("publisher")
def test_a_new_repository_is_private_unless_asked_for_otherwise(public, hub, preset, tmp_path, capfd):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset/my notes.txt").write_text("not the run's, and not uploaded")
    publish = Publish(URI, public, tmp_path, PREPROCESSOR)
    publish.save(tmp_path / "preset", "fill-mask", {})
    publish.finish({})
    assert hub.public is public
    assert hub.files.keys() == files_in(preset).keys() | {"README.md"}
    assert capfd.readouterr() == (f"\nuploading to {URI}\n", "")


def test_a_failed_upload_is_a_line_and_the_next_one_is_tried(hub, publisher, preset, capfd, tmp_path):
    hub.failures = 1
    publisher.on_epoch_end(0)
    publisher.upload.wait(100)
    assert "500" in (tmp_path / "upload.log").read_text()
    publisher.on_epoch_end(1)
    log = tmp_path / "upload.log"
    assert capfd.readouterr() == (f"\nA snapshot was not uploaded, see {log}.\n", "")
    publisher.upload.wait(100)
    assert hub.files.keys() == files_in(preset).keys() | {"README.md"}
    hub.failures = 1
    publisher.save(tmp_path / "preset", "fill-mask", {"val_loss": 5.0})
    publisher.finish({})
    told = capfd.readouterr().out.splitlines()
    assert told[2] == f"The run is complete, but not uploaded (see {log}). To try again:"
    hf, *words = shlex.split(told[3])
    assert hf == "hf" and words[:4] == ["upload", "someone/some-bert", "--private", str(tmp_path / "preset")]
    assert "500" in log.read_text()
    subprocess.run([sys.executable, "-m", "huggingface_hub.cli.hf", *words], check=True)
    assert hub.files == files_in(tmp_path / "preset")


def test_an_upload_that_hangs_holds_up_nothing(hub, publisher, preset, capfd, tmp_path):
    hub.silent = True
    publisher.on_epoch_end(0)
    first = publisher.upload
    publisher.on_epoch_end(1)  # for which there is no turn
    assert publisher.upload is first and first.poll() is None
    publisher.patience = 1
    publisher.save(tmp_path / "preset", "fill-mask", {})
    publisher.finish({})
    assert first.wait(10) < 0  # killed: it might have come after the finished model
    assert "The run is complete, but not uploaded" in capfd.readouterr().out
    publisher.upload.kill()
    script = (
        "import pathlib, shutil; from common.model import publish as module\n"
        f"module.save_task = lambda model, preprocessor, folder: shutil.copytree({str(preset)!r}, folder)\n"
        f"publish = module.Publish({URI!r}, False, pathlib.Path({str(tmp_path)!r}), None)\n"
        "publish.on_epoch_end(0); print(publish.upload.pid, flush=True); raise SystemExit(143)"
    )
    done = python("-c", script)
    stat = Path("/proc", done.stdout.strip(), "stat")
    wait_until(lambda: not stat.exists() or " Z " in stat.read_text(), "the upload's end")  # Z: to be asked for
    assert done.returncode == 143


def test_without_a_uri_or_not_by_the_chief_nothing_is_uploaded(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "save_task", lambda model, preprocessor, folder: folder.mkdir(parents=True))
    for worker, uri, left in ((0, "", ["preset/README.md"]), (1, URI, [])):
        monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config(["a:1", "b:1"], worker)))
        callback = Publish(uri, False, tmp_path / str(worker), PREPROCESSOR)
        callback.on_epoch_end(0, {})
        callback.save(tmp_path / str(worker) / "preset", "fill-mask", {})
        callback.finish({})
        assert [*files_in(tmp_path / str(worker))] == left and not callback.upload


def test_a_snapshot_is_whole_or_not_there(hub, publisher, tmp_path, monkeypatch, capsys):
    def fill_the_disk(model, preprocessor, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "save_task", fill_the_disk)
        publisher.on_epoch_end(2)
    assert "snapshot of epoch 3 could not be written ([Errno 28] No space left on device)." in capsys.readouterr().out
    assert not publisher.upload and not (tmp_path / "snapshot").exists()
    publisher.on_epoch_end(3)
    publisher.upload.wait(100)
    assert hub.files == files_in(tmp_path / "snapshot")


def test_the_card_has_the_runs_figures_and_nothing_private(publisher, tmp_path):
    publisher.uri = ""
    values = {"config": {"data": "/home/me/texts", "start": "hf://someone/bert"}, "steps": 1700, "val_loss": 5.5499}
    publisher.save(tmp_path / "preset", "fill-mask", values)
    publisher.finish({})
    text = (tmp_path / "preset/README.md").read_text()
    head = f"---\nlibrary_name: keras-hub\npipeline_tag: fill-mask\ntags:\n- keras\n---\n\n# {tmp_path.name}\n"
    assert text.startswith(head) and "/home" not in text
    assert figures(text) == values | {"config": {"data": "texts", "start": "hf://someone/bert"}}


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("someone/bert", "models are pushed to hf://user/name"),
        ("hf://someone/bert/tiny", "models are pushed to hf://user/name"),
        ("hf://someone/my bert", "models are pushed to hf://user/name"),
        (URI, "run `hf auth login`, or set HF_TOKEN"),
        (URI, "HF_HUB_OFFLINE is set"),
        ("", "needs a repository to be pushed to"),
    ],
)
def test_where_models_go_is_checked(uri, told, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", "OFFLINE" in told)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match=re.escape(told)) as error:
        check_push_to(uri, public=not uri)
    assert "\n" not in str(error.value) and "--" not in str(error.value)


def test_a_good_place_to_go_passes_without_tensorflow(no_tensorflow):
    words = "import sys; from common.model.sizes import check_push_to as c; c(''); c('hf://a/b')"
    environ = no_tensorflow | {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_token"}
    assert python("-c", words, env=environ).returncode == 0
