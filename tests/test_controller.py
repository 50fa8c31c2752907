import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from common.data.stream import Stream
from common.run.controller import Controller, Evaluator, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from keras_replicas import Checkpoints, apply_summed, distribute, first_replica, make_strategy, sum_over_replicas

BATCH = 8
TRUE = np.array([[1.0], [-2.0], [0.5]], np.float32)


def batches(first, num_shards, shard):
    def make(step):
        x = tf.random.stateless_normal([BATCH, 3], [step, 0])
        return x, x @ TRUE

    half = BATCH // num_shards
    parts = tf.data.Dataset.range(first, 10**6).map(make)
    return parts.map(lambda *pair: [part[shard * half :][:half] for part in pair])


DATA = Stream(batches, 10**6)


class LeastSquares(Trainer):
    def __init__(self, strategy, model, optimizer, first=0):
        super().__init__(distribute(strategy, DATA, first))
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self.loops = []

    def train_loop_begin(self):
        self.loops.append("begin")

    def train_step(self, iterator):
        def replica_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((self.model(x) - y) ** 2) / BATCH
            gradients = tape.gradient(loss, self.model.trainable_variables)
            gradients, loss = sum_over_replicas((gradients, loss))
            apply_summed(self.optimizer, gradients, self.model.trainable_variables)
            return {"loss": loss}

        return first_replica(self.strategy, self.strategy.run(replica_step, args=next(iterator)))

    def train_loop_end(self, values, seconds):
        self.loops.append(len(values["loss"]))
        return super().train_loop_end(values, seconds)


class Distance(Evaluator):
    def __init__(self, strategy, model):
        super().__init__(distribute(strategy, DATA), steps=2)
        self.strategy, self.model = strategy, model
        self.begun = 0

    def eval_begin(self):
        self.begun += 1

    def eval_step(self, iterator):
        def replica_step(x, y):
            return sum_over_replicas(tf.reduce_sum(tf.abs(self.model(x) - y)))

        return first_replica(self.strategy, self.strategy.run(replica_step, args=next(iterator)))

    def eval_end(self, outputs):
        return {"closeness": -float(sum(outputs)) / BATCH / len(outputs)}


