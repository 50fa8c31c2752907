import keras
import numpy as np
import pytest
import tensorflow as tf

from common.devices.strategy import make_strategy
from common.training.optimizers import do_not_reduce_again, make_optimizer


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
    kernels = 0.1 if name == "lamb" else 0.05  # of LAMB's step, the trust ratio gives the length
    for variable, value, decay in zip(variables, before, [kernels, 0, 0, 0], strict=True):
        assert keras.ops.convert_to_numpy(variable) == pytest.approx(value * (1 - decay), rel=1e-5)


# By hand. The first step of Adam is the gradient's sign r, as both of its means are the gradient's own. Of the kernel
# x = (3, -4), whose norm is 5: r + 0.1 x = (1.3, 0.6), whose norm is sqrt(2.05), and the step 0.01 * 5 / sqrt(2.05)
# of it. Of the kernel of zeros, and the bias, which is spared: 0.01 r.
LAMB_STEPS = [([3.0, -4.0], [1.3 * 0.05 / 2.05**0.5, 0.6 * 0.05 / 2.05**0.5]), ([0.0, 0.0], [0.01, 0.01])]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "LossScale"])
@pytest.mark.parametrize(("kernel", "change"), LAMB_STEPS, ids=str)
def test_lamb_is_that_of_its_paper(kernel, change, scaled, replicas):
    strategy = make_strategy(replicas)
    with strategy.scope():
        dense = keras.layers.Dense(2)
        dense.build((None, 1))
        optimizer = make_optimizer("lamb", 0.01, weight_decay=0.1)
        optimizer.epsilon = 1e-12
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        optimizer.build(dense.trainable_variables)
    before = [np.array([kernel], np.float32), np.array(kernel, np.float32)]
    dense.set_weights(before)
    do_not_reduce_again(optimizer)
    gradients = [optimizer.scale_loss(tf.constant([[0.5, 2.0]])), optimizer.scale_loss(tf.constant([0.5, 2.0]))]
    step = tf.function(lambda: strategy.run(lambda: optimizer.apply(gradients, dense.trainable_variables)))
    step()
    for variable, old, less in zip(dense.trainable_variables, before, [[change], [0.01, 0.01]], strict=True):
        for copy in strategy.experimental_local_results(variable.value):
            np.testing.assert_allclose(old - copy, less, rtol=1e-4)
    assert round(float((before[0] - dense.kernel)[0, 0]), 4) in (0.0454, 0.01)


def test_lamb_is_its_papers_algorithm_for_many_steps():
    """Algorithm 2 in NumPy, with weights of BERT's size and gradients near epsilon, where each term counts."""
    draw = np.random.default_rng(0)
    x = draw.normal(scale=0.02, size=(3, 2))
    gradients = draw.normal(scale=1e-6, size=(6, 3, 2))
    dense = keras.layers.Dense(2, use_bias=False)
    dense.build((None, 3))
    dense.set_weights([x])
    optimizer = make_optimizer("lamb", 0.1, weight_decay=0.5)
    optimizer.build(dense.trainable_variables)
    m = v = np.zeros_like(x)
    for t, gradient in enumerate(gradients, 1):
        optimizer.apply([tf.constant(gradient, tf.float32)], dense.trainable_variables)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        update = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.5 * x
        x = x - 0.1 * np.linalg.norm(x) / np.linalg.norm(update) * update
    np.testing.assert_allclose(dense.kernel, x, rtol=1e-4)


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
    options = {"weight_decay": 0.3, "beta_2": 0.98, "epsilon": 1e-6}
    ours = trained(lambda: make_optimizer("adamw", schedule, 0.3))
    theirs = trained(lambda: keras.optimizers.AdamW(schedule, **options))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)
