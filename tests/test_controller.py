"""The Controller: a run is the same whatever the replicas, the loops' length, and where it was stopped."""

import json
import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import controller as module
from common.controller import Controller, Evaluator, Trainer, when_best
from keras_replicas import Batches, Checkpoints, apply_summed, first_replica, make_strategy, sum_over_replicas

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
TRUE = np.array([[1.0], [-2.0], [0.5]], np.float32)
DATA = X, X @ TRUE
BATCH = 8


class LeastSquares(Trainer):
    def __init__(self, strategy, model, optimizer):
        super().__init__(strategy, Batches(DATA, BATCH, seed=1))
        self.model, self.optimizer, self.loops, self.losses = model, optimizer, [], []

    def train_step(self, iterator):
        def replica_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((self.model(x) - y) ** 2) / BATCH
            gradients = tape.gradient(loss, self.model.trainable_variables)
            gradients, loss = sum_over_replicas((gradients, loss))
            apply_summed(self.optimizer, gradients, self.model.trainable_variables)
            return {"loss": loss}

        return first_replica(self.strategy, self.strategy.run(replica_step, args=next(iterator)))

    def train_loop_end(self, values):
        self.loops.append(len(values["loss"]))
        self.losses += values["loss"].tolist()
        return super().train_loop_end(values)


class Distance(Evaluator):
    def __init__(self, strategy, model):
        super().__init__(strategy, Batches(DATA, BATCH, shuffle=False))
        self.model = model

    def eval_step(self, iterator):
        def replica_step(x, y):
            return sum_over_replicas(tf.reduce_sum(tf.abs(self.model(x) - y)))

        return first_replica(self.strategy, self.strategy.run(replica_step, args=next(iterator)))

    def eval_end(self, outputs):
        return {"closeness": -float(sum(outputs)) / len(X)}


