import json
import math
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.classification_scores import told_of as told_of_classifier
from common.files import write_json
from common.language_model import told_of
from common.log import RunLog, one_epoch, report
from keras_replicas import Batches, UserError, data_parallel, make_strategy
from keras_replicas.cluster import worker_config

EXAMPLES, BATCH, LENGTH = 20, 8, 6  # an epoch has 3 steps
TOKENS = np.arange(EXAMPLES) % LENGTH + 1  # of each example


def data():
    ids = np.arange(EXAMPLES * LENGTH).reshape(EXAMPLES, LENGTH) % 7
    mask = (np.arange(LENGTH) < TOKENS[:, None]).astype(np.int32)
    return Batches(({"token_ids": ids, "padding_mask": mask}, ids.sum(1) % 2), BATCH, seed=3)


def trained(folder, pause=0.0):
    """The log of two epochs, with a pause in the callbacks of each epoch and step."""
    with make_strategy(2).scope():
        inputs = {name: keras.Input([LENGTH], dtype="int32", name=name) for name in ("token_ids", "padding_mask")}
        embedded = keras.layers.Embedding(7, 4)(inputs["token_ids"])
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(embedded)))
        rate = keras.optimizers.schedules.PolynomialDecay(0.5, 10, 0.1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(rate), loss, weighted_metrics=["accuracy"])
        model = data_parallel(model)
    log = RunLog(folder, data())
    times = dict.fromkeys(("on_epoch_end", "on_train_batch_end"), lambda *_, **__: time.sleep(pause))
    callbacks = [log, keras.callbacks.LambdaCallback(**times)]
    model.fit(data(), epochs=2, verbose=0, callbacks=callbacks, validation_data=data())
    return log


def lines_of(folder):
    """The lines of a run's steps, but for one that is being written."""
    path = Path(folder, "steps.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


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
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.5 - 0.04 * step for step in range(6)])
    shown = board(tmp_path)
    assert shown.keys() == {"train/loss", "train/accuracy", "train/learning_rate"}
    for tag, values in shown.items():
        assert values == pytest.approx({line["step"]: line[tag.removeprefix("train/")] for line in lines})

    results = log.results(2)
    assert results["train_loss"] == pytest.approx(np.mean([line["loss"] for line in lines[3:]]))
    assert results["padding_fraction"] == pytest.approx(1 - TOKENS.sum() / (EXAMPLES * LENGTH))
    assert results["peak_gpu_memory_mb"] == []  # the tests have none
    assert results["peak_memory_mb"] > 100 and results["hardware"]["cores"] and "tensorflow" in results["versions"]


def test_throughput_leaves_out_the_first_call_validation_and_callbacks(tmp_path):
    results = trained(tmp_path, pause=0.3).results(2)
    assert 0 < results["seconds"] < 8 * 0.3  # the pauses alone
    assert [len(y) for _, y in one_epoch(data())] == [8, 8, 4]
    per_step = TOKENS.sum() / 3
    assert results["tokens_per_second"] == pytest.approx(5 * per_step / results["seconds"], rel=0.05)


@pytest.mark.parametrize(("step", "line", "loss"), [(2, "garbage", 5), (5, '{"step": 5}', math.nan)])
def test_what_lines_that_are_lost_or_damaged_told_is_not_in_the_results(step, line, loss, tmp_path):
    lines = [f'{{"step": {step}, "loss": {step}, "learning_rate": {step}}}' for step in range(1, 7)]
    (tmp_path / "steps.jsonl").write_text("\n".join([*lines[: step - 1], line, *lines[step:], ""]))
    log = RunLog(tmp_path, data())
    log.begin(6)
    results = log.results(2)
    assert (results["steps"], results["tokens_per_second"]) == (6, 0)
    found = *results["learning_rate"].values(), results["train_loss"]
    assert found == pytest.approx((1, math.nan, 6, loss), nan_ok=True)


def test_of_several_workers_the_chief_alone_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config(["127.0.0.1:1", "127.0.0.1:2"], 1)))
    log = RunLog(tmp_path, data())
    log.begin(0)
    log.write({"loss": np.arange(4.0), "learning_rate": np.ones(4)})
    assert log.step == 4 and not list(tmp_path.iterdir())
    assert log.results(2)["train_loss"] == 3  # the fourth begins an epoch


