# SPDX-License-Identifier: Apache-2.0
"""Gradients of each use of a weight, and their sum between workers."""

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas import gradients
from keras_replicas.empty import zeros_without_examples
from keras_replicas.gradients import ROWS, Uses, add_rows, sum_gradients
from keras_replicas.model import data_parallel
from keras_replicas.strategy import make_strategy
from tests.conftest import collective_strategy

IDS = np.array([[1, 2, 2, 0], [3, 1, 4, 2]])


class TiedModel(keras.Model):
    """Reads its table by rows, in a loop's weights too, and as a matrix."""

    def __init__(self):
        super().__init__()
        self.table = keras_hub.layers.ReversibleEmbedding(7, 3)
        self.recurrent = keras.layers.SimpleRNN(3, return_sequences=True)  # whose kernels are read in a `tf.while_loop`

    def call(self, ids):
        return self.table(self.recurrent(self.table(ids)), reverse=True)


@pytest.mark.parametrize("jit", [False, True])
def test_each_use_of_a_weight_has_its_gradient_and_together_they_are_the_weights(jit):
    keras.utils.set_random_seed(0)
    model = TiedModel()
    model(IDS)
    weights = [tf.convert_to_tensor(variable) for variable in model.trainable_variables]

    @tf.function(jit_compile=jit)
    def of_uses():
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            mapping = list(zip(model.trainable_variables, weights, strict=True))
            with Uses(mapping, model.trainable_variables, tape) as scope:
                loss = tf.reduce_sum(model(IDS) ** 2)
        return scope.gradients(loss)

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(IDS) ** 2)
    plain = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    dense, rows = of_uses()
    assert list(rows) == ["0"]
    values, numbers = rows["0"]
    np.testing.assert_array_equal(numbers, IDS.ravel())
    assert values.shape == (8, 3)
    assert sorted(dense) == ["0", "1", "2", "3"]  # the matrix's part of the table's, and the layer's three
    for index, gradient in add_rows(dense, rows, weights).items():
        np.testing.assert_allclose(gradient, tf.convert_to_tensor(plain[int(index)]), rtol=1e-5, atol=1e-6)


def test_rows_alone_make_a_dense_gradient():
    rows = {"1": (tf.constant([[1.0], [2.0], [4.0]]), tf.constant([2, 0, 2]))}
    (gradient,) = add_rows({}, rows, [None, tf.zeros([4, 1])]).values()
    np.testing.assert_array_equal(gradient, [[2.0], [0.0], [5.0], [0.0]])


def on_two_replicas(strategy, function):
    """What a function of the replica's number returns on each."""

    @tf.function
    def run():
        return strategy.run(
            lambda: function(tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))
        )

    return zip(*map(strategy.experimental_local_results, tf.nest.flatten(run())), strict=True)


@pytest.fixture(scope="module")
def workers():
    """Replicas that reduce as workers do."""
    return collective_strategy()


LARGE, SMALL = [tf.zeros([2 * ROWS, 2])], [tf.zeros([2 * ROWS - 1, 2])]


@pytest.mark.parametrize("weights", [LARGE, SMALL], ids=["by rows", "dense"])
@pytest.mark.parametrize("tied", [False, True])
def test_workers_add_up_gradients_of_a_table(workers, monkeypatch, weights, tied):
    gathered = []
    gather_rows = gradients._gather_rows
    monkeypatch.setattr(gradients, "_gather_rows", lambda *rows: gathered.append(rows) or gather_rows(*rows))
    numbers = tf.constant([[5, 1, 5], [5, 9, 8]])

    def summed(replica):
        own = numbers[tf.cast(replica, tf.int32)]
        dense = {"0": tf.ones_like(weights[0]) * (1 + replica)} if tied else {}
        rows = {"0": (tf.ones([3, 2]) * (1 + 10 * replica), own)}
        return gradients.sum_between_workers(dense, rows, [replica, replica + 1], weights)

    expected = np.full(weights[0].shape, 3.0 * tied)
    for row, value in ((5, 2 + 11), (1, 1), (9, 11), (8, 11)):
        expected[row] += value
    for gradient, first, second in on_two_replicas(workers, summed):
        np.testing.assert_array_equal(gradient, expected)
        assert (first, second) == (1.0, 3.0)
    assert bool(gathered) == (weights is LARGE)