def make(folder, replicas=1, every=None, **options):
    strategy = make_strategy(replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    checkpoints = Checkpoints(folder / "checkpoints", every=every, model=model, optimizer=optimizer)
    trainer, evaluator = LeastSquares(strategy, model, optimizer), Distance(strategy, model)
    return model, Controller(trainer, evaluator, checkpoints, **options)


def values_shown(folder):
    """TensorBoard's, by tag and step, while the writer has the file open as after a kill."""
    board = EventAccumulator(str(folder), {"tensors": 0})
    board.Reload()
    return {
        tag: {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in board.Tensors(tag)}
        for tag in board.Tags()["tensors"]
    }


def test_it_trains_and_evaluates_by_turns(tmp_path, capsys):
    seen = []

    def act(step, output):
        assert step in values_shown(tmp_path / "board")["train/loss"]  # whatever kills the run now
        seen.append((step, output))
        tf.summary.scalar("validation/of_an_action", 2.0)

    options = {"steps_per_loop": 4, "eval_actions": [act], "summary_dir": tmp_path / "board"}
    model, controller = make(tmp_path, 2, **options)
    output = controller.train_and_evaluate(20, eval_interval=6)
    loops = controller.trainer.loops
    assert loops[0] == 1 and max(loops) == 4  # the first loop is of unknown speed
    assert {4, 6, 8, 12, 16, 18, 20} <= {*np.cumsum(loops).tolist()}
    assert [step for step, _ in seen] == [6, 12, 18, 20] and seen[-1][1] == output
    np.testing.assert_allclose(model.get_weights()[0], TRUE, atol=0.2)
    printed = capsys.readouterr().out.splitlines()
    kinds = [line.split("|")[0].strip() for line in printed]
    assert kinds.count("train") == len(loops) and kinds.count("validation") == 4 and "steps/s | loss" in printed[0]
    values = values_shown(tmp_path / "board")
    assert values["validation/closeness"] == pytest.approx({step: each["closeness"] for step, each in seen})
    assert values["validation/of_an_action"] == dict.fromkeys((6, 12, 18, 20), 2.0)
    ends = np.cumsum(loops).tolist()
    means = [np.mean(controller.trainer.losses[end - loop : end]) for loop, end in zip(loops, ends, strict=True)]
    assert values["train/loss"] == pytest.approx(dict(zip(ends, means, strict=True)))


def test_neither_replicas_nor_the_length_of_loops_change_what_is_computed(tmp_path):
    losses = []
    for number, (replicas, loop) in enumerate(((1, 1), (1, 7), (2, 4), (4, 100))):
        _, controller = make(tmp_path / str(number), replicas, steps_per_loop=loop)
        controller.train_and_evaluate(12, eval_interval=5)
        losses.append(controller.trainer.losses)
    np.testing.assert_allclose(losses[1:], [losses[0]] * 3, rtol=1e-5)


def test_it_goes_on_where_it_was_stopped(tmp_path):
    whole, controller = make(tmp_path / "whole", steps_per_loop=4)
    output, losses = controller.train_and_evaluate(20, eval_interval=7), controller.trainer.losses

    def stop(step, output):
        os.kill(os.getpid(), signal.SIGTERM)

    _, controller = make(tmp_path / "stopped", steps_per_loop=4, eval_actions=[stop])
    with pytest.raises(SystemExit) as ended:
        controller.train_and_evaluate(20, eval_interval=7)
    assert ended.value.code == 143 and controller.global_step == controller.checkpoints.saved_step == 7
    begun = []
    model, controller = make(tmp_path / "stopped", steps_per_loop=4, init_fn=lambda: begun.append("anew"))
    assert controller.global_step == 7 and not begun  # in the middle of an epoch of 5
    assert controller.train_and_evaluate(20, eval_interval=7) == output
    assert controller.trainer.losses == losses[7:] and (model.get_weights()[0] == whole.get_weights()[0]).all()
    _, controller = make(tmp_path / "stopped")
    assert controller.train_and_evaluate(20, eval_interval=7) == output and not controller.trainer.loops


def test_without_a_checkpoint_it_begins_by_init_fn(tmp_path):
    called = []
    _, controller = make(tmp_path, init_fn=lambda: called.append("loads"))
    assert called == ["loads"] and controller.global_step == 0


@pytest.mark.parametrize("seconds", [0.5, 5.0])
def test_a_loop_is_no_longer_than_some_seconds_by_the_speed_of_the_last(seconds, tmp_path, monkeypatch):
    """By a clock on which a step takes 50 ms: signals are not handled in a loop."""
    _, controller = make(tmp_path, steps_per_loop=100)
    monkeypatch.setattr(module, "LOOP_SECONDS", seconds)
    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.05 * sum(controller.trainer.loops))
    controller.train_and_evaluate(200, eval_interval=200)
    assert max(controller.trainer.loops) == pytest.approx(min(seconds / 0.05, 100), abs=1)


def test_checkpoints_are_written_where_due_and_at_the_end(tmp_path):
    _, controller = make(tmp_path, every=5, steps_per_loop=2)
    controller.train_and_evaluate(11, eval_interval=99)
    assert sorted(int(path.stem[5:]) for path in tmp_path.glob("checkpoints/ckpt-*.index")) == [6, 10, 11]


@pytest.mark.parametrize(("metric", "values"), [("val_f1", (0.5, 0.4, 0.6)), ("val_loss", (0.6, 0.7, 0.5))])
def test_an_action_on_the_best_score_and_a_resumed_run_knows_it(metric, values, tmp_path, monkeypatch):
    called = []
    for step, value in enumerate(values):  # each in a run that goes on
        when_best(metric, lambda step, metrics: called.append(step), tmp_path)(step, {metric: value})
    assert called == [0, 2] and json.loads((tmp_path / "best.json").read_text()) == {metric: values[2]}
    monkeypatch.setattr(module, "is_chief", lambda: False)
    when_best(metric, lambda step, metrics: called.append(step), tmp_path / "other")(3, {metric: 9.0})
    assert called == [0, 2]
