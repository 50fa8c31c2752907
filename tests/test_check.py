"""`check`, on models with a fault each, and on models that are right though much about them is hard to compare."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from benchmarks.features import State
from keras_replicas import UserError, check, data_parallel
from keras_replicas.__main__ import main
from keras_replicas.checking.examples import take_rows
from tests.conftest import ROOT, on_replicas, slow

EXAMPLES = 13
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(EXAMPLES, 4)).astype("float32")
Y = RANDOM.integers(0, 3, EXAMPLES)
IDS = RANDOM.integers(1, 9, (EXAMPLES, 6)) * (np.arange(6) < RANDOM.integers(2, 7, (EXAMPLES, 1)))
SMALL = {"steps": 4, "batch_size": 4}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(*hidden, shape=(4,), optimizer="adam", **options):
    """What makes a model of these layers, the optimizer, which is compiled."""

    def build():
        model = keras.Sequential([keras.Input(shape), *(make() for make in hidden), layers.Dense(3)])
        model.compile(optimizer if isinstance(optimizer, str) else optimizer(), LOSS, **options)
        return model

    return build


def count(state, x, training):
    if training:
        state.assign_add(ops.cast(ops.shape(x)[0], state.dtype))


def counter():
    return State(count, "mean", None, 0.0)


def undeclared():
    return State(count, "none")


class Centre(layers.Layer):
    """By so little that the loss changes by about 1e-5."""

    def call(self, x, training=False):
        return x - 1e-4 * ops.mean(x, axis=0, keepdims=True)


class CentreInTraining(Centre):
    def call(self, x, training=False):
        return super().call(x) if training else x


class Mix(layers.Layer):
    """Mixes each example with another one."""

    def call(self, x, training=False):
        return 0.5 * x + 0.5 * keras.random.shuffle(x) if training else x


class Rolled(layers.Layer):
    """Gives each example the gradient of the next one."""

    def call(self, x):
        @tf.custom_gradient
        def same(x):
            return tf.identity(x), lambda upstream: tf.roll(upstream, 1, axis=0)

        return same(x)


class CountCalls(layers.Layer):
    """Counts its calls in Python."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x * (1.0 + 0.1 * self.calls)


class ToLongest(layers.Layer):
    """A mean over as many places as the longest example of the batch has."""

    def call(self, ids):
        longest = ops.max(ops.sum(ops.cast(ids > 0, "int32"), axis=1))
        return ops.mean(ops.one_hot(ids, 9, dtype=self.compute_dtype)[:, :longest], axis=1)


class Own(keras.Model):
    """A `train_step` of its own: its loss is a mean, divided by the replicas as Keras's is or not, or a sum."""

    def __init__(self, loss):
        super().__init__()
        self.dense, self.kind = layers.Dense(3), loss

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            loss = ops.sum(losses) if self.kind == "sum" else ops.mean(losses)
            if self.kind == "divided":
                loss /= self.distribute_strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, self.trainable_weights)
        if self.kind == "clipped":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.01)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def own(kind):
    def build():
        model = Own(kind)
        model.compile("sgd", LOSS)
        return model

    return build


SLOW = pytest.mark.slow


def hidden_gradient():
    return model_of(lambda: layers.Dense(4, "tanh"), Rolled, optimizer="sgd")()


def fault(name, build, first, why, x=X, marks=()):
    return pytest.param(build, x, first, why, id=name, marks=marks)


FAULTS = [
    fault("clipped", own("clipped"), "weight dense", "train_step: sgd gets neither a mean nor a sum over examples"),
    fault("counter", model_of(counter), "layer state", "does not combine over replicas by its aggregation"),
    fault("centred", model_of(Centre), "training loss after step 1", "the outputs of the layer centre"),
    fault(
        "in training",
        model_of(CentreInTraining),
        "training loss after step 1",
        "the layer centre_in_training",
        marks=SLOW,
    ),
    fault("shuffled", model_of(Mix), "training loss after step 1", "the layer mix", marks=SLOW),
    fault("gradient", hidden_gradient, "training loss", "a tf.custom_gradient", marks=SLOW),
    fault("Python", model_of(CountCalls, run_eagerly=True), "training loss", "count_calls.calls changes", marks=SLOW),
    fault("longest", model_of(ToLongest, shape=(6,)), "training loss", "the layer to_longest", IDS, marks=SLOW),
]


