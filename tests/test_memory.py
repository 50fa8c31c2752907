"""Arrays take no more memory than with plain Keras: the peak of a process of its own."""

import json
import os

import pytest

from tests.conftest import ROOT, python

PROGRAM = """
import contextlib, json, os, re, sys
import keras, numpy as np
import keras_replicas as kr

COLUMNS, BATCH = 250, 1024  # small beside the arrays, for a few batches are made ahead
kind, call, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]) * 2**20 // (4 * 250)


def mebibytes(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024


def run(x, y):
    given = {"batch_size": BATCH, "verbose": 0}
    if call == "predict":
        return model.predict(x, **given)
    if call == "evaluate":
        return model.evaluate(x, y, **given)
    return model.fit(x, y, **given, validation_split=0.5 if call == "validation_split" else 0.0)


x, y = np.ones((rows, COLUMNS), "float32"), np.zeros((rows, 1), "float32")
strategy = kr.make_strategy(2) if kind == "ours" else None
with strategy.scope() if strategy else contextlib.nullcontext():
    model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model = kr.data_parallel(model) if strategy else model
run(x[: 8 * BATCH], y[: 8 * BATCH])
before = mebibytes("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
run(x, y)
print(json.dumps(mebibytes("VmHWM") - before), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict", "validation_split"])
def test_arrays_take_no_more_memory_than_with_keras(call, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def peak(kind):
        done = python(tmp_path / "program.py", kind, call, 400, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    assert peak("ours") < 1.1 * peak("plain")
