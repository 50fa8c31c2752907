import pytest

from common.training import scale


@pytest.mark.parametrize(("rule", "rate"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_the_batch_grows_with_the_replicas_and_the_rate_by_a_rule(rule, rate, capsys):
    assert scale(8, 0.1, 4, rule) == (32, pytest.approx(rate))
    told = f"global batch: 8 examples x 4 replica(s) = 32\npeak learning rate: {rate:g}, {rule} scaling of 0.1\n"
    assert capsys.readouterr().out == told
    assert scale(8, 0.1, 1, rule) == (8, 0.1)
