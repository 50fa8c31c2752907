import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicas.model import data_parallel
from keras_replicas.optimizers import apply_summed
from keras_replicas.strategy import make_strategy

IDS = np.array([[1, 2, 2, 0], [3, 1, 4, 2], [1, 1, 1, 1]])


class Seeing(keras.optimizers.SGD):
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