@pytest.mark.parametrize(
    ("size", "buckets"), [(1, [{"head"}, {"late"}, {"early"}]), (2**20, [{"head", "late", "early"}])]
)
def test_a_bucket_is_reduced_before_gradients_of_earlier_layers_are_known(workers, monkeypatch, size, buckets):
    monkeypatch.setattr(gradients, "BUCKET", size)
    weights = [tf.zeros([2 * ROWS, 1]), tf.zeros([3]), tf.zeros([3])]

    @tf.function
    def step():
        def on_replica():
            known = {name: tf.random.uniform(shape, name=f"of_{name}") for name, shape in shapes.items()}
            dense = {"0": known["head"], "1": known["early"], "2": known["late"]}
            rows = {"0": (known["rows"], tf.constant([1, 2]))}
            return sum_gradients(dense, rows, [tf.constant(1.0)], weights)

        return workers.run(on_replica)

    monkeypatch.setattr(gradients, "between_workers", lambda: True)
    shapes = {"head": [2 * ROWS, 1], "early": [3], "late": [3], "rows": [2, 1]}
    reductions = collectives(step, "Reduce")
    waits_for = [{name for name in shapes if needs(each, f"of_{name}/")} for each in reductions]
    assert waits_for[: 1 + len(buckets)] == [set(), *buckets]  # the sums' first
    assert collectives(step, "Gather")
    for each in collectives(step):
        assert not any(before.type.startswith("Collective") for before in each.control_inputs)


def collectives(function, kind: str = "") -> list:
    """The operations of the first of two replicas, in a function, by which they reduce or gather."""
    operations = function.get_concrete_function().graph.get_operations()
    return [each for each in operations if each.type.startswith(f"Collective{kind}") and "CPU:0" in each.device]


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


def test_workers_add_up_gradients_of_several_dtypes_and_one_that_is_no_tensor(workers):
    def summed(replica):
        dense = {"0": tf.ones([2], tf.float64), "1": np.ones([3], np.float32), "2": tf.cast(replica, tf.float16)}
        found, _ = gradients.sum_between_workers(dense, {}, [replica], [tf.zeros([2])] * 3)
        return [found[index] for index in sorted(found)]

    for found in on_two_replicas(workers, summed):
        for each, expected in zip(found, (np.full(2, 2.0), np.full(3, 2, np.float32), np.float16(1)), strict=True):
            assert each.dtype == expected.dtype
            np.testing.assert_array_equal(each, expected)


def bfloat16(tensor):
    return tf.cast(tensor, tf.bfloat16)


# Of inputs, and of a kernel, or of a table, which multiplies them transposed.
PRODUCTS = {
    "a kernel": tf.matmul,
    "in bfloat16": lambda x, table: tf.matmul(bfloat16(x), bfloat16(table)),
    "a table": lambda x, table: tf.matmul(x, tf.transpose(table)),
    "a table in bfloat16": lambda x, table: tf.matmul(bfloat16(x), tf.transpose(bfloat16(table))),
}
OTHERS = {
    "its axes kept": lambda x, table: tf.matmul(x, tf.transpose(table, [0, 1])),
    "its axes as they come": lambda x, table: tf.matmul(x, tf.transpose(table, tf.argsort(x[0, :2]))),
    "transposed": lambda x, table: tf.transpose(tf.matmul(table, x[:, : table.shape[0]], True, True)),
    "a table times x": lambda x, table: tf.matmul(table, x, transpose_b=True),
    "of no known size": lambda x, table: tf.matmul(tf.compat.v1.placeholder_with_default(x, [None, None]), table),
    "with its own": lambda x, table: tf.matmul(table, table, transpose_a=True),
    "no product": lambda x, table: 2 * table,
    "not rows": lambda x, table: tf.transpose(table[None], [0, 2, 1])[0],
}


