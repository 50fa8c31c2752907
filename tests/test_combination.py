"""How results of shards combine into those of the whole."""

import numpy as np
import pytest

from keras_replicas.combination import combination_of, relative_difference

EXAMPLES = np.array([[1.0, -2.0], [3.0, 5.0], [-4.0, 2.0], [0.5, 1.0], [2.0, 2.0]])
SHARDS = (3, 2)


def results(function):
    """What a function gives of all examples, and of the shards."""
    return [function(EXAMPLES)], [[function(shard)] for shard in np.split(EXAMPLES, SHARDS[:1])]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.mean(axis=0), "mean"),
        (lambda x: x.sum(axis=0), "sum"),
        (lambda x: x.sum(axis=0) / 8, "sum"),
        (lambda x: x.mean(axis=0) / 2, "mean"),
        (lambda x: np.zeros(2), "either"),
        (lambda x: np.ones(2), "mean"),
        (lambda x: x.max(axis=0), "neither"),
        (lambda x: x.std(axis=0), "neither"),
        (lambda x: np.clip(x.mean(axis=0), -0.1, 0.1), "neither"),
        (lambda x: x, "neither"),
    ],
)
def test_results_are_means_sums_or_neither(function, kind):
    assert combination_of(*results(function), SHARDS, tolerance=1e-9).kind == kind


def test_rounding_is_no_difference():
    whole, shards = results(lambda x: x.mean(axis=0))
    rounded = [[whole[0] * (1 + 1e-7)], shards]
    assert combination_of(*rounded, SHARDS, tolerance=1e-4).kind == "mean"
    assert combination_of(*rounded, SHARDS, tolerance=1e-9).kind == "neither"


def test_tensors_that_are_only_rounding_do_not_count():
    whole, shards = results(lambda x: x.mean(axis=0))
    noise = np.array([1e-9, -2e-9])
    shards = [[*shard, 3 * noise] for shard in shards]
    assert combination_of([*whole, noise], shards, SHARDS, tolerance=1e-5).kind == "mean"


def test_infinite_numbers_are_left_out():
    whole, shards = [np.array([np.inf, 2.0])], [[np.array([np.inf, 2.0])], [np.array([1.0, 2.0])]]
    assert combination_of(whole, shards, SHARDS, tolerance=1e-9).kind == "mean"
    assert relative_difference([np.array([np.nan])], [np.array([1.0])]) == 0.0
