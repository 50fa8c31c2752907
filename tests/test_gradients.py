# SPDX-License-Identifier: Apache-2.0
"""Gradients of each use of a weight, and their sum between workers."""

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from common.devices.strategy import make_strategy
from common.training import gradients
from common.training.data_parallel import data_parallel
from common.training.gradients import ROWS, Uses, add_rows, sum_gradients
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
        return gradients.sum_between_workers(dense, rows, [replica, replica + 1], weights, "float32")

    expected = np.full(weights[0].shape, 3.0 * tied)
    for row, value in ((5, 2 + 11), (1, 1), (9, 11), (8, 11)):
        expected[row] += value
    for gradient, first, second in on_two_replicas(workers, summed):
        np.testing.assert_array_equal(gradient, expected)
        assert (first, second) == (1.0, 3.0)
    assert bool(gathered) == (weights is LARGE)


def test_bfloat16_on_the_wire_rounds_gradients_and_nothing_else(workers):
    precise = 1 + 2**-12

    def summed(wire):
        def of_replica(replica):
            return gradients.sum_between_workers({"0": tf.fill([5], precise)}, {}, [replica + precise], LARGE, wire)

        (gradient, total), _ = on_two_replicas(workers, of_replica)
        assert gradient.dtype == tf.float32
        return float(gradient[0]), float(total)

    assert summed("float32") == (2 * precise, 1 + 2 * precise)
    assert summed("bfloat16") == (2.0, 1 + 2 * precise)


def test_a_bucket_is_reduced_before_gradients_of_earlier_layers_are_known(workers, monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET", 4)
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
    operations = step.get_concrete_function().graph.get_operations()
    reductions = [each for each in operations if each.type == "CollectiveReduceV2" and "CPU:0" in each.device]
    waits_for = [{name for name in shapes if needs(each, f"of_{name}/")} for each in reductions]
    assert waits_for[:4] == [set(), {"head"}, {"late"}, {"early"}]  # the sums', and the buckets'
    collectives = [each for each in operations if each.type.startswith("Collective")]
    assert "CollectiveGatherV2" in {each.type for each in collectives}
    assert not [each for each in collectives if {before.type for before in each.control_inputs} & COLLECTIVES]


COLLECTIVES = {"CollectiveReduceV2", "CollectiveGatherV2"}


def of_a_table(x, table):
    return tf.matmul(x, tf.transpose(table))


def of_a_table_in_bfloat16(x, table):
    return tf.matmul(tf.cast(x, tf.bfloat16), tf.transpose(tf.cast(table, tf.bfloat16)))


@pytest.mark.parametrize(
    ("product", "inputs", "size"), [(of_a_table, 3, 4), (of_a_table_in_bfloat16, 3, 2), (tf.matmul, 7, 4)]
)
def test_the_gradient_of_a_large_matrix_is_computed_a_bucket_at_a_time(monkeypatch, product, inputs, size):
    @tf.function
    def in_parts(x, table):
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(tf.cast(product(x, table), tf.float32) ** 2)
        gradient = tape.gradient(loss, table)
        parts = gradients.in_parts(gradient)
        assert len({part.name for part in parts} | {gradient.name}) == 1 + len(parts)  # each a product of its own
        return gradient, parts

    x, table = tf.random.stateless_normal([4, inputs], [0, 1]), tf.random.stateless_normal([7, 3], [2, 3])
    monkeypatch.setattr(gradients, "BUCKET", 7 * 3 * size // 3)
    whole, parts = in_parts(x, table)
    assert [part.shape[0] for part in parts] == [2, 2, 3]
    np.testing.assert_allclose(tf.concat(parts, axis=0), whole, rtol=1e-6)


def test_other_gradients_are_not_computed_in_parts(monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET", 4)
    table, others = tf.ones([6, 2]), [tf.transpose, lambda t: 2.0 * t, lambda t: tf.matmul(t, t, transpose_b=True)]
    others += [lambda t: tf.matmul(t, tf.transpose(t))]
    for other in others:
        given = tf.function(lambda other=other: len(gradients.in_parts(other(table))))
        assert given() == 1
    assert gradients.in_parts(table)[0] is table  # which no graph computes


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


def test_fit_sends_gradients_between_workers_in_the_precision_asked_for(workers, monkeypatch):
    sent, sum_them = [], gradients.sum_between_workers
    monkeypatch.setattr(gradients, "between_workers", lambda: True)
    monkeypatch.setattr(gradients, "sum_between_workers", lambda *given: sent.append(given) or sum_them(*given))
    ids, labels, weights = np.arange(8).reshape([4, 2]) % 3, np.ones([4, 1]), []
    for wire in ("float32", "bfloat16"):
        keras.utils.set_random_seed(0)
        with workers.scope():
            layers = [keras.layers.Embedding(2 * ROWS, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = data_parallel(keras.Sequential)([keras.Input([2], dtype="int32"), *layers])
            model.compile(keras.optimizers.SGD(0.37), "mse")
        model.wire = wire
        model.fit(ids, labels, batch_size=4, verbose=0, shuffle=False)
        weights.append(model.get_weights())
        dense, rows, _, _, asked = sent[-1]
        assert (sorted(dense), list(rows), asked) == (["1", "2"], ["0"], wire)
    distance = max(np.abs(a - b).max() for a, b in zip(*weights, strict=True))
    assert 0 < distance < 1e-2


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
