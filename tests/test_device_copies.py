"""The copies of batches on devices have no thread of their own, for which the end of an epoch would wait."""

import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops as tensorflow_module

from benchmarks.features import no_autotune
from keras_replicas import device_copies
from keras_replicas.batches import Batches, distribute
from keras_replicas.strategy import make_strategy
from tests.conftest import on_replicas

X = np.zeros((8, 4), np.float32)


@pytest.fixture
def tensorflows_own(monkeypatch):
    """TensorFlow as it is before the first call."""
    monkeypatch.setattr(tensorflow_module, "_create_device_dataset", device_copies._create)


def num_threads_that_read(dataset):
    """The fewest that five readings start: threads of other work come and go meanwhile."""
    found = []
    for _ in range(5):
        before = set(os.listdir("/proc/self/task"))
        iterator = iter(make_strategy(2).experimental_distribute_dataset(dataset))
        next(iterator)
        found.append(len(set(os.listdir("/proc/self/task")) - before))
    return min(found)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in Linux's /proc")
def test_device_copies_have_no_thread_that_tunes_them(tensorflows_own):
    dataset = tf.data.Dataset.from_tensor_slices(X).repeat().batch(2).with_options(no_autotune())
    tuned = num_threads_that_read(dataset)
    device_copies.do_not_tune_device_copies()
    assert num_threads_that_read(dataset) == tuned - 2  # one of each replica


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict", "distribute"])
def test_whatever_reads_batches_leaves_their_device_copies_untuned(tensorflows_own, call):
    if call == "distribute":
        distribute(make_strategy(2), Batches(X, 2))
    else:
        model = on_replicas(keras.layers.Dense(4))
        getattr(model, call)(X, *([] if call == "predict" else [X]), verbose=0)
    assert tensorflow_module._create_device_dataset is not device_copies._create
