import keras
import numpy as np
import pytest
import tensorflow as tf

from common.optimizers import do_not_reduce_again, make_optimizer
from common.strategy import make_strategy


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


@pytest.mark.parametrize("replicas", [1, 2])
def test_adamw_is_that_of_keras(replicas):
    def trained(make):
        with make_strategy(replicas).scope():
            dense = keras.layers.Dense(2)
            dense.build((None, 3))
            optimizer = make()
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            optimizer.build(dense.trainable_variables)
        dense.set_weights([np.arange(6, dtype=np.float32).reshape(3, 2), np.ones(2, np.float32)])
        do_not_reduce_again(optimizer)

        @tf.function
        def step(gradients):
            tf.distribute.get_strategy().run(lambda: optimizer.apply(gradients, dense.trainable_variables))

        with dense.kernel.value.distribute_strategy.scope():
            for i in range(5):
                step([tf.random.stateless_normal(w.shape, [i, n]) for n, w in enumerate(dense.trainable_variables)])
        return dense.get_weights()

    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 5)
    knobs = {"weight_decay": 0.3, "beta_2": 0.98, "epsilon": 1e-6}
    ours = trained(lambda: make_optimizer("adamw", schedule, 0.3))
    theirs = trained(lambda: keras.optimizers.AdamW(schedule, **knobs))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)