@pytest.mark.parametrize(("build", "x", "first", "why"), FAULTS)
def test_a_fault_is_found_and_named(build, x, first, why):
    found = check(build, x, Y, **SMALL)
    assert not found and f"DIFFERENT, first the {first}" in repr(found) and why in found.text


@pytest.mark.parametrize("kind", ["mean", "divided", pytest.param("sum", marks=SLOW)])
def test_custom_steps_that_are_means_or_sums_pass(kind):
    assert check(own(kind), X, Y, **SMALL)


def attention(normalized=True):
    """Gradients that are only rounding, of the biases of keys; noise; and tokens in several places, under Adam."""
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8)(ids)
    x = layers.Dropout(0.3)(x + layers.MultiHeadAttention(2, 4, dropout=0.3)(x, x))
    x = layers.GaussianNoise(0.3)(x)
    x = layers.BatchNormalization()(x) if normalized else x
    model = keras.Model(ids, layers.Dense(3)(layers.Flatten()(x)))
    model.compile("adam", LOSS, metrics=["accuracy"])
    return model


def single():
    """In float32, whatever Keras is told before."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    return attention(normalized=False)


def of_two():
    first, second = keras.Input((4,), name="a"), keras.Input((6,), name="b")
    joined = layers.Concatenate()([first, second])
    model = keras.Model({"a": first, "b": second}, {"y": layers.Dense(3)(joined), "z": layers.Dense(1)(joined)})
    model.compile("sgd", {"y": LOSS, "z": "mae"}, metrics={"z": ["mse"]})
    return model, {"a": X, "b": IDS}, {"y": Y, "z": X[:, :1]}, {"y": X[:, 1] ** 2, "z": X[:, 2] ** 2}


@pytest.mark.parametrize(
    ("build", "data"),
    [
        pytest.param(attention, (IDS, Y), id="attention"),
        pytest.param(single, (IDS, Y), id="float32", marks=SLOW),
        pytest.param(of_two, (), id="several", marks=SLOW),
        pytest.param(lambda: data_parallel(model_of(layers.BatchNormalization)()), (X, Y), id="of ours", marks=SLOW),
    ],
)
def test_what_is_right_is_the_same(build, data):
    before = keras.config.floatx(), keras.config.dtype_policy(), tf.random.stateless_normal
    found = check(build, *data, **SMALL)
    assert found and "THE SAME to" in str(found), found
    assert before == (keras.config.floatx(), keras.config.dtype_policy(), tf.random.stateless_normal)


class Unsteady(layers.Layer):
    def call(self, x):
        return x + tf.cast(tf.timestamp() % 1, x.dtype)


class NotANumber(layers.Layer):
    def call(self, x):
        return x / ops.zeros_like(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (
            NotANumber,
            "NOT CHECKED\nwhy: plain Keras's own training loss after step 1 is not finite",
        ),
        (Unsteady, "NOT CHECKED\nwhy: plain Keras's own training loss after step 1 differs from run to run"),
        (undeclared, "add_weight(..., aggregation='sum')"),
    ],
)
def test_what_cannot_be_compared_is_no_success(layer, told):
    found = check(model_of(layer), X, Y, **SMALL)
    assert not found and told in found.text
    assert ("REFUSED\nwhy: sequential" in found.text) == (layer is undeclared)


@pytest.mark.parametrize(
    ("build", "data", "told"),
    [
        (
            model_of(),
            (),
            "give examples as fit takes them: check(build, x, y), or a function that returns (model, x, y)",
        ),
        (model_of(), (X[:0], Y[:0]), "there are no examples: x has no rows"),
        (lambda: keras.Sequential([layers.Dense(1)]), (X, Y), "the model is not compiled"),
        (lambda: (model_of()(), X, Y, Y, Y), (), "must return a compiled model, or (model, x, y[, sample_weight])"),
        (lambda: on_replicas(layers.Dense(3)), (X, Y), "must not use a strategy"),
        (model_of(lambda: layers.Dense(2, dtype="mixed_bfloat16")), (X, Y), "bfloat16 are too coarse to compare"),
    ],
    ids=["no data", "no examples", "not compiled", "too many", "strategy", "half precision"],
)
def test_what_cannot_be_checked_is_said_in_one_line(build, data, told):
    with pytest.raises(UserError) as raised:
        check(build, *data)
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_a_model_in_the_place_of_its_function_is_refused():
    with pytest.raises(UserError, match="give check the function that makes the model, not the model"):
        check(model_of()(), X, Y)


@pytest.mark.parametrize("number", [{"batch_size": 0}, {"replicas": 0}, {"steps": 1}], ids=str)
def test_numbers_that_are_too_small_are_refused(number):
    (name,) = number
    with pytest.raises(UserError, match=f"{name} must be at least [12], not [01]"):
        check(model_of(), X, Y, **number)


def test_a_function_that_returns_the_same_model_is_refused():
    model = model_of()()
    with pytest.raises(UserError, match="must make a new model each time"):
        check(lambda: model, X, Y, **SMALL)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["keras_replicas", "check", *words])
    return main()


@pytest.mark.slow
def test_the_command_line_is_the_same(tmp_path, monkeypatch, capsys):
    file = tmp_path / "train.py"
    file.write_text(
        "from tests.test_check import *\n"
        "def right(): return model_of()(), X, Y\n"
        "def wrong(): return model_of(Centre)(), X, Y\n"
    )
    monkeypatch.syspath_prepend(str(ROOT))
    options = ("--steps", "4", "--batch-size", "4", "--replicas", "2")
    assert run(monkeypatch, f"{file}:right", *options) == 0 and "THE SAME to" in capsys.readouterr().out
    assert (
        run(monkeypatch, f"{file}:wrong", *options) == 1
        and "DIFFERENT, first the training loss" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("nothing.py:f", "there is no file 'nothing.py'"),
        ("{file}:g", "has no function 'g'"),
        ("train.py", "'train.py' names no function"),
        ("{file}:h", "h must take no arguments"),
        ("{file}:k", "k, or plain Keras with what it returns, fails with ZeroDivisionError: division by zero"),
        ("{other}:f", "other.py fails with NameError: name 'nothing' is not defined"),
    ],
)
def test_a_wrong_command_line_is_said_in_one_line(words, told, tmp_path, monkeypatch):
    file = tmp_path / "train.py"
    file.write_text("f = 1\ndef h(seed): pass\ndef k(): 1 / 0\n")
    other = tmp_path / "other.py"
    other.write_text("nothing\n")
    with pytest.raises(UserError, match=told):
        run(monkeypatch, words.format(file=file, other=other))


# What a model may be.


class Refuses64(keras.metrics.Metric):
    """As some of Keras's do, it cannot be updated in float64."""

    def __init__(self):
        super().__init__(name="refuses")
        self.total = self.add_variable((), "zeros", dtype="float32", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        if y_pred.dtype == tf.float64:
            raise TypeError("not in float64")
        self.total.assign_add(ops.sum(y_pred))

    def result(self):
        return self.total.value


class Pool(layers.Layer):
    """Attends to places; of the softmax's bias, the gradient is nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.attention = layers.Dense(1)

    def call(self, x):
        weights = ops.softmax(self.attention(x), axis=1)
        return ops.squeeze(ops.matmul(ops.transpose(weights, (0, 2, 1)), x), 1)


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_a_gradient_that_is_rounding_alone_is_no_fault(seed):
    def build():
        inputs = keras.Input([6, 4])
        model = keras.Model(inputs, layers.Dense(3)(Pool()(layers.Dense(4)(inputs))))
        model.compile("adam", LOSS, metrics=[Refuses64()])
        return model

    x = np.random.default_rng(1).normal(size=(EXAMPLES, 6, 4)).astype("float32")
    found = check(build, x, Y, **SMALL, seed=seed)
    assert found and "float32" in found.text


class MapsInFloat32(layers.Layer):
    def call(self, x):
        return tf.map_fn(lambda row: row + tf.constant(1.0, tf.float32), x)


def test_a_failure_in_float64_leaves_no_trace():
    """`tf.map_fn`, when it fails, leaves TensorFlow's variable scope changed, and no strategy could make a variable."""
    assert check(model_of(MapsInFloat32), X, Y, **SMALL)


def test_the_only_loss_may_be_that_of_a_layer():
    class Adding(layers.Layer):
        def call(self, x):
            self.add_loss(ops.mean(x**2))
            return x

    def build():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Adding()])
        model.compile("sgd")
        return model

    assert check(build, X, **SMALL)


