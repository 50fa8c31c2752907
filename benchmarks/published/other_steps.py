# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the methods are Keras's, or do what their names say
"""Programs of keras.io's folders audio, keras_recipes and guides that have a `train_step` or `test_step`."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from benchmarks.published.programs import (
    BATCH,
    CLASSES,
    EPOCHS,
    EXAMPLES,
    IMAGE_SIZE,
    Numbers,
    Wrap,
    batch_dataset,
    published_program,
    random_array,
    random_images,
    random_labels,
    results,
    sgd,
    zipped,
)

# audio/transformer_asr

HIDDEN = 6
VOCABULARY = 8


class TokenEmbedding(layers.Layer):
    """Embeddings of tokens and of positions."""

    def __init__(self, num_vocab, maxlen, num_hid):
        super().__init__()
        self.emb = layers.Embedding(num_vocab, num_hid)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=num_hid)

    def call(self, x):
        positions = tf.range(start=0, limit=tf.shape(x)[-1], delta=1)
        return self.emb(x) + self.pos_emb(positions)


class SpeechFeatureEmbedding(layers.Layer):
    """Convolutions that shorten the sound."""

    def __init__(self, num_hid):
        super().__init__()
        self.conv1 = layers.Conv1D(num_hid, 5, strides=2, padding="same", activation="relu")
        self.conv2 = layers.Conv1D(num_hid, 5, strides=2, padding="same", activation="relu")

    def call(self, x):
        return self.conv2(self.conv1(x))


class TransformerEncoder(layers.Layer):
    """Attention and two dense layers."""

    def __init__(self, embed_dim, num_heads, feed_forward_dim, rate=0.0):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential([layers.Dense(feed_forward_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs, training=False):
        attention = self.dropout1(self.att(inputs, inputs), training=training)
        x = self.layernorm1(inputs + attention)
        hidden = self.dropout2(self.ffn(x), training=training)
        return self.layernorm2(x + hidden)


class TransformerDecoder(layers.Layer):
    """Causal attention, attention to the sound, and two dense layers."""

    def __init__(self, embed_dim, num_heads, feed_forward_dim, dropout_rate=0.0):
        super().__init__()
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm3 = layers.LayerNormalization(epsilon=1e-6)
        self.self_att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.enc_att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.self_dropout = layers.Dropout(dropout_rate)
        self.enc_dropout = layers.Dropout(dropout_rate)
        self.ffn_dropout = layers.Dropout(dropout_rate)
        self.ffn = keras.Sequential([layers.Dense(feed_forward_dim, activation="relu"), layers.Dense(embed_dim)])

    def causal_attention_mask(self, batch_size, length):
        mask = tf.range(length)[:, None] >= tf.range(length)
        return tf.tile(mask[None], tf.stack([batch_size, 1, 1]))

    def call(self, enc_out, target):
        shape = tf.shape(target)
        mask = self.causal_attention_mask(shape[0], shape[1])
        attention = self.self_att(target, target, attention_mask=mask)
        target = self.layernorm1(target + self.self_dropout(attention))
        attention = self.enc_att(target, enc_out)
        x = self.layernorm2(self.enc_dropout(attention) + target)
        return self.layernorm3(x + self.ffn_dropout(self.ffn(x)))


class Transformer(keras.Model):
    """Calls itself with a list made of a dict of data; is built in the first step by that call.

    `compute_loss` gets no x, labels that are made in the step, and a mask of truth values as
    weights. Rows of embeddings repeat.
    """

    def __init__(self, num_layers_enc=1, num_layers_dec=1):
        super().__init__()
        self.loss_metric = keras.metrics.Mean(name="loss")
        self.num_layers_dec = num_layers_dec
        self.num_classes = VOCABULARY
        self.enc_input = SpeechFeatureEmbedding(HIDDEN)
        self.dec_input = TokenEmbedding(VOCABULARY, maxlen=10, num_hid=HIDDEN)
        self.encoder = keras.Sequential(
            [self.enc_input] + [TransformerEncoder(HIDDEN, 2, 2 * HIDDEN) for _ in range(num_layers_enc)]
        )
        for index in range(num_layers_dec):
            setattr(self, f"dec_layer_{index}", TransformerDecoder(HIDDEN, 2, 2 * HIDDEN))
        self.classifier = layers.Dense(VOCABULARY)

    def decode(self, enc_out, target):
        y = self.dec_input(target)
        for index in range(self.num_layers_dec):
            y = getattr(self, f"dec_layer_{index}")(enc_out, y)
        return y

    def call(self, inputs):
        source, target = inputs[0], inputs[1]
        return self.classifier(self.decode(self.encoder(source), target))

    @property
    def metrics(self):
        return [self.loss_metric]

    def batch_loss(self, batch):
        source, target = batch["source"], batch["target"]
        dec_input, dec_target = target[:, :-1], target[:, 1:]
        predicted = self([source, dec_input])
        one_hot = tf.one_hot(dec_target, depth=self.num_classes)
        mask = tf.math.logical_not(tf.math.equal(dec_target, 0))
        return self.compute_loss(None, one_hot, predicted, sample_weight=mask)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.batch_loss(batch)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}

    def test_step(self, batch):
        self.loss_metric.update_state(self.batch_loss(batch))
        return {"loss": self.loss_metric.result()}


def speech_data(count: int, seed: int) -> tf.data.Dataset:
    """Dicts of sounds and of padded tokens."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, VOCABULARY, (count, 6))
    lengths = random.integers(2, 7, (count, 1))
    texts = np.where(np.arange(6) < lengths, tokens, 0)
    sounds = tf.data.Dataset.from_tensor_slices(random_array(count, 12, 4, seed=seed))
    pairs = zipped(sounds, tf.data.Dataset.from_tensor_slices(texts))
    return batch_dataset(pairs.map(lambda sound, text: {"source": sound, "target": text}))