RUN = {"steps": 1062, "global_batch_size": 32, "replicas": 2, "seconds": 44.3, "tokens_per_second": 49284.3}
RUN |= {"peak_memory_mb": 1188, "padding_fraction": 0.0004, "train_loss": 3.623}
RUN |= {"learning_rate": {"first": 6.61e-05, "peak": 7.07e-03, "last": 7.4e-06}}
RUN |= {"unknown_fraction": 0.0123, "cut_texts": "12 of 600 texts are cut to 128 tokens"}
RUN |= {"config": {"workdir": "runs/a", "model": None}}
LANGUAGE_MODEL = RUN | {"val_loss": 3.815, "val_perplexity": 45.4, "val_unigram_loss": 6.054, "val_accuracy": 0.344}
LANGUAGE_MODEL |= {"val_bits_per_character": 1.701}
CLASSIFIER = RUN | {"val_loss": 0.5, "val_accuracy": 0.812, "val_f1": 0.75, "val_bag_of_words_accuracy": 0.7}
CLASSIFIER |= {"val_majority_accuracy": 0.684, "val_majority_f1": 0.812}


def test_the_report_tells_the_memory_of_gpus_and_what_the_model_did_not_see():
    told = report(LANGUAGE_MODEL | {"peak_gpu_memory_mb": [1000, 1200]}, told_of)
    assert "peak memory          1,188 MiB of host memory, 1,200 MiB of a GPU's\n" in told
    assert "unknown tokens       1.23%\ntexts                12 of 600 texts are cut to 128 tokens\n" in told


def test_the_report_of_a_classifier():
    told = report(CLASSIFIER | {"test_loss": 0.4, "test_accuracy": 0.8}, told_of_classifier)
    assert "validation accuracy       81.2%, F1 0.750\n  majority-class baseline 68.4%, F1 0.812\n" in told
    assert "  bag-of-words baseline   70.0%\ntest loss                 0.400\ntest accuracy             80.0%\n" in told
    values = {"val_loss": 0.5, "val_mean_loss": 2.0, "val_pearson": 0.9, "val_bag_of_words_pearson": 0.1}
    told = report(RUN | values, told_of_classifier)
    assert "  mean baseline                2.000\nvalidation Pearson correlation 0.900\n  bag-of-words" in told


def test_a_file_of_results_gives_the_same_report(tmp_path):
    rates = {"first": math.nan, "peak": math.inf, "last": 0.0}
    odd = LANGUAGE_MODEL | {"val_loss": math.nan, "val_perplexity": math.nan, "learning_rate": rates}
    for results in (LANGUAGE_MODEL, odd):
        write_json(tmp_path / "results.json", results)
        read = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
        assert report(read, told_of) == report(results, told_of).replace("inf", "nan")
        with pytest.raises(UserError, match="cannot be shown .'replicas'.: remove the run's results.json"):
            report({name: read[name] for name in read if name != "replicas"}, told_of)


@pytest.mark.parametrize(
    ("results", "changes", "warned"),
    [
        (LANGUAGE_MODEL, {}, False),
        (LANGUAGE_MODEL, {"val_loss": 6.03}, True),
        (LANGUAGE_MODEL, {"val_loss": math.nan}, True),
        (CLASSIFIER, {"test_loss": 0.5, "test_accuracy": 0.1, "test_majority_accuracy": 0.7}, False),
        (CLASSIFIER, {"val_accuracy": 0.705}, True),  # no more than chance above the bag of words
        (CLASSIFIER, {"val_accuracy": math.nan}, True),
        (CLASSIFIER, {"val_accuracy": 1.0, "val_bag_of_words_accuracy": 1.0}, False),  # nothing could be better
        (CLASSIFIER, {"val_mean_loss": 0.4}, True),
        (RUN, {}, False),
    ],
)
def test_a_model_that_does_not_beat_its_baseline_is_warned_of(results, changes, warned):
    of, whole = told_of_classifier if results is CLASSIFIER else told_of, results | changes
    assert warned == ("warning" in (told := report(whole, of))) == ("show it longer sequences" in told)
    del whole["cut_texts"]
    assert warned == ("warning" in (told := report(whole, of))) == ("try a third of the learning rate" in told)
    assert warned == ("45 steps are few: give more epochs" in report(whole | {"steps": 45}, of))
