import math

import numpy as np
import pytest

from common.metrics import count_ids, perplexity, unigram_loss


def test_unigram_loss_against_a_hand_count():
    training = np.array([[0, 3, 3, 3], [0, 4, 3, 5]])
    # Of ids 3, 3, 3, 4, 3, 5 (0 does not count), with one added to each of six: 3 has 5/12, 4 has 2/12, 2 has 1/12.
    targets = [np.array([[3, 4]]), np.array([2, 3])]
    expected = -(2 * math.log(5 / 12) + math.log(2 / 12) + math.log(1 / 12)) / 4
    assert unigram_loss(count_ids(training, 6), targets, never_targets=[0]) == pytest.approx(expected)


def test_perplexity():
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e9) == math.inf