class Drawing(keras.Model):
    """Draws by TensorFlow's functions and generators with a state, in a custom step of two optimizers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(3), layers.Dense(3)
        self.generator = tf.random.Generator.from_seed(1)

    def compile(self):
        super().compile("adam")
        self.other_optimizer = keras.optimizers.Adam()

    def train_step(self, data):
        x, y = data
        shape = (tf.shape(x)[0], 3)
        noise = tf.random.normal(shape, dtype=x.dtype) + self.generator.uniform(shape, dtype=x.dtype)
        noise += keras.random.uniform(shape, dtype=x.dtype)
        kinds = tf.cast(keras.random.categorical(tf.zeros(shape), 1), x.dtype)
        for layer, optimizer in ((self.first, self.optimizer), (self.second, self.other_optimizer)):
            with tf.GradientTape() as tape:
                outputs = layer(x) + noise * kinds
                loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True))
            optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
        return {"loss": loss}


def test_random_draws_are_held():
    def build():
        model = Drawing()
        model.compile()
        return model

    found = check(build, X, Y, **SMALL)
    assert found
    assert "train_step: adam gets a mean over examples; adam_1 gets a mean over examples" in found.text
    assert "not compared: predict, which plain Keras cannot do here: the model has no call" in found.text


class SparseStep(Own):
    """A custom step whose adaptive optimizer gets the rows of a table, some of them twice."""

    def __init__(self):
        super().__init__("mean")
        self.table = layers.Embedding(9, 4)

    def call(self, ids):
        return self.dense(ops.mean(self.table(ids), axis=1))


def test_repeated_tokens_in_a_custom_step_are_no_fault():
    def build():
        model = SparseStep()
        model.compile("adam")
        return model

    found = check(build, IDS, Y, **SMALL)
    assert found and "train_step: adam gets a mean over examples" in found.text


def test_a_constant_batch_size_is_refused_in_a_sentence():
    def build():
        inputs = keras.Input([4], batch_size=4)
        model = keras.Model(inputs, layers.Dense(3)(ops.reshape(inputs, (4, 2, 2))[:, 0]))
        model.compile("sgd", LOSS)
        return model

    found = check(build, X, Y, **SMALL)
    assert "4 steps of 4; " in found.text
    assert "REFUSED\nwhy: Functional.call works on the batch of 4 examples, but not on a part of it" in found.text


def test_the_error_of_a_model_that_is_wrong_is_kerass():
    with pytest.raises(ValueError, match="expected"):
        check(model_of(shape=(5,)), X, Y, **SMALL)


# What data may be.


class TwoBatches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[index * 5 : index * 5 + 5], Y[index * 5 : index * 5 + 5]


def dataset(*data):
    first = tuple(each[:10] for each in data)
    return tf.data.Dataset.from_tensor_slices(first if len(first) > 1 else first[0]).batch(5)


DATA = {
    "a tf.data.Dataset": (lambda: dataset(X, Y), "4 steps of 5, two of 4 and 1"),
    "zipped": (lambda: tf.data.Dataset.zip(dataset(X), dataset(Y)), "4 steps of 5"),
    "a PyDataset": (lambda: TwoBatches(workers=2, use_multiprocessing=False), "4 steps of 5, two of 4 and 1"),
    "a generator": (lambda: (batch for batch in dataset(X, Y)), "4 steps of 5"),
}


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
@pytest.mark.slow
def test_arrays_may_be_sparse_or_ragged(kind):
    class Sums(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)
            self.dense.build((None, 4 if kind == "sparse" else 2))

        def call(self, x):
            if isinstance(x, tf.RaggedTensor):
                return self.dense(tf.cast(tf.stack([x.row_lengths(), tf.reduce_sum(x, 1)], 1), self.compute_dtype))
            return self.dense(tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x)

    def build():
        model = Sums()
        model.compile("sgd", LOSS)
        return model

    lengths = RANDOM.integers(1, 5, EXAMPLES)
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum()) % 7, lengths)
    data = tf.sparse.from_dense(np.where(X > 0, X, 0)) if kind == "sparse" else ragged
    assert check(build, data, Y, **SMALL)


def test_unlike_numbers_of_examples_are_refused():
    with pytest.raises(UserError, match="must have the same number of examples"):
        check(model_of(), X, Y[:5])


@pytest.mark.parametrize("kind", ["a PyDataset", *slow("a tf.data.Dataset", "zipped", "a generator")])
def test_data_may_be_what_fit_takes(kind):
    make, steps = DATA[kind]
    found = check(model_of(layers.BatchNormalization), make(), **SMALL)
    assert found and steps in found.text


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_rows_of_ragged_and_sparse_tensors_are_taken(kind):
    dense = np.array([[1, 2, 0], [3, 0, 0], [0, 4, 5]])
    tensor = tf.RaggedTensor.from_tensor(dense) if kind == "ragged" else tf.sparse.from_dense(dense)
    taken = take_rows((tensor, None), [2, 0])[0]
    found = taken.to_tensor() if kind == "ragged" else tf.sparse.to_dense(taken)
    np.testing.assert_array_equal(found, dense[[2, 0]])


@pytest.mark.slow
def test_the_command_prints_a_table_of_what_differs(tmp_path, monkeypatch, capsys):
    file = tmp_path / "train.py"
    file.write_text("from tests.test_check import *\ndef wrong(): return model_of(Centre)(), X, Y\n")
    monkeypatch.syspath_prepend(str(ROOT))
    assert run(monkeypatch, f"{file}:wrong", "--steps", "4", "--batch-size", "4", "--replicas", "2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert ["value", "step", "one", "device", "2", "replicas", "relative"] in [line.split() for line in lines]
    assert any(line.split()[:3] == ["training", "loss", "1"] for line in lines) and len(lines) < 24


@pytest.mark.parametrize("kind", [keras.optimizers.Nadam, *slow(keras.optimizers.Adafactor)])
def test_an_optimizer_may_keep_what_keras_names_otherwise(kind):
    assert check(model_of(lambda: layers.Dense(3), optimizer=kind), X, Y, **SMALL)


class InFloat32(Own):
    """A custom step whose loss is in float32, whatever the model's dtype."""

    def __init__(self):
        super().__init__("mean")

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(self(data[0], training=True), "float32")))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def test_a_loss_in_float32_is_a_mean():
    def build():
        model = InFloat32()
        model.compile("adam")
        return model

    found = check(build, X, Y, **SMALL)
    assert found and "train_step: adam gets a mean over examples" in found.text


class Diverging(Own):
    """A custom step whose loss is no number from the third step on."""

    def __init__(self):
        super().__init__("mean")

    def train_step(self, data):
        steps = self.optimizer.iterations
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0], training=True)))
            loss += tf.where(tf.convert_to_tensor(steps) >= 2, tf.cast(np.nan, loss.dtype), 0.0)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def test_the_steps_before_a_loss_is_no_number_are_compared():
    def build():
        model = Diverging()
        model.compile("adam")
        return model

    assert "not compared: what follows step 2" in check(build, X, Y, **SMALL).text
