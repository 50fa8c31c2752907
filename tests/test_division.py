"""How a batch is divided over replicas: evenly, whatever holds it; and what cannot be divided is refused."""

import threading

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras import layers, ops

from keras_replicas import Batches, UserError, data_parallel, make_strategy
from keras_replicas.division import bounds_of_part
from tests.conftest import assert_same, slow

EXAMPLES, BATCH, FEATURES = 11, 8, 4  # the last batch has three rows
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, FEATURES)).astype("float32")
Y = RANDOM.normal(size=(EXAMPLES, 1)).astype("float32")
SPARSE = scipy.sparse.csr_matrix(np.where(X > 0, X, 0))
RAGGED = tf.RaggedTensor.from_row_lengths(tf.range(40) % 7, [3, 1, 5, 2, 6, 4, 1, 7, 2, 5, 4])
SEEN = []


class Counting(layers.Layer):
    """Notes how many rows each replica gets."""

    def call(self, x):
        def note(rows):
            SEEN.append(int(rows))
            return rows

        rows = tf.numpy_function(note, [tf.shape(x)[0]], tf.int32)
        with tf.control_dependencies([rows]):
            return tf.identity(x)

    def compute_output_shape(self, shape):
        return shape


def counting(replicas, shape=(FEATURES,)):
    with make_strategy(replicas).scope():
        model = data_parallel(keras.Sequential([keras.Input(shape), Counting(), layers.Dense(1)]), probe_call=False)
        model.compile("sgd", "mse")
    SEEN.clear()
    return model


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[index * BATCH :][:BATCH], Y[index * BATCH :][:BATCH]


def data_set():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def yielded():
    return ((X[start : start + BATCH], Y[start : start + BATCH]) for start in (0, BATCH))


KINDS = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False},
    "a data set": lambda: {"x": data_set()},
    "a data set of unknown shapes": lambda: {"x": data_set().filter(lambda x, y: True)},
    "a generator": lambda: {"x": yielded()},
    "a PyDataset": lambda: {"x": Numbered(), "shuffle": False},
    "Batches": lambda: {"x": Batches((X, Y), BATCH, shuffle=False)},
    "arrays and steps": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False, "steps_per_epoch": 2},
}


@pytest.mark.parametrize(("rows", "replicas"), [(3, 2), (8, 3), (1, 4), (9, 4), (0, 2)])
def test_parts_differ_by_one_row_at_most(rows, replicas):
    bounds = [bounds_of_part(rows, number, replicas) for number in range(replicas)]
    sizes = [end - start for start, end in bounds]
    assert sum(sizes) == rows and bounds[0][0] == 0 and bounds[-1][1] == rows
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert all(one[1] == other[0] for one, other in zip(bounds, bounds[1:], strict=False))


@pytest.mark.parametrize(
    "kind", ["arrays", "a data set", *slow(*(each for each in KINDS if each not in ("arrays", "a data set")))]
)
def test_a_short_batch_is_divided_evenly(kind):
    model = counting(2)
    model.fit(**KINDS[kind](), verbose=0)
    assert sorted(SEEN) == [1, 2, 4, 4]