@pytest.mark.parametrize("shape", [(7, 5), (5, 7)], ids=str)
@pytest.mark.parametrize("name", [*PRODUCTS, *OTHERS])
def test_the_gradient_of_a_large_matrix_is_reduced_a_bucket_at_a_time(workers, monkeypatch, name, shape):
    table = tf.random.stateless_normal(shape, [2, 3])
    x = tf.sort(tf.random.stateless_normal([7, shape[1] if "table" in name else shape[0]], [0, 1]))
    product = (PRODUCTS | OTHERS)[name]
    monkeypatch.setattr(gradients, "BUCKET", 13)  # the longer side is 7, so that two rows or columns are more

    def on_replica():
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(tf.cast(product(x, table), tf.float32) ** 2) * (1 + replica)
        gradient = tape.gradient(loss, table)
        assert gradients.split_product(gradient)[1] == (name in PRODUCTS and shape == (7, 5))  # few numbers are copied
        (summed, _) = sum_gradients({"0": gradient}, {}, [replica], [table])
        return summed["0"], gradient

    monkeypatch.setattr(gradients, "between_workers", lambda: True)
    on_replicas = tf.function(lambda: workers.run(on_replica))
    summed, each = map(workers.experimental_local_results, on_replicas())
    rtol = 0.02 if "bfloat16" in name else 1e-5
    for found in summed:
        np.testing.assert_allclose(found, tf.add_n(each), rtol, rtol)
    assert len(collectives(on_replicas, "Reduce")) == (3 if name in PRODUCTS else 2)  # one is the sums'


def needs(operation, name: str) -> bool:
    """Whether an operation's tensors come from one of that name."""
    sources = [tensor.op for tensor in operation.inputs]
    return any(name in each.name + "/" or needs(each, name) for each in sources)


def test_on_one_machine_all_is_reduced_at_once():
    strategy = make_strategy(2)
    rows = {"0": (tf.ones([2, 2]), tf.constant([3, 3]))}

    def summed(replica):
        return sum_gradients({"1": replica + tf.ones([2])}, rows, [replica], [*LARGE, tf.zeros([2])])

    for table, other, total in on_two_replicas(strategy, summed):
        assert tf.reduce_sum(table) == 8.0 and table[3, 0] == 4.0
        np.testing.assert_array_equal(other, [3.0, 3.0])
        assert total == 1.0


def test_fit_sends_dense_gradients_and_rows_of_a_large_table(workers, monkeypatch):
    sent, sum_them = [], gradients.sum_between_workers
    monkeypatch.setattr(gradients, "between_workers", lambda: True)
    monkeypatch.setattr(gradients, "sum_between_workers", lambda *given: sent.append(given) or sum_them(*given))
    with workers.scope():
        layers = [keras.layers.Embedding(2 * ROWS, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = data_parallel(keras.Sequential)([keras.Input([2], dtype="int32"), *layers])
        model.compile(keras.optimizers.SGD(0.37), "mse")
    model.fit(np.arange(8).reshape([4, 2]) % 3, np.ones([4, 1]), batch_size=4, verbose=0)
    dense, rows, *_ = sent[-1]
    assert (sorted(dense), list(rows)) == (["1", "2"], ["0"])


class Rematerialized(keras.layers.Layer):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return keras.remat(self.dense)(x)


def test_what_would_not_be_trained_is_refused():
    model = data_parallel(keras.Sequential)([keras.Input([3]), Rematerialized()])
    model.compile("sgd", "mse", run_eagerly=True)  # an error while tracing leaves TensorFlow with a scope of its own
    with pytest.raises(ValueError, match=r"dense.*/kernel would not be trained where it is used, as in keras.remat"):
        model.fit(np.ones([4, 3]), np.ones([4, 1]), verbose=0)
