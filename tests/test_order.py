import numpy as np
import pytest
import tensorflow as tf

from keras_replicas.order import NO_EXAMPLE, locate, steps_per_epoch


def places(num_examples, batch, seed, epochs=2):
    positions = tf.range(epochs * steps_per_epoch(num_examples, batch) * batch, dtype=tf.int64)
    epoch, example = locate(positions, num_examples, batch, seed)
    return np.reshape(example, (epochs, -1)), np.reshape(epoch, (epochs, -1))


@pytest.mark.parametrize("num_examples", [1, 2, 7, 8, 100, 1001])
def test_every_epoch_has_each_example_once_and_fills_the_last_batch(num_examples):
    examples, epochs = places(num_examples, batch=8, seed=3)
    for epoch, row in enumerate(examples):
        assert sorted(row[row != NO_EXAMPLE]) == list(range(num_examples))
        assert len(row) % 8 == 0 and len(row) - num_examples < 8
        assert (epochs[epoch] == epoch).all()


def test_order_depends_on_seed_and_epoch_only():
    first, again, other = places(100, 8, seed=1)[0], places(100, 8, seed=1)[0], places(100, 8, seed=2)[0]
    assert (first == again).all()
    assert (first[0] != first[1]).any() and (first[0] != other[0]).any()
    unshuffled = places(100, 8, seed=None)[0]
    assert (unshuffled[0][:100] == np.arange(100)).all()


def test_order_is_random():
    """Chance leaves orders of n correlated with 0, 1, 2, ... by a standard deviation of 1 / sqrt(n)."""
    examples = places(2000, 100, seed=0, epochs=200)[0]
    correlations = [np.corrcoef(np.arange(2000), row)[0, 1] for row in examples]
    assert np.std(correlations) * 2000**0.5 == pytest.approx(1, abs=0.25)  # 5 sd; with 4 rounds of shuffling, 2.2
