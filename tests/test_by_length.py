import numpy as np
import pytest

from common.data.by_length import MEGABATCH, examples_by_length

BATCH = 16


def batches(lengths, epoch=0, seed=0, batch=BATCH):
    """The examples of each step of an epoch, [steps, batch]."""
    steps = -(-len(lengths) // batch)
    return np.stack(list(examples_by_length(range(epoch * steps, (epoch + 1) * steps), lengths, batch, seed)))


def padding(lengths, found):
    """The fraction of a split's tokens that are padding, where each batch is as long as its longest example."""
    padded = sum(lengths[step[step >= 0]].max() * len(step) for step in found)
    return 1 - lengths.sum() / padded


@pytest.fixture(scope="module")
def lengths():
    """Of some 200 batches, the last one partial, as of real sentences."""
    return np.minimum(np.random.default_rng(0).lognormal(3, 0.6, 3201).astype(np.int32) + 3, 128)


def test_each_example_comes_once_an_epoch(lengths):
    found = batches(lengths)
    assert sorted(found[found >= 0]) == list(range(len(lengths)))
    assert (found < 0).sum() == BATCH - 1


def test_little_is_padding(lengths):
    at_random = np.random.default_rng(1).permutation(len(lengths))[: 200 * BATCH].reshape(-1, BATCH)
    assert padding(lengths, batches(lengths)) < 0.06
    assert padding(lengths, at_random) > 0.4


def test_the_order_is_another_in_each_epoch_and_by_each_seed(lengths):
    orders = [batches(lengths, epoch, seed).ravel() for epoch, seed in [(0, 0), (0, 0), (1, 0), (0, 1)]]
    np.testing.assert_array_equal(orders[0], orders[1])
    for other in orders[2:]:
        assert (orders[0] == other).mean() < 0.02


def test_short_and_long_batches_come_in_a_random_order(lengths):
    """In a megabatch, and which batch of its megabatch is the first is another in each."""
    means = np.array([lengths[step[step >= 0]].mean() for step in batches(lengths)])
    whole = means[:200].reshape(4, 50)  # a quarter of an epoch's
    assert all(abs(np.corrcoef(part, np.arange(50))[0, 1]) < 0.4 for part in whole)
    assert len({tuple(np.argsort(part)) for part in whole}) == len(whole)


@pytest.mark.parametrize(("examples", "batch"), [(3201, 16), (900, 16), (2490, 128)])
def test_an_example_has_other_company_in_the_next_epoch(lengths, examples, batch):
    """Of the pairs that share a batch, few share one again, with few batches in an epoch too."""

    def pairs(epoch):
        found = batches(lengths[:examples], epoch, batch=batch)
        return {(a, b) for step in found for a in step for b in step if 0 <= a < b}

    first, second = pairs(0), pairs(1)
    assert len(first & second) / len(first) < 0.25


@pytest.mark.parametrize("number", [1, 15, 16, 17, MEGABATCH * BATCH, MEGABATCH * BATCH + 1])
def test_any_number_of_examples(number):
    found = batches(np.arange(number, dtype=np.int32) + 1)
    assert sorted(found[found >= 0]) == list(range(number)) and found.shape == (-(-number // BATCH), BATCH)


@pytest.mark.parametrize("examples", [3201, 70, 5])
def test_a_step_has_the_same_examples_wherever_the_reading_begins(lengths, examples):
    """Also where a run goes on in a later epoch."""
    lengths = lengths[:examples]
    steps = -(-examples // BATCH)
    whole = [*batches(lengths), *batches(lengths, epoch=1)]
    for start in range(0, 2 * steps, 37):
        rest = list(examples_by_length(range(start, 2 * steps), lengths, BATCH, 0))
        np.testing.assert_array_equal(rest, whole[start:])
    assert not list(examples_by_length(range(3, 3), lengths, BATCH, 0))