@pytest.mark.parametrize("kind", ["arrays", *slow("a data set", "a generator", "a PyDataset")])
def test_evaluate_and_predict_divide_evenly_too(kind):
    given = {name: value for name, value in KINDS[kind]().items() if name != "shuffle"}
    model = counting(2)
    model.evaluate(**given, verbose=0)
    assert sorted(SEEN) == [1, 2, 4, 4]
    given = {name: value for name, value in KINDS[kind]().items() if name not in ("shuffle", "y")}
    SEEN.clear()
    predicted = model.predict(**given, verbose=0)
    assert sorted(SEEN) == [1, 2, 4, 4]
    assert_same([predicted], [model.layers[-1](X)], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_single_batch_is_divided_evenly():
    model = counting(2)
    model.train_on_batch(X[:3], Y[:3])
    model.test_on_batch(X[:3], Y[:3])
    assert model.predict_on_batch(X[:3]).shape == (3, 1)
    assert sorted(SEEN) == [1, 1, 1, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [EXAMPLES, 9])  # of nine by eight, a replica has none
def test_a_loss_that_needs_rows_gets_some(rows):
    frames = RANDOM.normal(size=(EXAMPLES, 6, 3)).astype("float32")
    labels = RANDOM.integers(1, 4, (EXAMPLES, 2))

    def fit(wrap):
        keras.utils.set_random_seed(0)
        model = wrap(keras.Sequential([keras.Input((6, 3)), layers.Dense(4)]))
        model.compile(keras.optimizers.SGD(0.1), keras.losses.CTC())
        history = model.fit(frames[:rows], labels[:rows], BATCH, 2, shuffle=False, verbose=0).history
        return [history["loss"], *model.get_weights()]

    plain = fit(lambda model: model)
    with make_strategy(2).scope():
        assert_same(fit(data_parallel), plain, rtol=1e-5, atol=1e-6)


def of_sparse():
    return keras.Sequential([keras.Input((FEATURES,), sparse=True), layers.Dense(1)])


def of_ragged():
    return keras.Sequential([keras.Input((None,), ragged=True, dtype="int32"), Bag()])


class Bag(layers.Layer):
    """The mean of the vectors of a ragged row's ids."""

    def __init__(self):
        super().__init__()
        self.table, self.last = layers.Embedding(7, 3), layers.Dense(1)

    def build(self, shape):
        self.table.build()
        self.last.build((None, 3))

    def call(self, ids):
        vectors = tf.ragged.map_flat_values(self.table, ids)
        return self.last(tf.reduce_mean(vectors, axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SciPy", "sparse tensor", "ragged tensor"])
def test_single_batches_of_sparse_and_ragged_rows(kind):
    of = of_ragged if kind == "ragged tensor" else of_sparse
    whole = {"SciPy": SPARSE, "sparse tensor": tf.sparse.from_dense(SPARSE.toarray()), "ragged tensor": RAGGED}[kind]

    def steps(wrap, first):
        keras.utils.set_random_seed(0)
        model = wrap(of())
        model.compile(keras.optimizers.SGD(0.1), "mse")
        found = [model.train_on_batch(first, Y[:3]) for _ in range(2)]
        return [*found, model.test_on_batch(first, Y[:3]), *model.get_weights()]

    part = tf.sparse.slice(whole, [0, 0], [3, FEATURES]) if kind == "sparse tensor" else whole[:3]
    as_plain = tf.sparse.from_dense(part.toarray()) if kind == "SciPy" else part
    plain = steps(lambda model: model, as_plain)
    with make_strategy(2).scope():
        assert_same(steps(data_parallel, part), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [EXAMPLES, 9])  # of nine by eight, a replica has none
@pytest.mark.parametrize("kind", ["SciPy", "a data set"])
def test_sparse_rows_are_divided(kind, rows):
    dense = tf.sparse.from_dense(SPARSE.toarray()[:rows])
    data = tf.data.Dataset.from_tensor_slices((dense, Y[:rows])).batch(BATCH)
    given = {"x": data} if kind == "a data set" else {"x": SPARSE[:rows], "y": Y[:rows], "batch_size": BATCH}

    def fit(wrap):
        keras.utils.set_random_seed(0)
        model = wrap(of_sparse())
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        history = model.fit(**given, epochs=2, shuffle=False, verbose=0).history
        return [*history.values(), *model.get_weights()]

    plain = fit(lambda model: model)
    with make_strategy(2).scope():
        assert_same(fit(data_parallel), plain, rtol=1e-5, atol=1e-6)


class Compared(layers.Layer):
    """Compares questions with the rows of a bank."""

    def call(self, questions, bank):
        similarity = ops.matmul(questions, ops.transpose(bank))
        return ops.mean(ops.softmax(similarity) * similarity, axis=1, keepdims=True)


def of_two(bank_rows):
    """A batch of eight questions, and of rows that they are compared with."""
    questions, bank = X[:8], RANDOM.normal(size=(bank_rows, FEATURES)).astype("float32")
    return {"questions": questions, "bank": bank}, Y[:8]


@pytest.mark.parametrize(
    "call", ["fit", *slow("evaluate", "predict", "train_on_batch", "unknown shapes", "a later batch", "a scalar")]
)
def test_unlike_numbers_of_rows_are_refused(call):
    with make_strategy(2).scope():
        inputs = {name: keras.Input((FEATURES,), name=name) for name in ("questions", "bank")}
        outputs = Compared()(inputs["questions"], inputs["bank"])
        model = data_parallel(keras.Model(inputs, outputs))
        model.compile("sgd", "mse")
    batch = of_two(20)
    data = tf.data.Dataset.from_tensors(batch)
    later = unknown(tf.data.Dataset.from_tensors(of_two(8))).concatenate(unknown(data))
    calls = {
        "fit": lambda: model.fit(data, verbose=0),
        "evaluate": lambda: model.evaluate(data, verbose=0),
        "predict": lambda: model.predict(data, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(*batch),
        "unknown shapes": lambda: model.fit(unknown(data), verbose=0),
        "a later batch": lambda: model.fit(later, verbose=0),
        "a scalar": lambda: model.fit(data.map(lambda x, y: (x, tf.reduce_sum(y))), verbose=0),
    }
    with pytest.raises(UserError, match="the tensors of a batch have unlike numbers of rows") as refused:
        calls[call]()
    assert "\n" not in str(refused.value)
    if call not in ("a later batch", "a scalar"):
        assert "8 and 20 rows" in str(refused.value)


def unknown(data):
    """The same data, of whose shapes nothing is known."""
    return tf.data.Dataset.from_generator(
        lambda: iter(data),
        output_signature=tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), data.element_spec
        ),
    )


@pytest.mark.slow
def test_two_fits_in_threads_leave_the_strategy_as_it_was():
    strategy = make_strategy(2)
    devices = strategy.extended._input_workers_devices

    def fit():
        with strategy.scope():
            model = data_parallel(keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1)]))
            model.compile("sgd", "mse")
        for _ in range(6):
            model.fit(X, Y, batch_size=BATCH, verbose=0)

    threads = [threading.Thread(target=fit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert strategy.extended._input_workers_devices == devices
    with strategy.scope():
        model = data_parallel(keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1)]))
    assert model.predict(data_set().map(lambda x, y: x), verbose=0).shape == (EXAMPLES, 1)


