import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from common.controller import Controller, Evaluator, Trainer, when_best
from common.log import RunLog
from keras_replicas import Batches, Checkpoints, apply_summed, make_strategy, sum_over_replicas
from tests.test_log import board

BATCH, STEPS = 8, 200
TRUE = np.array([[1.0], [-2.0], [0.5]], np.float32)


def data(steps):
    x = np.random.default_rng(0).normal(size=(BATCH * steps, 3)).astype(np.float32)
    return Batches(({"x": x, "padding_mask": np.ones_like(x)}, x @ TRUE), BATCH)


class LeastSquares(Trainer):
    def __init__(self, strategy, model, optimizer):
        super().__init__(strategy, data(STEPS))
        self.model, self.optimizer, self.loops, train = model, optimizer, [], self.train
        self.train = lambda iterator, count: self.loops.append(count) or train(iterator, count)

    def train_step(self, x, y, *_):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self.model(x["x"]) - y) ** 2) / BATCH
        gradients = tape.gradient(loss, self.model.trainable_variables)
        gradients, loss = sum_over_replicas((gradients, loss))
        apply_summed(self.optimizer, gradients, self.model.trainable_variables)
        return {"loss": loss, "learning_rate": self.optimizer.learning_rate}


class Distance(Evaluator):
    def __init__(self, strategy, model):
        super().__init__(strategy, data(2))
        self.model, self.evaluated = model, 0

    def eval_step(self, x, y, *_):
        return sum_over_replicas(tf.reduce_sum(tf.abs(self.model(x["x"]) - y)))

    def eval_end(self, outputs):
        self.evaluated += 1
        return {"closeness": -float(sum(outputs)) / BATCH / len(outputs)}


def make(folder, replicas=1, every=10**6, **options):
    strategy = make_strategy(replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    checkpoints = Checkpoints(folder / "checkpoints", every=every, model=model, optimizer=optimizer)
    trainer, evaluator = LeastSquares(strategy, model, optimizer), Distance(strategy, model)
    return model, Controller(trainer, evaluator, checkpoints, RunLog(folder, trainer.data), **options)


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_trains_and_evaluates_by_turns(tmp_path, capsys, replicas):
    seen = []

    def act(step, output):
        tf.summary.scalar("validation/of_an_action", 1.0)
        seen.append((step, output))

    model, controller = make(tmp_path, replicas, steps_per_loop=4, eval_actions=[act])
    output = controller.train_and_evaluate(20, eval_interval=6)
    loops = controller.trainer.loops
    assert loops[0] == 1  # of unknown speed
    assert max(loops) == 4 and {4, 6, 8, 12, 16, 18, 20} <= set(np.cumsum(loops))
    assert [step for step, _ in seen] == [6, 12, 18, 20] and controller.evaluator.evaluated == 4
    assert seen[-1][1] == output and output["closeness"] > seen[0][1]["closeness"]
    np.testing.assert_allclose(model.get_weights()[0], TRUE, atol=0.2)
    printed = capsys.readouterr().out.splitlines()
    kinds = [line.split("|")[0].strip() for line in printed]
    assert kinds.count("train") == len(loops) and kinds.count("validation") == 4
    assert "steps/s | loss" in printed[0]
    every = {f"train/{name}": [*range(1, 21)] for name in ("loss", "learning_rate")}
    every |= {f"validation/{name}": [6, 12, 18, 20] for name in ("closeness", "of_an_action")}
    # While the writer has it open, as a kill would leave it.
    assert {tag: [*values] for tag, values in board(tmp_path).items()} == every
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 20
    results = controller.log.results(replicas)
    assert results["steps"] == 20 and results["tokens_per_second"] * results["seconds"] == pytest.approx(456, rel=0.2)


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    whole, controller = make(tmp_path / "whole", steps_per_loop=4)
    output = controller.train_and_evaluate(20, eval_interval=10)

    def stop(step, output):
        os.kill(os.getpid(), signal.SIGTERM)

    _, controller = make(tmp_path / "stopped", steps_per_loop=4, eval_actions=[stop])
    with pytest.raises(SystemExit) as ended:
        controller.train_and_evaluate(20, eval_interval=10)
    assert ended.value.code == 143 and controller.global_step == 10
    with (tmp_path / "stopped/steps.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # as a power cut leaves it
    model, controller = make(tmp_path / "stopped", steps_per_loop=4)
    monkeypatch.setattr("common.controller.LOOP_SECONDS", 0.0)  # of which a step may take more
    assert controller.global_step == 10
    assert controller.train_and_evaluate(20, eval_interval=10) == output
    assert (model.get_weights()[0] == whole.get_weights()[0]).all()
    assert (tmp_path / "stopped/steps.jsonl").read_text() == (tmp_path / "whole/steps.jsonl").read_text()
    _, controller = make(tmp_path / "stopped", steps_per_loop=4)
    assert controller.train_and_evaluate(20, eval_interval=10) == output  # once more, where only this was left to do
    assert controller.trainer.loops == []


def test_it_stops_soon_after_sigterm_however_many_steps_a_loop_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr("common.controller.LOOP_SECONDS", 0.5)
    _, controller = make(tmp_path, steps_per_loop=100)
    step, done = controller.trainer.train_step, []

    def sleep_or_stop():
        time.sleep(0.05)
        done.append(None)
        if len(done) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    def slow_step(*batch):
        with tf.control_dependencies([tf.py_function(sleep_or_stop, [], [])]):
            return step(*batch)

    controller.trainer.train_step = slow_step  # a loop of 100 would take 5 s
    with pytest.raises(SystemExit) as ended:
        controller.train_and_evaluate(200, eval_interval=200)
    assert ended.value.code == 143 and 5 <= controller.global_step < 100
    assert max(controller.trainer.loops) <= 10
    assert controller.checkpoints.saved_step == controller.global_step


def test_checkpoints_are_written_where_due_and_at_the_end_and_init_fn_is_called_where_there_is_none(tmp_path):
    called = []
    _, controller = make(tmp_path, every=5, steps_per_loop=2, init_fn=lambda: called.append("begins"))
    controller.train_and_evaluate(11, eval_interval=20)
    _, controller = make(tmp_path, init_fn=lambda: called.append("again"))
    assert called == ["begins"] and controller.global_step == 11
    assert sorted(int(path.stem[5:]) for path in tmp_path.glob("checkpoints/ckpt-*.index")) == [6, 10, 11]


@pytest.mark.parametrize(("metric", "best"), [("accuracy", [1, 3]), ("val_loss", [1, 2])])
def test_the_best_score_calls_an_action_in_a_resumed_run_too(metric, best, tmp_path):
    called = []
    for step, value in enumerate([0.5, 0.4, 0.6, 0.6], start=1):
        when_best(metric, lambda *given: called.append(given[0]), tmp_path)(step, {metric: value, "other": 0.0})
    assert called == best
