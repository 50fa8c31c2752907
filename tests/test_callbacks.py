"""What `fit` leaves behind step by step: its record, TensorBoard, checkpoints, traces."""

import json
import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from common.run.best import when_best
from common.run.callbacks import FitLog, Profile
from common.run.command_line import verbosity
from common.run.speed import ModelFlops
from common.training.explicit_step import COUNTS
from keras_replicas.cluster import worker_config
from tests.test_conformance import no_autotune
from tests.test_data_parallel import LENGTH, SLOTS, examples, make_model

EPOCH, BATCH = 3, 4  # steps, and examples in each


def data(first_step=0):
    weights = np.arange(1, EPOCH * BATCH + 1)
    rows = tf.data.Dataset.from_tensor_slices(examples(EPOCH * BATCH, weights))
    return rows.batch(BATCH).repeat().skip(first_step).with_options(no_autotune())


def board(workdir):
    """By tag, the values by step."""
    values = {}
    for file in (workdir / "tensorboard").glob("events*"):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                values.setdefault(value.tag, {})[event.step] = tf.make_ndarray(value.tensor)
    return values


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


def test_regression_has_no_accuracy(tmp_path):
    log = FitLog(tmp_path, EPOCH, 2, {})
    values = dict.fromkeys(("loss", "learning_rate", *COUNTS), np.array([1.0, 2.0]))
    log.set_model(SimpleNamespace(step_values=values, steps_done=0, count_params=lambda: 1))
    log.on_train_begin()
    log.on_train_batch_begin(0)
    log.on_train_batch_end(0, dict.fromkeys(COUNTS, 2.0))
    log.on_train_end()
    seen = board(tmp_path)
    assert seen["train/loss"] == {1: 1.0, 2: 2.0} and "train/accuracy" not in seen


def test_each_step_is_in_the_record_and_in_tensorboard(tmp_path):
    model = make_model(2, steps_per_execution=2)
    log = FitLog(tmp_path, EPOCH, 2 * EPOCH, {"seed": 7, "corpus": "text"}, ModelFlops(2.0, 1e9))
    history = model.fit(
        data(), epochs=2, steps_per_epoch=EPOCH, verbose=0, callbacks=[log, seen := Seen()],
        validation_data=data(), validation_steps=EPOCH,
    ).history  # fmt: skip
    assert all(set(logs) == {"loss", "accuracy", "tokens_per_second"} for logs in seen.logs)
    assert seen.logs[-1]["tokens_per_second"] == log.speed["tokens_per_second"] > 0
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}

    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 2 * EPOCH + 1))
    assert {line["tokens"] for line in lines} == {BATCH * LENGTH}
    for epoch in range(2):
        of_epoch = lines[EPOCH * epoch :][:EPOCH]
        assert [line["labels"] for line in of_epoch] == [SLOTS * sum(range(i, i + BATCH)) for i in (1, 5, 9)]
        mean = np.average([line["loss"] for line in of_epoch], weights=[line["labels"] for line in of_epoch])
        assert history["loss"][epoch] == pytest.approx(mean, rel=1e-6)

    shown = board(tmp_path)
    assert "seed = 7" in (told := str(shown["config"][0])) and "corpus = 'text'" in told
    for name in ("loss", "accuracy", "learning_rate"):
        assert shown[f"train/{name}"] == {line["step"]: np.float32(line[name]) for line in lines}
    for name in ("tokens_per_second", "mfu", "peak_memory_mb"):
        assert sorted(shown[f"train/{name}"]) == list(range(1, 2 * EPOCH + 1))
    speeds, shares = (list(shown[f"train/{name}"].values()) for name in ("tokens_per_second", "mfu"))
    np.testing.assert_allclose(shares, np.multiply(speeds, 2e-9), rtol=1e-5)
    for name in ("loss", "accuracy"):
        values = [np.float32(value) for value in history[f"val_{name}"]]
        assert shown[f"validation/{name}"] == dict(zip((EPOCH, 2 * EPOCH), values, strict=True))


def test_the_trace_has_the_steps_asked_for(tmp_path, capsys):
    model = make_model(2, steps_per_execution=2)
    model.fit(data(), steps_per_epoch=EPOCH * 2, verbose=0, callbacks=[Profile(tmp_path, "2-2")])
    files = list(tmp_path.glob("tensorboard/plugins/profile/*/*.xplane.pb"))
    assert len(files) == 1 and "A trace is in" in capsys.readouterr().out
    names = [
        plane.event_metadata[event.metadata_id].name
        for file in files
        for plane in xplane_pb2.XSpace.FromString(file.read_bytes()).planes
        for line in plane.lines
        for event in line.events
    ]
    assert names.count("train") == 1  # a call, of two steps, that holds the step


def test_only_the_chief_writes(tmp_path, monkeypatch):
    model = make_model(1)
    monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config(["localhost:1", "localhost:2"], 1)))
    callbacks = [FitLog(tmp_path, EPOCH, EPOCH, {}), Profile(tmp_path, "1-2")]
    model.fit(data(), steps_per_epoch=EPOCH, verbose=0, callbacks=callbacks, validation_data=data(), validation_steps=1)
    assert not list(tmp_path.iterdir())


def test_when_best_remembers(tmp_path):
    for metric, sign in ("closeness", 1), ("val_loss", -1):
        saved = []
        for step, value in enumerate([-3.0, -1.0, -2.0, -1.0, -0.5]):
            action = when_best(metric, lambda at, metrics, saved=saved: saved.append(at), tmp_path)  # a new process
            action(step, {metric: sign * value, "other": math.nan})
        assert saved == [0, 1, 4]
        assert json.loads((tmp_path / "best.json").read_text()) == {metric: sign * -0.5}
        (tmp_path / "best.json").write_text("")  # as a power cut may leave it
        action(5, {metric: sign * -0.6})
        assert saved == [0, 1, 4, 5]
        (tmp_path / "best.json").unlink()


def test_a_bar_is_drawn_on_a_terminal_and_in_a_notebook(monkeypatch):
    """A log file, to which pytest's own output is alike, gets one line per epoch."""
    assert verbosity() == 2
    for kind in (
        type("Terminal", (), {"isatty": lambda self: True}),
        type("OutStream", (), {"isatty": lambda self: False, "__module__": "ipykernel.iostream"}),
    ):
        monkeypatch.setattr("sys.stdout", kind())
        assert verbosity() == 1
