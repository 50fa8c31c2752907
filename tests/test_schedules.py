import keras
import numpy as np
import pytest

from common.training.scaling import learning_rate_factor, scaling_rule
from common.training.schedules import WarmUpPolynomialDecay


def test_one_continuous_curve_from_above_zero_to_the_peak_to_zero():
    schedule = WarmUpPolynomialDecay(peak=0.5, warmup_steps=9, total_steps=109)
    rates = np.array([float(schedule(step)) for step in range(110)])
    assert rates[0] == pytest.approx(0.05) and rates.argmax() == 9 and rates[9] == pytest.approx(0.5)
    np.testing.assert_allclose(np.diff(rates[:10]), 0.05, rtol=1e-4)
    np.testing.assert_allclose(np.diff(rates[9:]), -0.005, rtol=1e-4)
    assert rates[109] == pytest.approx(0, abs=1e-8)


def test_the_decay_is_keras_own():
    ours = WarmUpPolynomialDecay(peak=0.5, warmup_steps=0, total_steps=50, power=2.0)
    keras_own = keras.optimizers.schedules.PolynomialDecay(0.5, 50, end_learning_rate=0.0, power=2.0)
    assert [float(ours(step)) for step in range(50)] == [float(keras_own(step)) for step in range(50)]


def test_it_survives_saving():
    schedule = WarmUpPolynomialDecay(0.5, 3, 10, 2.0)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert again.get_config() == schedule.get_config() and float(again(7)) == float(schedule(7))


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match="got 10 of 10"):
        WarmUpPolynomialDecay(0.5, 10, 10)


def test_scaling_rules():
    assert [learning_rate_factor(rule, 4) for rule in ("linear", "sqrt", "none")] == [4, 2, 1]
    assert [scaling_rule("auto", name) for name in ("adamw", "muon", "sgd")] == ["sqrt", "sqrt", "linear"]
    assert [scaling_rule(rule, "adamw") for rule in ("linear", "sqrt", "none")] == ["linear", "sqrt", "none"]
