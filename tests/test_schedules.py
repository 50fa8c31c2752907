import keras
import numpy as np
import pytest

from common.training import WarmUpPolynomialDecay


def test_one_continuous_curve_from_above_zero_to_the_peak_to_zero():
    schedule = WarmUpPolynomialDecay(peak=0.5, total_steps=100, warmup=0.09)
    rates = np.array([float(schedule(step)) for step in range(101)])
    assert rates[0] == pytest.approx(0.05) and rates.argmax() == 9 and rates[9] == pytest.approx(0.5)
    np.testing.assert_allclose(np.diff(rates[:10]), 0.05, rtol=1e-4)
    np.testing.assert_allclose(np.diff(rates[9:]), -0.5 / 91, rtol=1e-4)
    assert rates[100] == pytest.approx(0, abs=1e-8)


def test_the_decay_is_keras_own():
    ours = WarmUpPolynomialDecay(peak=0.5, total_steps=50, warmup=0.0, power=2.0)
    keras_own = keras.optimizers.schedules.PolynomialDecay(0.5, 50, end_learning_rate=0.0, power=2.0)
    assert [float(ours(step)) for step in range(50)] == [float(keras_own(step)) for step in range(50)]


@pytest.mark.parametrize(("total_steps", "warmup"), [(1, 0.1), (1, 0.99), (2, 0.5), (3, 0.99)])
def test_the_shortest_run_reaches_the_peak_and_never_zero(total_steps, warmup):
    rates = [float(WarmUpPolynomialDecay(0.5, total_steps, warmup)(step)) for step in range(total_steps)]
    assert max(rates) == pytest.approx(0.5) and min(rates) > 0


def test_it_survives_saving():
    schedule = WarmUpPolynomialDecay(0.5, 10, 0.3, 2.0)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert again.get_config() == schedule.get_config() and float(again(7)) == float(schedule(7))