@published_program("audio/transformer_asr", "equal")
def train_transformer_asr(wrap: Wrap) -> Numbers:
    """A subclassed model that nothing builds before the first step."""
    model = Transformer()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    schedule = keras.optimizers.schedules.PolynomialDecay(0.5, 8, 0.1)
    model.compile(optimizer=sgd(schedule), loss=loss)
    model = wrap(model)
    history = model.fit(
        speech_data(EXAMPLES, seed=0),
        validation_data=speech_data(13, seed=1),
        epochs=EPOCHS,
        verbose=0,
    )
    return results(model, history)


# keras_recipes/trainer_pattern


class MyTrainer(keras.Model):
    """A loss and a metric of its own; the loss is not returned."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy()
        self.accuracy_metric = keras.metrics.SparseCategoricalAccuracy()

    @property
    def metrics(self):
        return [self.accuracy_metric]

    def call(self, x):
        return self.model(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self.model(x, training=True)
            loss = self.loss_fn(y, y_pred)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        for metric in self.metrics:
            metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y = data
        y_pred = self.model(x, training=False)
        for metric in self.metrics:
            metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@published_program("keras_recipes/trainer_pattern", "equal")
def train_trainer_pattern(wrap: Wrap) -> Numbers:
    """One step for two models, one of which has no input layer, and is built by the data."""
    sequential = keras.Sequential(
        [
            layers.Flatten(),
            layers.Dense(6, activation="relu"),
            layers.Dropout(0.0),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1))
    x = layers.Dropout(0.0)(layers.Dense(6, activation="relu")(layers.Flatten()(image)))
    functional = keras.Model(image, layers.Dense(CLASSES, activation="softmax")(x))
    images, labels = random_images(EXAMPLES, channels=1), random_labels(EXAMPLES)
    validation = (random_images(13, channels=1, seed=1), random_labels(13, seed=1))
    numbers = {}
    for name, inner in (("sequential", sequential), ("functional", functional)):
        model = wrap(MyTrainer(inner))
        model.compile(optimizer=sgd(0.1))
        history = model.fit(
            images,
            labels,
            epochs=EPOCHS,
            batch_size=BATCH,
            validation_data=validation,
            shuffle=False,
            verbose=0,
        )
        found = results(model, history)
        numbers |= {f"{name}/{key}": value for key, value in found.items()}
    return numbers


# guides/custom_train_step_in_tensorflow


def regression_data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets, and weights of the examples, the latter two with a column."""
    return (
        random_array(EXAMPLES, 5),
        random_array(EXAMPLES, 1, seed=1),
        random_array(EXAMPLES, 1, seed=2),
    )


def make_regression(model_class: type[keras.Model]) -> keras.Model:
    """A functional model of one dense layer."""
    inputs = keras.Input((5,))
    return model_class(inputs, layers.Dense(1)(inputs))


def fit_regression(model: keras.Model, **options: Any) -> keras.callbacks.History:
    """Trains on arrays in their order."""
    x, y, _ = regression_data()
    return model.fit(x, y, epochs=EPOCHS, batch_size=BATCH, shuffle=False, verbose=0, **options)


class ModelWithComputeLoss(keras.Model):
    """`compute_loss`, whose value the tracker of the loss gets; `optimizer.apply`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@published_program("guides/custom_train_step_in_tensorflow (first example)", "equal")
def train_with_compute_loss(wrap: Wrap) -> Numbers:
    """A compiled loss and metric."""
    model = make_regression(ModelWithComputeLoss)
    model.compile(optimizer=sgd(0.1), loss="mse", metrics=["mae"])
    model = wrap(model)
    return results(model, fit_regression(model))


class LowerLevelModel(keras.Model):
    """A loss and metrics of its own, and nothing compiled but the optimizer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}


@published_program("guides/custom_train_step_in_tensorflow (going lower-level)", "equal")
def train_lower_level(wrap: Wrap) -> Numbers:
    """Metrics that are listed by the model."""
    model = wrap(make_regression(LowerLevelModel))
    model.compile(optimizer=sgd(0.1))
    return results(model, fit_regression(model))


class ModelWithSampleWeight(keras.Model):
    """Weights of examples in `compute_loss` and in metrics, not in the tracker of the loss."""

    def train_step(self, data):
        if len(data) == 3:
            x, y, sample_weight = data
        else:
            sample_weight = None
            x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}


class ModelWithTestStep(keras.Model):
    """A `test_step` alone."""

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@published_program("guides/custom_train_step_in_tensorflow (sample_weight, test_step)", "equal")
def train_with_sample_weight(wrap: Wrap) -> Numbers:
    """A second model has a `test_step`, and is compiled without an optimizer, to be evaluated."""
    model = make_regression(ModelWithSampleWeight)
    model.compile(optimizer=sgd(0.1), loss="mse", metrics=["mae"])
    model = wrap(model)
    x, y, sample_weight = regression_data()
    history = fit_regression(model, sample_weight=sample_weight)
    evaluated = wrap(make_regression(ModelWithTestStep))
    evaluated.compile(loss="mse", metrics=["mae"])
    scores = evaluated.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return results(model, history, scores=scores)
