"""Gradients: rows of tables, weights that are used twice, and what would not be trained."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas.empty import zeros_without_examples
from keras_replicas.model import data_parallel
from keras_replicas.optimizers import apply_summed
from keras_replicas.replicas import sum_rows
from keras_replicas.strategy import make_strategy
from tests.conftest import collective_strategy

IDS = np.array([[1, 2, 2, 0], [3, 1, 4, 2], [1, 1, 1, 1]])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("strategy", [collective_strategy, lambda: make_strategy(2), lambda: make_strategy(1)])
def test_rows_are_added_up_and_each_is_there_once(strategy, dtype):
    strategy = strategy()
    indices = [[5, 1, 5], [5, 9, 8]][: strategy.num_replicas_in_sync]

    def on_replica():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        values = tf.cast(tf.ones([3, 2]) * (1 + 10 * tf.cast(replica, tf.float32)), dtype)
        rows = sum_rows(tf.IndexedSlices(values, tf.constant(indices)[replica], tf.constant([10, 2])))
        return rows.values, rows.indices

    expected = np.zeros((10, 2))
    np.add.at(expected, np.ravel(indices), np.repeat([1, 11][: len(indices)], 3)[:, None])
    summed = tf.function(lambda: strategy.run(on_replica))()
    for values, found in zip(*map(strategy.experimental_local_results, summed), strict=True):
        assert values.dtype == dtype
        assert sorted(found.numpy()) == sorted(set(np.ravel(indices)))
        np.testing.assert_array_equal(tf.cast(values, "float32"), expected[found])


class Seeing(keras.optimizers.SGD):
    """Notes the kinds of gradients that it is given."""

    def update_step(self, gradient, variable, learning_rate):
        self.seen = {**getattr(self, "seen", {}), variable.shape[0]: type(gradient)}
        super().update_step(gradient, variable, learning_rate)


class Tied(keras.Model):
    """Reads one table by rows and, if `tied`, as a matrix, too."""

    def __init__(self, tied):
        super().__init__()
        self.table, self.tied = keras.layers.Embedding(7, 3), tied

    def call(self, ids):
        rows = self.table(ids)
        return tf.matmul(rows, self.table.embeddings, transpose_b=True) if self.tied else rows


@pytest.mark.parametrize(
    ("tied", "jit", "accumulate"), [(False, False, 1), (True, False, 1), (False, True, 1), (False, False, 2)]
)
def test_a_table_read_by_rows_alone_gets_rows(tied, jit, accumulate):
    def trained(model_class, replicas, **options):
        keras.utils.set_random_seed(0)
        with make_strategy(replicas).scope():
            model = model_class(tied)
            model.compile(Seeing(0.1), "mse", **options)
        if model_class is not Tied:
            model.accumulate = accumulate
        model.fit(IDS[:2].repeat(2, 0), np.ones((4, 4, 7 if tied else 3)), batch_size=4, verbose=0, shuffle=False)
        return model.optimizer.seen[7], model.get_weights()[0]

    kind, ours = trained(data_parallel(Tied), 2, jit_compile=jit)
    assert issubclass(kind, tf.IndexedSlices) == (not tied and accumulate == 1)
    np.testing.assert_allclose(ours, trained(Tied, 1)[1], rtol=1e-5, atol=1e-7)


OPTIMIZERS = [keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Adagrad]
OPTIMIZERS += [keras.optimizers.RMSprop, keras.optimizers.Adadelta, keras.optimizers.Adamax, keras.optimizers.Nadam]
OPTIMIZERS += [keras.optimizers.Ftrl, keras.optimizers.Lion, keras.optimizers.Adafactor, keras.optimizers.Lamb]
OPTIMIZERS += [keras.optimizers.Muon]
SETTINGS = [{"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.1}, {"use_ema": True}]
SETTINGS += [{"gradient_accumulation_steps": 2}, {"loss_scale_factor": 2.0}, {"weight_decay": 0.1}]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(kind, {}) for kind in OPTIMIZERS] + [(keras.optimizers.Adam, settings) for settings in SETTINGS],
    ids=str,
)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "LossScale"])
def test_an_optimizer_makes_the_same_of_rows_and_of_a_whole_gradient(kind, settings, scaled):
    strategy = make_strategy(2)
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [-3.0, 0.5]]), tf.constant([4, 1]), tf.constant([5, 2]))

    def trained(gradient):
        with strategy.scope():
            table = keras.layers.Embedding(5, 2, embeddings_initializer="ones")
            table.build()
            optimizer = kind(0.1, **settings)
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0) if scaled else optimizer
            optimizer.build(table.trainable_variables)

        @tf.function(autograph=False)
        def step():
            strategy.run(lambda: apply_summed(optimizer, [gradient], table.trainable_variables))

        for _ in range(3):
            step()
        return table.get_weights()[0]

    np.testing.assert_allclose(trained(rows), trained(tf.convert_to_tensor(rows)), rtol=1e-6)


def test_gradients_are_not_added_up_again_and_an_optimizer_must_be_built():
    strategy = make_strategy(2)
    with strategy.scope():
        dense, optimizer = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False), keras.optimizers.SGD(1.0)
        dense.build([None, 1])

    def step():
        strategy.run(lambda: apply_summed(optimizer, [tf.constant([[-3.0]])], dense.trainable_variables))

    with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
        step()
    with strategy.scope():
        optimizer.build(dense.trainable_variables)
    tf.function(step)()
    assert [float(copy[0, 0]) for copy in strategy.experimental_local_results(dense.kernel.value)] == [3.0, 3.0]
    with strategy.scope(), pytest.raises(RuntimeError, match="in a replica's step"):
        apply_summed(optimizer, [tf.constant([[-3.0]])], dense.trainable_variables)


def test_a_batch_that_may_be_empty_makes_no_gradient_wait_for_another():
    @tf.function
    def step(examples):
        known = {name: tf.random.uniform([3], name=f"of_{name}") for name in ("early", "late")}
        found = zeros_without_examples(examples, known)
        assert not needs(found["late"].op, "of_early/")
        return known, found

    for examples in (0.0, 2.0):
        known, found = step(tf.constant(examples))
        for name, gradient in found.items():
            np.testing.assert_array_equal(gradient, known[name] * tf.sign(examples))


def needs(operation, name: str) -> bool:
    """Whether an operation's tensors come from one of that name."""
    sources = [tensor.op for tensor in operation.inputs]
    return any(name in each.name + "/" or needs(each, name) for each in sources)
