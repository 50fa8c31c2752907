import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from common import training as optimizers
from common.training import adamw, matrix_axes, muon
from keras_replicas import apply_summed, make_strategy


@pytest.mark.parametrize("make", [adamw, muon])
def test_weight_decay_spares_biases_and_norms(make):
    dense, norm = keras.layers.Dense(2), keras.layers.LayerNormalization()
    dense.build((None, 3))
    norm.build((None, 2))
    optimizer = make(0.1, weight_decay=0.5)
    variables = [dense.kernel, dense.bias, norm.gamma, norm.beta]
    optimizer.build(variables)
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

        @tf.function
        def step(gradients):
            tf.distribute.get_strategy().run(lambda: apply_summed(optimizer, gradients, dense.trainable_variables))

        with dense.kernel.value.distribute_strategy.scope():
            for i in range(5):
                step([tf.random.stateless_normal(w.shape, [i, n]) for n, w in enumerate(dense.trainable_variables)])
        return dense.get_weights()

    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 5)
    options = {"weight_decay": 0.3, "beta_2": 0.98, "epsilon": 1e-6}
    ours = trained(lambda: adamw(schedule, 0.3))
    theirs = trained(lambda: keras.optimizers.AdamW(schedule, **options))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


# The kernel's shape as KerasHub has it, and the axis of its heads: a query's, an output's, Gemma's query's, one of a
# single head, and some of as many heads as each has columns, or more.
KERNELS = [
    ((6, 2, 3), 1),
    ((2, 3, 6), 0),
    ((2, 6, 3), 0),
    ((6, 1, 6), 1),
    ((8, 4, 2), 1),
    ((4, 2, 8), 0),
    ((9, 3, 3), 1),
    ((3, 3, 9), 0),
]


def muon_steps(shape, make, name="kernel", layer="attention"):
    """What an optimizer makes of a variable in three steps by the same gradients."""
    with keras.name_scope(layer):
        values = np.linspace(-1, 1, math.prod(shape), dtype=np.float32)
        variable = keras.Variable(values.reshape(shape), name=name)
    optimizer = make()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build([variable])
    for step in range(3):
        optimizer.apply([tf.reshape(tf.random.stateless_normal([math.prod(shape)], [step, 0]), shape)], [variable])
    return np.array(variable)


@pytest.mark.parametrize("shape", [(4, 12), (12, 4)])
def test_muon_takes_a_dense_kernel_as_kerass_does(shape):
    ours = muon_steps(shape, lambda: muon(0.01, 0.1, clip_norm=None))
    theirs = muon_steps(shape, lambda: keras.optimizers.Muon(0.01, weight_decay=0.1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(("shape", "heads"), KERNELS, ids=str)
def test_muon_takes_each_head_as_a_matrix_of_its_own(shape, heads):
    def trained(parts, optimizer):
        variables = [keras.Variable(value, name="kernel") for value in parts(values)]
        optimizer.build(variables)
        for step in range(3):
            gradients = parts(np.array(tf.random.stateless_normal(shape, [step, 0])))
            optimizer.apply([tf.constant(gradient) for gradient in gradients], variables)
        return [np.array(variable) for variable in variables]

    def by_head(kernel):
        return np.moveaxis(kernel, heads, 0)

    values = np.linspace(-1, 1, math.prod(shape), dtype=np.float32).reshape(shape)
    (ours,) = trained(lambda kernel: [kernel], muon(0.01, 0.1, clip_norm=None))
    theirs = trained(by_head, keras.optimizers.Muon(0.01, weight_decay=0.1))
    np.testing.assert_allclose(by_head(ours), theirs, rtol=1e-6)


@pytest.mark.parametrize("limit", [2**23, 50, 1])
def test_kernels_of_one_shape_are_updated_each_by_its_own_gradient(limit, monkeypatch):
    monkeypatch.setattr(optimizers, "STACK", limit)
    shapes = [(6, 2, 3), (4, 12), (2, 3, 6), (12, 4), (6, 2, 3), (4, 12)]

    def trained(make, groups):
        values = {}
        for group in groups:
            variables = [keras.Variable(np.full(shapes[i], 0.1 * i, np.float32), name="kernel") for i in group]
            optimizer = make()
            optimizer.build(variables)
            for step in range(2):
                gradients = [tf.random.stateless_normal(shapes[i], [step, i]) for i in group]
                optimizer.apply(gradients, variables)
            values |= dict(zip(group, map(np.array, variables), strict=True))
        return values

    def make():
        return muon(0.01, 0.1, clip_norm=None)

    together, alone = trained(make, [range(6)]), trained(make, [[i] for i in range(6)])
    for i in range(6):
        np.testing.assert_allclose(together[i], alone[i], rtol=1e-6)


def test_muon_takes_each_place_of_a_convolution_as_a_matrix():
    assert (
        matrix_axes((3, 3, 16, 8)) == [0, 1, 3, 2]
        and matrix_axes((7, 7, 3, 64)) == [0, 1, 2, 3]
        and matrix_axes((5, 8, 16)) == [0, 1, 2]
    )


@pytest.mark.parametrize(
    ("shape", "name", "layer"),
    [
        ((5, 4), "embeddings", "token_embedding"),
        ((2, 3), "bias", "query"),
        ((4,), "gamma", "norm"),
        ((4, 2), "kernel", "logits"),
        ((4, 4), "kernel", "mlm_head"),
    ],
)
def test_muon_leaves_all_but_the_kernels_of_hidden_layers_to_adamw(shape, name, layer):
    ours = muon_steps(shape, lambda: muon(0.01, 0.1, clip_norm=None), name, layer)
    # 0.4 of Muon's rate, which leaves the decay as it is.
    theirs = muon_steps(shape, lambda: adamw(0.004, 0.25), name, layer)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def test_a_step_of_muon_has_singular_values_near_one():
    """The step is 0.01 x 0.2 x the square root of the longer side; the iterations leave 0.7 to 1.2."""
    before = np.linspace(-1, 1, 6 * 8, dtype=np.float32).reshape(6, 8)
    variable = keras.Variable(before, name="kernel")
    optimizer = muon(0.01, 0.0, clip_norm=None)
    optimizer.build([variable])
    optimizer.apply([tf.random.stateless_normal([6, 8], [0, 1])], [variable])
    values = np.linalg.svd((np.array(variable) - before) / (0.01 * 0.2 * 8**0.5), compute_uv=False)
    assert values.min() > 0.65 and values.max() < 1.25


def test_muon_takes_a_gradient_that_is_clipped():
    def stepped(gradient, **options):
        variable = keras.Variable(np.zeros((3, 2), np.float32), name="kernel")
        bias = keras.Variable(np.zeros(2, np.float32), name="bias")
        optimizer = muon(0.1, **options)
        optimizer.build([variable, bias])
        for scale in (1.0, 30.0):
            optimizer.apply([tf.constant(gradient) * scale, tf.ones(2) * scale], [variable, bias])
        return np.array(variable), np.array(bias)

    gradient = np.arange(6, dtype=np.float32).reshape(3, 2)
    clipped, alike, free = stepped(gradient), stepped(gradient, clip_norm=1.0), stepped(gradient, clip_norm=None)
    np.testing.assert_array_equal(clipped[1], alike[1])
    # Clipped, both gradients are the same, and AdamW goes as far in each step: 0.4 times the rate.
    assert clipped[1] == pytest.approx([-0.08, -0.08], rel=1e-3) and abs(free[1] + 0.08).min() > 0.005
