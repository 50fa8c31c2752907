import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.log import RunLog, one_epoch
from keras_replicas import Batches, data_parallel, make_strategy
from keras_replicas.cluster import worker_config

EXAMPLES, BATCH, LENGTH = 20, 8, 6  # an epoch has 3 steps
TOKENS = np.arange(EXAMPLES) % LENGTH + 1  # of each example


def data():
    ids = np.arange(EXAMPLES * LENGTH).reshape(EXAMPLES, LENGTH) % 7
    mask = (np.arange(LENGTH) < TOKENS[:, None]).astype(np.int32)
    return Batches(({"token_ids": ids, "padding_mask": mask}, ids.sum(1) % 2), BATCH, seed=3)


def trained(folder, epochs=2, callbacks=(), replicas=2, pause=0.0, **options):
    with make_strategy(replicas).scope():
        inputs = {name: keras.Input([LENGTH], dtype="int32", name=name) for name in ("token_ids", "padding_mask")}
        embedded = keras.layers.Embedding(7, 4)(inputs["token_ids"])
        outputs = keras.layers.Dense(2)(keras.layers.Flatten()(embedded))
        model = keras.Model(inputs, outputs)
        rate = keras.optimizers.schedules.PolynomialDecay(0.5, 10, 0.1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(rate), loss, weighted_metrics=["accuracy"])
        model = data_parallel(model)
    log = RunLog(folder, data())
    times = dict.fromkeys(("on_epoch_end", "on_train_batch_end"), lambda *_, **__: time.sleep(pause))
    wait = keras.callbacks.LambdaCallback(**times)
    model.fit(data(), epochs=epochs, verbose=0, callbacks=[log, wait, *callbacks], validation_data=data(), **options)
    return log


def lines_of(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def board(folder):
    values = {}
    for file in sorted((folder / "tensorboard").glob("events*")):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                values.setdefault(value.tag, {})[event.step] = tf.make_ndarray(value.tensor).tolist()
    return values


def test_the_file_and_tensorboard_have_each_steps_own_values(tmp_path):
    log = trained(tmp_path)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() == {"step", "loss", "accuracy", "learning_rate"} for line in lines)
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.5 - 0.04 * step for step in range(6)])
    shown = board(tmp_path)
    assert shown.keys() == {"train/loss", "train/accuracy", "train/learning_rate"}
    for tag, values in shown.items():
        assert values == pytest.approx({line["step"]: line[tag.removeprefix("train/")] for line in lines})

    results = log.results(2)
    assert results["learning_rate"] == pytest.approx({"first": 0.5, "peak": 0.5, "last": 0.3})
    assert results["train_loss"] == pytest.approx(np.mean([line["loss"] for line in lines[3:]]))
    assert (results["steps"], results["replicas"], results["workers"], results["resumed_from_step"]) == (6, 2, 1, None)
    assert results["padding_fraction"] == pytest.approx(1 - TOKENS.sum() / (EXAMPLES * LENGTH))
    assert results["peak_memory_mb"] > 100 and results["hardware"]["cores"] and "tensorflow" in results["versions"]


def test_throughput_leaves_out_the_first_call_validation_and_callbacks(tmp_path):
    results = trained(tmp_path, pause=0.3).results(2)
    assert 0 < results["seconds"] < 8 * 0.3  # the pauses alone
    assert [len(y) for _, y in one_epoch(data())] == [8, 8, 4]
    per_step = TOKENS.sum() / 3
    assert results["tokens_per_second"] == pytest.approx(5 * per_step / results["seconds"], rel=0.05)


def test_a_run_whose_lines_are_lost_has_results(tmp_path):
    log = RunLog(tmp_path, data())
    log.begin(6)
    results = log.results(2)
    assert (results["steps"], results["tokens_per_second"]) == (6, 0) and np.isnan(results["train_loss"])


def test_of_several_workers_the_chief_alone_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config(["127.0.0.1:1", "127.0.0.1:2"], 1)))
    log = RunLog(tmp_path, data())
    log.begin(0)
    log.write({"loss": np.ones(2), "learning_rate": np.ones(2)})
    assert log.step == 2 and not list(tmp_path.iterdir())