def make(folder, replicas=1, every=10**6, **options):
    strategy = make_strategy(replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    checkpoints = Checkpoints(folder / "checkpoints", every=every, model=model, optimizer=optimizer)
    step = checkpoints.restore()
    return model, Controller(
        trainer=LeastSquares(strategy, model, optimizer, step),
        evaluator=Distance(strategy, model),
        global_step=step,
        checkpoint_manager=checkpoints,
        summary_dir=folder / "tensorboard",
        **options,
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_it_trains_and_evaluates_by_turns(tmp_path, capsys, replicas):
    seen = []
    model, controller = make(tmp_path, replicas, steps_per_loop=4, eval_actions=[lambda *given: seen.append(given)])
    output = controller.train_and_evaluate(20, eval_interval=6)
    loops = controller.trainer.loops
    assert loops[::2] == ["begin"] * (len(loops) // 2) and loops[1] == 1  # of unknown speed
    assert max(loops[1::2]) == 4 and {4, 6, 8, 12, 16, 18, 20} <= set(np.cumsum(loops[1::2]))
    assert [step for step, _ in seen] == [6, 12, 18, 20] and controller.evaluator.begun == 4
    assert seen[-1][1] == output and output["closeness"] > seen[0][1]["closeness"]
    np.testing.assert_allclose(model.get_weights()[0], TRUE, atol=0.2)
    printed = capsys.readouterr().out.splitlines()
    kinds = [line.split("|")[0].strip() for line in printed]
    assert kinds.count("train") == len(loops) // 2 and kinds.count("eval") == 4
    assert "steps/s | loss" in printed[0]


def test_replicas_train_as_one_device_does(tmp_path):
    weights = []
    for replicas in (1, 2, 4):
        model, controller = make(tmp_path / str(replicas), replicas, steps_per_loop=3)
        controller.train(10)
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(weights[1:], [weights[0]] * 2, rtol=1e-6)


def test_summaries(tmp_path):
    _, controller = make(tmp_path, steps_per_loop=2, summary_interval=4)
    controller.train_and_evaluate(8, eval_interval=4)
    board = EventAccumulator(str(tmp_path / "tensorboard"), {"tensors": 0})
    board.Reload()
    steps = {tag: [event.step for event in board.Tensors(tag)] for tag in board.Tags()["tensors"]}
    train = {f"train/{name}": [4, 8] for name in ("loss", "steps_per_second")}
    assert steps == train | {"validation/closeness": [4, 8]}


def test_without_an_interval_every_loop_has_a_summary(tmp_path):
    _, controller = make(tmp_path, steps_per_loop=2, summary_interval=None)
    controller.train(4)
    board = EventAccumulator(str(tmp_path / "tensorboard"), {"tensors": 0})
    board.Reload()
    assert [event.step for event in board.Tensors("train/loss")] == [1, 2, 4]  # the first loop is timed


def test_a_kill_after_a_checkpoint_takes_nothing_from_tensorboard(tmp_path):
    def tags_in(folder):  # while the writer has it open, as a process that is killed would leave it
        board = EventAccumulator(str(folder), {"tensors": 0})
        board.Reload()
        return board.Tags()["tensors"]

    def act(step, output):
        tf.summary.scalar("validation/of_an_action", 1.0, step=step)

    _, controller = make(tmp_path, eval_actions=[act])
    controller.train_and_evaluate(1, eval_interval=1)
    assert "validation/of_an_action" in tags_in(tmp_path / "tensorboard")
    with tf.summary.create_file_writer(str(tmp_path / "own")).as_default():
        tf.summary.scalar("loss", 1.0, step=2)
        controller.checkpoint_manager.save(2)
        assert tags_in(tmp_path / "own") == ["loss"]


def test_it_goes_on_where_it_was_stopped(tmp_path):
    whole, controller = make(tmp_path / "whole", steps_per_loop=4)
    output = controller.train_and_evaluate(20, eval_interval=10)

    def stop(step, output):
        os.kill(os.getpid(), signal.SIGTERM)

    _, controller = make(tmp_path / "stopped", steps_per_loop=4, eval_actions=[stop])
    with pytest.raises(SystemExit) as ended:
        controller.train_and_evaluate(20, eval_interval=10)
    assert ended.value.code == 143 and controller.global_step == 10
    model, controller = make(tmp_path / "stopped", steps_per_loop=4)
    assert controller.global_step == 10
    assert controller.train_and_evaluate(20, eval_interval=10) == output
    assert (model.get_weights()[0] == whole.get_weights()[0]).all()
    _, controller = make(tmp_path / "stopped", steps_per_loop=4)
    assert controller.train_and_evaluate(20, eval_interval=10) == output  # once more, where only this was left to do
    assert controller.trainer.loops == []


def test_it_stops_soon_after_sigterm_however_many_steps_a_loop_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr("common.run.controller.LOOP_SECONDS", 0.5)
    _, controller = make(tmp_path, steps_per_loop=100)
    step, done = controller.trainer.train_step, []

    def sleep_or_stop():
        time.sleep(0.05)
        done.append(None)
        if len(done) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    def slow_step(iterator):
        with tf.control_dependencies([tf.py_function(sleep_or_stop, [], [])]):
            return step(iterator)

    controller.trainer.train_step = slow_step  # a loop of 100 would take 5 s
    with pytest.raises(SystemExit) as ended:
        controller.train(200)
    assert ended.value.code == 143 and 5 <= controller.global_step < 100
    assert max(controller.trainer.loops[1::2]) <= 10
    assert controller.checkpoint_manager.saved_step == controller.global_step


def test_checkpoints_are_written_where_due_and_at_the_end(tmp_path):
    _, controller = make(tmp_path, every=5, steps_per_loop=2)
    controller.train(11)
    assert sorted(int(path.stem[5:]) for path in tmp_path.glob("checkpoints/ckpt-*.index")) == [6, 10, 11]


def test_init_fn_is_called_where_there_is_nothing_to_go_on_from(tmp_path):
    _, controller = make(tmp_path)
    called = []
    checkpoints = controller.checkpoint_manager
    assert checkpoints.restore(init_fn=lambda: called.append("begins")) == 0 and called == ["begins"]
    controller.train(3)
    assert checkpoints.restore(init_fn=lambda: called.append("again")) == 3 and called == ["begins"]
