"""For whom a worker waits: told within a minute, and ended in time."""

import os

import pytest

from keras_replicas.waiting import SECONDS_BEFORE_WORD, Status, Wait, call_of_all_workers, current_call
from tests.conftest import ROOT, python

PROGRAM = """
import sys, time
import keras, numpy as np
import keras_replicas as kr

strategy = kr.make_strategy()
x = np.ones((8, 3), "float32")
with strategy.scope():
    model = kr.data_parallel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=4, verbose=0)


class Data:
    '''The data, of which no worker tells the others anything.'''

    def __init__(self):
        self._batches = kr.Batches((x,), 4, shuffle=False)

    def __len__(self):
        return len(self._batches)

    def iter_from_step(self, step, context):
        return self._batches.iter_from_step(step, context)


what = sys.argv[1]
if what == "alone" and kr.is_chief():
    model.predict(x, verbose=0)
elif what == "in a step" and kr.is_chief():
    model.predict(Data(), verbose=0)
elif what == "other calls":
    model.predict(x, verbose=0) if kr.is_chief() else model.evaluate(x, x[:, :1], verbose=0)
else:
    time.sleep(600)
"""


def test_nothing_is_said_while_all_are_there():
    wait = Wait(100)
    for second in range(0, 1000, 10):
        assert wait.look(Status(2, "predict", 3), {1: Status(2, "predict", 3)}, second) == ""
    assert not wait.is_over


def test_a_worker_that_waits_says_so_once_and_then_ends():
    wait, said = Wait(100), {}
    for second in range(0, 200, 10):
        said[second] = wait.look(Status(2, "predict", 3), {1: Status(1, "", 3)}, second)
        if wait.is_over:
            break
    first, last = (second for second, text in said.items() if text)
    assert SECONDS_BEFORE_WORD <= first < 60 and last == 100
    assert said[first].startswith(
        "worker 0 waits in predict for worker 1, which is in none of these calls. All workers"
    )
    assert "made no step and no call for 100 s" in said[last]


def test_the_time_begins_anew_with_each_step_of_the_others():
    wait = Wait(100)
    for second in range(0, 1000, 10):
        wait.look(Status(2, "predict", 3), {1: Status(1, "fit", second // 50)}, second)
    assert not wait.is_over


def test_a_call_may_be_inside_another():
    with call_of_all_workers("fit"):
        with call_of_all_workers("evaluate"):
            assert current_call() == "evaluate"
        assert current_call() == "fit"
    assert current_call() == ""


SENTENCES = {
    "alone": "worker 0 waits in predict for worker 1, which did not come within 15 s. All workers must make the same",
    "in a step": "worker 0 waits in predict for worker 1, which made no step and no call for 15 s. All workers must",
    "other calls": "worker 1 is in evaluate, and worker 0 in predict. All workers must make the same calls",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SENTENCES)
def test_a_call_of_the_chief_alone_ends_with_a_sentence(what, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["launch", "--workers", "2", "--log-dir", tmp_path / "logs", tmp_path / "program.py", what]
    done = python(
        "-m", "keras_replicas", *words, env=os.environ | {"WAIT_TIMEOUT": "15", "PYTHONPATH": str(ROOT)}, timeout=300
    )
    logs = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*") if path.is_file())
    assert done.returncode != 0
    assert SENTENCES[what] in logs + done.stderr


@pytest.mark.parametrize("value", ["0", "soon", "-1"])
def test_a_malformed_timeout_is_refused(value, monkeypatch):
    from keras_replicas import UserError
    from keras_replicas.waiting import wait_timeout

    monkeypatch.setenv("WAIT_TIMEOUT", value)
    with pytest.raises(UserError, match="WAIT_TIMEOUT must be a whole number"):
        wait_timeout()