class Labelled(keras.Sequential):
    """A step on labelled and unlabelled examples, of which a batch has other numbers."""

    def train_step(self, data):
        (x, y), unlabelled = data
        with tf.GradientTape() as tape:
            labelled = ops.mean(ops.square(self(x) - y))
            loss = labelled + 0.1 * ops.mean(ops.square(self(unlabelled)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"labelled": labelled}


class LabelledBatches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return (X[:4], Y[:4]), X[:8]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data set", "PyDataset", "generator"])
def test_a_custom_step_may_get_unlike_numbers_of_rows(kind):
    batch = LabelledBatches()[0]
    data = {
        "data set": lambda: tf.data.Dataset.from_tensors(batch).repeat(2),
        "PyDataset": LabelledBatches,
        "generator": lambda: (batch for _ in range(2)),
    }[kind]

    def fit(wrap):
        keras.utils.set_random_seed(0)
        model = wrap(Labelled([keras.Input((FEATURES,)), layers.Dense(1)]))
        model.compile(keras.optimizers.SGD(0.1))
        history = model.fit(data(), epochs=1, shuffle=False, verbose=0).history
        return [history["labelled"], *model.get_weights()]

    plain = fit(lambda model: model)
    with make_strategy(2).scope():
        assert_same(fit(data_parallel), plain, rtol=1e-5, atol=1e-6)
