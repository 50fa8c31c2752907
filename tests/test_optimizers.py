import keras
import pytest

from common.optimizers import make_optimizer


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_weight_decay_spares_biases_and_norms(name):
    dense, norm = keras.layers.Dense(2), keras.layers.LayerNormalization()
    dense.build((None, 3))
    norm.build((None, 2))
    optimizer = make_optimizer(name, 0.1, weight_decay=0.5)
    variables = [dense.kernel, dense.bias, norm.gamma, norm.beta]
    optimizer.build(variables)
    assert type(optimizer).__name__.lower() == name
    before = [keras.ops.convert_to_numpy(v) + 1 for v in variables]
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    optimizer.apply([keras.ops.zeros(v.shape) for v in variables], variables)
    for variable, value, decay in zip(variables, before, [0.05, 0, 0, 0], strict=True):
        assert keras.ops.convert_to_numpy(variable) == pytest.approx(value * (1 - decay), rel=1e-5)
