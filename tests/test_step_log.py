import json

import numpy as np
import pytest

from common.run.speed import ModelFlops
from common.run.step_log import RunLog
from keras_replicas.cluster import worker_config


def steps(**changes):
    """The values of three steps in one call."""
    values = {
        "loss": [3.0, 2.0, 1.0],
        "accuracy": [0.0, 0.5, 1.0],
        "learning_rate": [0.1, 0.4, 0.2],
        "labels": [10.0, 20.0, 10.0],
        "tokens": [90.0, 100.0, 60.0],
        "slots": [100.0, 100.0, 100.0],
    }
    return {name: np.array(vector) for name, vector in (values | changes).items()}


def begun(folder, steps_per_epoch=3, first_step=0, **options):
    log = RunLog(folder, steps_per_epoch, **options)
    log.begin(first_step)
    return log


def test_a_line_has_each_steps_own_values(tmp_path):
    log = begun(tmp_path, 4)
    log.record(steps(), 2.0)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert lines[1] == {
        "step": 2,
        "loss": 2.0,
        "accuracy": 0.5,
        "learning_rate": 0.4,
        "labels": 20,
        "tokens": 100,
        "slots": 100,
    }
    assert log.step == len(lines) == 3


def test_an_epochs_means_are_over_its_labels_and_begin_anew(tmp_path):
    log = begun(tmp_path, 3)
    log.record(steps(), 1.0)
    assert log.epoch == {"loss": pytest.approx((30 + 40 + 10) / 40), "accuracy": pytest.approx((10 + 10) / 40)}
    log.record(steps(loss=[7.0, 7.0, 7.0]), 1.0)
    assert log.epoch["loss"] == pytest.approx(7.0)
    again = begun(tmp_path, 3, first_step=5)
    assert again.epoch["loss"] == pytest.approx(7.0) and again.padding_fraction == pytest.approx(1 - 440 / 500)


def test_an_epoch_without_labels_has_no_means(tmp_path):
    log = begun(tmp_path, 3)
    log.record(steps(loss=[0.0] * 3, labels=[0.0] * 3), 1.0)
    assert np.isnan([log.epoch["loss"], log.epoch["accuracy"]]).all()


def test_a_loss_that_is_no_number_is_null_and_nan_again_when_the_run_goes_on(tmp_path):
    log = begun(tmp_path, 4)
    log.record(steps(loss=[3.0, np.nan, np.inf]), 1.0)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == [3.0, None, None]
    again = begun(tmp_path, 4, first_step=3)
    assert np.isnan([log.epoch["loss"], again.epoch["loss"]]).all()
    assert again.epoch["accuracy"] == log.epoch["accuracy"] == pytest.approx(0.5)


def test_in_regression_there_is_no_accuracy(tmp_path):
    values = steps()
    del values["accuracy"]
    log = begun(tmp_path, 4)
    assert {"loss", "learning_rate", "mfu"} <= log.record(values, 1.0).keys()
    assert not any("accuracy" in line for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    again = begun(tmp_path, 4, first_step=3)
    assert log.epoch == again.epoch == {"loss": pytest.approx((30 + 40 + 10) / 40)}


def test_a_line_that_is_not_whole_is_left_out(tmp_path):
    log = begun(tmp_path, 3)
    log.record(steps(), 1.0)
    path = tmp_path / "steps.jsonl"
    first, _, last = path.read_text().splitlines(keepends=True)
    for cut in ('{"step": 2', '{"step": 2, "loss": 2.0', "2", '[{"step": 2}]', '"step"'):
        path.write_text(f"{first}{cut}\n{last}")
        assert begun(tmp_path, 3, first_step=3).epoch["loss"] == pytest.approx((30 + 10) / 20)
        assert path.read_text() == first + last


def test_padding_and_rates_are_of_all_steps(tmp_path):
    log = begun(tmp_path, 3)
    log.record(steps(), 1.0)
    log.record(steps(learning_rate=[0.3, 0.2, 0.05]), 1.0)
    assert log.padding_fraction == pytest.approx(1 - 500 / 600)
    assert log.learning_rate == {"first": 0.1, "peak": 0.4, "last": 0.05}


def test_speed_is_of_each_call_and_of_all_but_the_first(tmp_path):
    log = begun(tmp_path, 3, flops=ModelFlops(per_token=2.0, peak=1000.0))
    log.record(steps(), 50.0)  # compiles
    assert (log.seconds, log.tokens_per_second) == (0.0, 0.0)
    assert log.speed["tokens_per_second"] == 5.0 and log.speed["mfu"] == pytest.approx(0.01)
    log.record(steps(), 2.0)
    log.record(steps(tokens=[100.0] * 3), 3.0)
    assert (log.seconds, log.tokens_per_second) == (5.0, 550 / 5)
    assert log.speed["tokens_per_second"] == 100.0
    assert log.speed["mfu"] == pytest.approx(0.2) and log.speed["peak_memory_mb"] > 50


def test_only_the_chief_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(worker_config(["127.0.0.1:1", "127.0.0.1:2"], 1)))
    log = begun(tmp_path, 3)
    log.record(steps(), 1.0)
    assert log.step == 3 and not list(tmp_path.iterdir())
