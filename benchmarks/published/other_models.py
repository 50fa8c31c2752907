# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the methods are Keras's, or do what their names say
"""Programs of keras.io without a `train_step` of their own.

They are of its folders structured_data, keras_recipes and guides.
"""

import math
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from keras.utils import FeatureSpace

from benchmarks.published.programs import (
    BATCH,
    CLASSES,
    EPOCHS,
    EXAMPLES,
    IMAGE_SIZE,
    Numbers,
    Wrap,
    batched,
    binary_labels,
    fit_arrays,
    nonzero_bias,
    prefixed,
    published_program,
    random_array,
    random_images,
    random_labels,
    results,
    sgd,
)

FEATURES = 5
VALIDATION_EXAMPLES = 13


def random_integers(count: int, limit: int, seed: int = 0) -> np.ndarray:
    """Integers below a limit."""
    return np.random.default_rng(seed).integers(0, limit, count)


def class_data(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features and classes."""
    return random_array(count, FEATURES, seed=seed), random_labels(count, seed)


def one_hot(labels: np.ndarray) -> np.ndarray:
    """A row of `keras.config.floatx()` for each class."""
    return np.eye(CLASSES, dtype=keras.config.floatx())[labels]


# structured_data/structured_data_classification_with_feature_space


def patients(count: int, seed: int = 0) -> tf.data.Dataset:
    """Batches of dicts of numbers, categories and texts, with labels."""
    random = np.random.default_rng(seed)
    features = {
        "sex": random.integers(0, 2, count),
        "ca": random.integers(0, 3, count),
        "thal": random.choice(["fixed", "normal", "reversible"], count),
        "age": random.integers(29, 78, count),
        "chol": random.integers(126, 400, count),
        "oldpeak": random.uniform(0, 6, count),
    }
    return batched((features, binary_labels(count, seed)))


def make_feature_space() -> FeatureSpace:
    """Encodes the features of a patient as one vector."""
    return FeatureSpace(
        features={
            "sex": FeatureSpace.integer_categorical(num_oov_indices=0),
            "ca": FeatureSpace.integer_categorical(),
            "thal": FeatureSpace.string_categorical(),
            "age": FeatureSpace.float_discretized(num_bins=4),
            "chol": FeatureSpace.float_normalized(),
            "oldpeak": FeatureSpace.float_normalized(),
        },
        crosses=[
            FeatureSpace.cross(feature_names=("sex", "age"), crossing_dim=8),
            FeatureSpace.cross(feature_names=("thal", "ca"), crossing_dim=4),
        ],
        output_mode="concat",
    )


@published_program("structured_data/structured_data_classification_with_feature_space", "equal")
def train_with_feature_space(wrap: Wrap) -> Numbers:
    """Trains on encoded features, and predicts by a model that encodes them itself."""
    data, validation = patients(EXAMPLES), patients(VALIDATION_EXAMPLES, seed=1)
    feature_space = make_feature_space()
    feature_space.adapt(data.map(lambda x, _: x))
    encoded_data = data.map(lambda x, y: (feature_space(x), y)).prefetch(2)
    encoded_validation = validation.map(lambda x, y: (feature_space(x), y)).prefetch(2)
    encoded_features = feature_space.get_encoded_features()
    x = layers.Dense(4, activation="relu")(encoded_features)
    predictions = layers.Dense(1, activation="sigmoid")(layers.Dropout(0.0)(x))
    training_model = keras.Model(encoded_features, predictions)
    training_model.compile(
        optimizer=sgd(0.1),
        loss="binary_crossentropy",
        metrics=["accuracy"],
    )
    training_model = wrap(training_model)
    inference_model = wrap(keras.Model(feature_space.get_inputs(), predictions))
    history = training_model.fit(
        encoded_data,
        epochs=EPOCHS,
        validation_data=encoded_validation,
        verbose=0,
    )
    numbers = results(training_model, history)
    numbers["predictions"] = inference_model.predict(validation.map(lambda x, _: x), verbose=0)
    return numbers


# structured_data/collaborative_filtering_movielens

USERS = 6
MOVIES = 8


class RecommenderNet(keras.Model):
    """A product over all examples of the batch; regularizers of embeddings."""

    def __init__(self, num_users, num_movies, embedding_size):
        super().__init__()
        of_vectors = {
            "embeddings_initializer": "he_normal",
            "embeddings_regularizer": keras.regularizers.l2(1e-3),
        }
        self.user_embedding = layers.Embedding(num_users, embedding_size, **of_vectors)
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(num_movies, embedding_size, **of_vectors)
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user_vector = self.user_embedding(inputs[:, 0])
        user_bias = self.user_bias(inputs[:, 0])
        movie_vector = self.movie_embedding(inputs[:, 1])
        movie_bias = self.movie_bias(inputs[:, 1])
        dot_user_movie = ops.tensordot(user_vector, movie_vector, 2)
        return ops.nn.sigmoid(dot_user_movie + user_bias + movie_bias)


def ratings(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a user and a movie, and ratings from 0 to 1."""
    users = random_integers(count, USERS, seed)
    movies = random_integers(count, MOVIES, seed + 10)
    return np.stack([users, movies], axis=1), random_array(count, seed=seed)


@published_program("structured_data/collaborative_filtering_movielens", "warned")
def train_collaborative_filtering(wrap: Wrap) -> Numbers:
    """A subclassed model that the first batch builds."""
    model = RecommenderNet(USERS, MOVIES, 3)
    model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=sgd(0.1))
    model = wrap(model)
    validation = ratings(VALIDATION_EXAMPLES, seed=1)
    history = fit_arrays(model, *ratings(EXAMPLES), validation_data=validation)
    return results(model, history)


# structured_data/imbalanced_classification


@published_program("structured_data/imbalanced_classification", "equal")
def train_imbalanced_classifier(wrap: Wrap) -> Numbers:
    """Weights of classes, metrics that count, and a checkpoint of each epoch."""
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(4, activation="relu"),
            layers.Dense(4, activation="relu"),
            layers.Dropout(0.0),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = [
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.FalsePositives(name="fp"),
        keras.metrics.TrueNegatives(name="tn"),
        keras.metrics.TruePositives(name="tp"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
    ]
    model.compile(optimizer=sgd(0.5), loss="binary_crossentropy", metrics=metrics)
    model = wrap(model)
    targets = binary_labels(EXAMPLES)[:, np.newaxis].astype("uint8")
    targets[:BATCH] = 0  # a batch without the rare class
    validation_targets = binary_labels(VALIDATION_EXAMPLES, seed=1)[:, np.newaxis]
    count = np.bincount(targets[:, 0])
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "fraud_model_at_epoch_{epoch}.keras"))
        history = fit_arrays(
            model,
            random_array(EXAMPLES, FEATURES, low=-1.0),
            targets,
            callbacks=[keras.callbacks.ModelCheckpoint(file)],
            validation_data=(
                random_array(VALIDATION_EXAMPLES, FEATURES, low=-1.0, seed=1),
                validation_targets,
            ),
            class_weight={0: 1.0 / count[0], 1: 1.0 / count[1]},
        )
    return results(model, history)


# structured_data/deep_neural_decision_forests

NUMERIC_FEATURES = ["age", "capital_gain", "hours_per_week"]
CATEGORICAL_FEATURES = {"education": 4, "race": 5}  # and the sizes of their vocabularies


class NeuralDecisionTree(keras.Model):
    """Weights of the leaves' classes, and a loop over levels that takes the batch size."""

    def __init__(self, depth, num_features, used_features_rate, num_classes):
        super().__init__()
        self.depth = depth
        self.num_leaves = 2**depth
        num_used_features = int(num_features * used_features_rate)
        used = np.random.choice(np.arange(num_features), num_used_features, replace=False)
        mask = np.eye(num_features)[used]
        self.used_features_mask = ops.convert_to_tensor(mask, dtype=keras.config.floatx())
        self.pi = self.add_weight(
            initializer="random_normal",
            shape=[self.num_leaves, num_classes],
            trainable=True,
        )
        self.decision_fn = layers.Dense(self.num_leaves, activation="sigmoid", name="decision")

    def call(self, features):
        batch_size = ops.shape(features)[0]
        features = ops.matmul(features, ops.transpose(self.used_features_mask))
        decisions = ops.expand_dims(self.decision_fn(features), axis=2)
        decisions = layers.concatenate([decisions, 1 - decisions], axis=2)
        mu = ops.ones([batch_size, 1, 1])
        begin_idx, end_idx = 1, 2
        for level in range(self.depth):
            mu = ops.reshape(mu, [batch_size, -1, 1])
            mu = ops.tile(mu, (1, 1, 2)) * decisions[:, begin_idx:end_idx, :]
            begin_idx = end_idx
            end_idx = begin_idx + 2 ** (level + 1)
        mu = ops.reshape(mu, [batch_size, self.num_leaves])
        return ops.matmul(mu, keras.activations.softmax(self.pi))


class NeuralDecisionForest(keras.Model):
    """A list of trees that are models, and their mean."""

    def __init__(self, num_trees, depth, num_features, used_features_rate, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.ensemble = []
        for _ in range(num_trees):
            tree = NeuralDecisionTree(depth, num_features, used_features_rate, num_classes)
            self.ensemble.append(tree)

    def call(self, inputs):
        batch_size = ops.shape(inputs)[0]
        outputs = ops.zeros([batch_size, self.num_classes])
        for tree in self.ensemble:
            outputs += tree(inputs)
        return outputs / len(self.ensemble)


def census_data(count: int, seed: int = 0) -> tf.data.Dataset:
    """Dicts of numbers and of indices of categories, and classes."""
    features = {}
    for index, name in enumerate(NUMERIC_FEATURES):
        features[name] = random_array(count, 1, high=9.0, seed=seed + 10 * index)
    for index, (name, size) in enumerate(CATEGORICAL_FEATURES.items()):
        features[name] = random_integers(count, size, seed + 10 * index)
    return batched((features, binary_labels(count, seed)))


def encode_inputs(inputs: dict[str, keras.KerasTensor]) -> keras.KerasTensor:
    """Numbers as they are, and embeddings of categories."""
    encoded = []
    for name, value in inputs.items():
        if name in CATEGORICAL_FEATURES:
            size = CATEGORICAL_FEATURES[name]
            encoded.append(layers.Embedding(size, int(math.sqrt(size)))(value))
        else:
            encoded.append(value)
    return layers.concatenate(encoded)


@published_program("structured_data/deep_neural_decision_forests", "equal")
def train_decision_forests(wrap: Wrap) -> Numbers:
    """A tree and then a forest, each within a functional model of a dict of inputs."""
    numbers = {}
    for name in ("tree", "forest"):
        inputs = {name: keras.Input((1,)) for name in NUMERIC_FEATURES}
        inputs |= {name: keras.Input((), dtype="int64") for name in CATEGORICAL_FEATURES}
        features = layers.BatchNormalization()(encode_inputs(inputs))
        if name == "tree":
            inner = NeuralDecisionTree(3, features.shape[1], 1.0, 2)
        else:
            inner = NeuralDecisionForest(2, 2, features.shape[1], 0.5, 2)
        model = keras.Model(inputs=inputs, outputs=inner(features))
        model.compile(
            optimizer=sgd(0.5),
            loss=keras.losses.SparseCategoricalCrossentropy(),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )
        model = wrap(model)
        history = model.fit(census_data(EXAMPLES), epochs=EPOCHS, verbose=0)
        test_data = census_data(VALIDATION_EXAMPLES, seed=1)
        scores = model.evaluate(test_data, verbose=0, return_dict=True)
        numbers |= prefixed(name, results(model, history, scores=scores))
    return numbers


# keras_recipes/memory_efficient_embeddings

USER_NAMES = [f"user_{index}" for index in range(USERS)]
MOVIE_NAMES = [f"movie_{index}" for index in range(MOVIES)]
BASE_EMBEDDING = 4


def embedding_encoder(vocabulary, embedding_dim, num_oov_indices=0) -> keras.Sequential:
    """Looks up a name, and the embedding of its index."""
    return keras.Sequential(
        [
            layers.StringLookup(
                vocabulary=vocabulary,
                mask_token=None,
                num_oov_indices=num_oov_indices,
            ),
            layers.Embedding(len(vocabulary) + num_oov_indices, embedding_dim),
        ]
    )


class QREmbedding(layers.Layer):
    """A product of two embeddings, of the quotient and of the remainder of an index."""

    def __init__(self, vocabulary, embedding_dim, num_buckets):
        super().__init__()
        self.num_buckets = num_buckets
        self.index_lookup = layers.StringLookup(
            vocabulary=vocabulary,
            mask_token=None,
            num_oov_indices=0,
        )
        self.q_embeddings = layers.Embedding(num_buckets, embedding_dim)
        self.r_embeddings = layers.Embedding(num_buckets, embedding_dim)

    def call(self, inputs):
        index = self.index_lookup(inputs)
        quotient = self.q_embeddings(tf.math.floordiv(index, self.num_buckets))
        remainder = self.r_embeddings(tf.math.floormod(index, self.num_buckets))
        return quotient * remainder


class MDEmbedding(layers.Layer):
    """Embeddings of other sizes for each block of names, and a lookup table of blocks."""

    def __init__(self, blocks_vocabulary, blocks_embedding_dims, base_embedding_dim):
        super().__init__()
        self.base_embedding_dim = base_embedding_dim
        keys = [name for block in blocks_vocabulary for name in block]
        lengths = [len(block) for block in blocks_vocabulary]
        values = np.repeat(np.arange(len(lengths), dtype="int32"), lengths)
        self.vocab_to_block = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(keys, values),
            default_value=-1,
        )
        self.encoders = []
        self.projectors = []
        for block, size in zip(blocks_vocabulary, blocks_embedding_dims, strict=True):
            self.encoders.append(embedding_encoder(block, size, num_oov_indices=1))
            if size == base_embedding_dim:
                self.projectors.append(layers.Lambda(lambda x: x))
            else:
                self.projectors.append(layers.Dense(base_embedding_dim))

    def call(self, inputs):
        block_indices = self.vocab_to_block.lookup(inputs)
        shape = (tf.shape(inputs)[0], self.base_embedding_dim)
        embeddings = tf.zeros(shape, dtype=self.compute_dtype)
        for index, encoder in enumerate(self.encoders):
            found = self.projectors[index](encoder(inputs))
            mask = tf.expand_dims(tf.cast(block_indices == index, found.dtype), 1)
            embeddings += found * mask
        return embeddings


def named_ratings(count: int, seed: int = 0) -> tf.data.Dataset:
    """Dicts of names of users and movies, and ratings from 1 to 5."""
    pairs, values = ratings(count, seed)
    names = {
        "user_id": [USER_NAMES[user] for user in pairs[:, 0]],
        "movie_id": [MOVIE_NAMES[movie] for movie in pairs[:, 1]],
    }
    return batched((names, 1 + 4 * values))


@published_program("keras_recipes/memory_efficient_embeddings", "equal")
def train_memory_efficient_embeddings(wrap: Wrap) -> Numbers:
    """Strings as inputs; a model with whole embeddings, and one with smaller ones."""
    numbers = {}
    for name in ("baseline", "efficient"):
        user = keras.Input((), name="user_id", dtype="string")
        movie = keras.Input((), name="movie_id", dtype="string")
        if name == "baseline":
            user_embedding = embedding_encoder(USER_NAMES, BASE_EMBEDDING)(user)
            movie_embedding = embedding_encoder(MOVIE_NAMES, BASE_EMBEDDING)(movie)
        else:
            blocks = [MOVIE_NAMES[:3], MOVIE_NAMES[3:]]
            user_embedding = QREmbedding(USER_NAMES, BASE_EMBEDDING, 3)(user)
            movie_embedding = MDEmbedding(blocks, [BASE_EMBEDDING, 2], BASE_EMBEDDING)(movie)
        logits = layers.Dot(axes=1, name="dot_similarity")([user_embedding, movie_embedding])
        prediction = keras.activations.sigmoid(logits) * 5
        model = keras.Model(inputs=[user, movie], outputs=prediction)
        model.compile(
            optimizer=sgd(0.1),
            loss=keras.losses.MeanSquaredError(),
            metrics=[keras.metrics.MeanAbsoluteError(name="mae")],
        )
        model = wrap(model)
        history = model.fit(
            named_ratings(EXAMPLES),
            epochs=EPOCHS,
            validation_data=named_ratings(VALIDATION_EXAMPLES, seed=1),
            verbose=0,
        )
        numbers |= prefixed(name, results(model, history))
    return numbers


# keras_recipes/endpoint_layer_pattern


class LogisticEndpoint(layers.Layer):
    """Adds a loss and updates a metric, where targets are given."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_metric = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits, targets=None, sample_weight=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, sample_weight))
            self.accuracy_metric.update_state(targets, logits, sample_weight)
        return tf.nn.softmax(logits)


class LogReg(keras.Model):
    """Gives all its inputs to the endpoint."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.logistic_endpoint = LogisticEndpoint()

    def call(self, inputs):
        return self.logistic_endpoint(
            logits=self.dense(inputs["inputs"]),
            targets=inputs["targets"],
            sample_weight=inputs["sample_weight"],
        )


@published_program("keras_recipes/endpoint_layer_pattern", "equal")
def train_endpoint_layer(wrap: Wrap) -> Numbers:
    """Targets and weights of examples as inputs, and nothing compiled but an optimizer."""
    inputs = keras.Input((FEATURES,), name="inputs")
    targets = keras.Input((1,), name="targets")
    sample_weight = keras.Input((1,), name="sample_weight")
    predictions = LogisticEndpoint()(layers.Dense(1)(inputs), targets, sample_weight)
    functional = keras.Model([inputs, targets, sample_weight], predictions)
    data = {
        "inputs": random_array(EXAMPLES, FEATURES, low=-1.0),
        "targets": binary_labels(EXAMPLES)[:, np.newaxis].astype(keras.config.floatx()),
        "sample_weight": random_array(EXAMPLES, 1, seed=2),
    }
    numbers = {}
    for name, model in (("functional", functional), ("subclassed", LogReg())):
        model.compile(sgd(0.5))
        model = wrap(model)
        history = fit_arrays(model, data)
        numbers |= prefixed(name, results(model, history))
    return numbers


# keras_recipes/sklearn_metric_callbacks


def jaccard_scores(predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """For each class, what both have, relative to what one of them has, as scikit-learn does."""
    scores = []
    for index in range(CLASSES):
        of_both = np.sum((predicted == index) & (labels == index))
        of_either = np.sum((predicted == index) | (labels == index))
        scores.append(of_both / max(of_either, 1))
    return np.asarray(scores)


class JaccardScoreCallback(keras.callbacks.Callback):
    """Predicts after each epoch, and has a Keras metric of its own."""

    def __init__(self, x_test, y_test):
        super().__init__()
        self.x_test = x_test
        self.y_test = y_test
        self.keras_metric = keras.metrics.Mean("jaccard_score")
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        self.keras_metric.reset_state()
        predictions = self.model.predict(self.x_test, verbose=0)
        scores = jaccard_scores(np.argmax(predictions, axis=-1), self.y_test)
        self.keras_metric.update_state(scores)
        self.found.append(self.keras_metric.result().numpy().astype(float))


@published_program("keras_recipes/sklearn_metric_callbacks", "equal")
def train_with_metric_callback(wrap: Wrap) -> Numbers:
    """Images and one-hot labels, of which the last are for validation."""
    model = keras.Sequential(
        [
            keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1)),
            layers.Conv2D(3, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Flatten(),
            layers.Dropout(0.0),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model.compile(loss="categorical_crossentropy", optimizer=sgd(0.1), metrics=["accuracy"])
    model = wrap(model)
    x_test = random_images(VALIDATION_EXAMPLES, channels=1, seed=1)
    callback = JaccardScoreCallback(x_test, random_labels(VALIDATION_EXAMPLES, seed=1))
    history = fit_arrays(
        model,
        random_images(EXAMPLES, channels=1),
        one_hot(random_labels(EXAMPLES)),
        validation_split=0.1,
        callbacks=[callback],
    )
    return results(model, history) | {"jaccard": np.asarray(callback.found)}


# guides/writing_your_own_callbacks


def make_callbacks_model() -> keras.Model:
    """One dense layer, compiled."""
    model = keras.Sequential([layers.Dense(1)])
    model.compile(
        optimizer=sgd(0.1),
        loss="mean_squared_error",
        metrics=["mean_absolute_error"],
    )
    return model


class LossAndErrorCallback(keras.callbacks.Callback):
    """Keeps what is reported after each batch, and after each epoch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append([logs["loss"], logs["mean_absolute_error"]])

    def on_test_batch_end(self, batch, logs=None):
        self.found.append([logs["loss"], logs["mean_absolute_error"]])

    def on_epoch_end(self, epoch, logs=None):
        self.found.append([logs["loss"], logs["mean_absolute_error"]])


class EarlyStoppingAtMinLoss(keras.callbacks.Callback):
    """Stops when the loss grows, and restores the weights of the epoch before."""

    def __init__(self, patience=0):
        super().__init__()
        self.patience = patience
        self.best_weights = None

    def on_train_begin(self, logs=None):
        self.wait = 0
        self.stopped_epoch = 0
        self.best = np.inf

    def on_epoch_end(self, epoch, logs=None):
        current = logs.get("loss")
        if np.less(current, self.best):
            self.best = current
            self.wait = 0
            self.best_weights = self.model.get_weights()
            return
        self.wait += 1
        if self.wait >= self.patience:
            self.stopped_epoch = epoch
            self.model.stop_training = True
            self.model.set_weights(self.best_weights)


class CustomLearningRateScheduler(keras.callbacks.Callback):
    """Reads and sets the optimizer's learning rate before each epoch."""

    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule

    def on_epoch_begin(self, epoch, logs=None):
        learning_rate = self.model.optimizer.learning_rate
        scheduled = self.schedule(epoch, float(ops.convert_to_numpy(learning_rate)))
        self.model.optimizer.learning_rate = scheduled


@published_program("guides/writing_your_own_callbacks", "equal")
def train_with_callbacks(wrap: Wrap) -> Numbers:
    """Three models, each with a callback; the second learns too fast in its fourth epoch."""
    x, y = random_array(EXAMPLES, FEATURES), random_array(EXAMPLES, seed=1)
    numbers = {}

    model = wrap(make_callbacks_model())
    callback = LossAndErrorCallback()
    history = fit_arrays(model, x, y, callbacks=[callback])
    scores = model.evaluate(
        x,
        y,
        batch_size=BATCH,
        verbose=0,
        callbacks=[callback],
        return_dict=True,
    )
    numbers |= prefixed("logs", results(model, history, scores=scores))
    numbers["logs"] = np.asarray(callback.found)

    model = wrap(make_callbacks_model())
    stopping = EarlyStoppingAtMinLoss()
    faster = CustomLearningRateScheduler(lambda epoch, rate: 1.5 if epoch > 2 else rate)
    history = fit_arrays(model, x, y, epochs=10, callbacks=[faster, stopping])
    numbers |= prefixed("stopping", results(model, history))
    numbers["stopped"] = np.asarray(stopping.stopped_epoch)

    model = wrap(make_callbacks_model())
    slower = CustomLearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
    history = fit_arrays(model, x, y, epochs=3, callbacks=[slower])
    return numbers | prefixed("schedule", results(model, history))


# guides/transfer_learning


def make_base_model() -> keras.Model:
    """A few convolutions and `BatchNormalization`, as if they were trained before."""
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = inputs
    for _ in range(2):
        x = layers.Conv2D(3, 3, padding="same", bias_initializer=nonzero_bias())(x)
        x = layers.BatchNormalization(beta_initializer=nonzero_bias())(x)
        x = layers.ReLU()(x)
    return keras.Model(inputs, x, name="base")


def animals(count: int, seed: int = 0) -> tf.data.Dataset:
    """Images of two kinds, with values up to 255."""
    return batched((random_images(count, high=255.0, seed=seed), binary_labels(count, seed)))


@published_program("guides/transfer_learning", "equal")
def train_transfer_learning(wrap: Wrap) -> Numbers:
    """A frozen base, then all of it at a lower rate; it is called as for inference both times."""
    base_model = make_base_model()
    base_model.trainable = False
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.Rescaling(scale=1 / 127.5, offset=-1)(inputs)
    x = layers.GlobalAveragePooling2D()(base_model(x, training=False))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.0)(x)))
    model = wrap(model)
    numbers = {}
    for learning_rate, is_trainable in ((0.5, False), (0.3, True)):
        base_model.trainable = is_trainable
        model.compile(
            optimizer=sgd(learning_rate),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy()],
        )
        history = model.fit(
            animals(EXAMPLES),
            epochs=EPOCHS,
            validation_data=animals(VALIDATION_EXAMPLES, seed=1),
            verbose=0,
        )
        numbers |= prefixed(f"base, {is_trainable}", results(model, history))
    return numbers


# guides/making_new_layers_and_models_via_subclassing


class ActivityRegularizationLayer(layers.Layer):
    """Adds a mean over all activations of the batch."""

    def __init__(self, activity_regularizer=1e-2):
        super().__init__()
        self.factor = activity_regularizer

    def call(self, inputs):
        self.add_loss(self.factor * ops.mean(inputs))
        return inputs


class Sampling(layers.Layer):
    """Draws of `keras.random` from a seed generator of the layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        shape = (ops.shape(z_mean)[0], ops.shape(z_mean)[1])
        epsilon = keras.random.normal(shape=shape, seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class Encoder(layers.Layer):
    """Makes a mean, the logarithm of a variance, and a draw."""

    def __init__(self, latent_dim, intermediate_dim):
        super().__init__(name="encoder")
        self.dense_proj = layers.Dense(intermediate_dim, activation="relu")
        self.dense_mean = layers.Dense(latent_dim)
        self.dense_log_var = layers.Dense(latent_dim)
        self.sampling = Sampling()

    def call(self, inputs):
        x = self.dense_proj(inputs)
        z_mean, z_log_var = self.dense_mean(x), self.dense_log_var(x)
        return z_mean, z_log_var, self.sampling((z_mean, z_log_var))


class Decoder(layers.Layer):
    """Makes an example of a draw."""

    def __init__(self, original_dim, intermediate_dim):
        super().__init__(name="decoder")
        self.dense_proj = layers.Dense(intermediate_dim, activation="relu")
        self.dense_output = layers.Dense(original_dim, activation="sigmoid")

    def call(self, inputs):
        return self.dense_output(self.dense_proj(inputs))


class VariationalAutoEncoder(keras.Model):
    """Adds a mean over the batch as a loss."""

    def __init__(self, original_dim, intermediate_dim, latent_dim):
        super().__init__(name="autoencoder")
        self.encoder = Encoder(latent_dim, intermediate_dim)
        self.decoder = Decoder(original_dim, intermediate_dim)

    def call(self, inputs):
        z_mean, z_log_var, z = self.encoder(inputs)
        reconstructed = self.decoder(z)
        kl_loss = -0.5 * ops.mean(z_log_var - ops.square(z_mean) - ops.exp(z_log_var) + 1)
        self.add_loss(kl_loss)
        return reconstructed


@published_program("guides/making_new_layers_and_models_via_subclassing", "equal")
def train_subclassed_autoencoder(wrap: Wrap) -> Numbers:
    """A model that is compiled with a loss and then without one, and an autoencoder.

    The published model has no weights, of which Keras warns; here is a dense layer before.
    """
    inputs = keras.Input((3,))
    outputs = ActivityRegularizationLayer()(layers.Dense(3)(inputs))
    model = wrap(keras.Model(inputs, outputs))
    x, y = random_array(2, 3), random_array(2, 3, seed=1)
    model.compile(optimizer=sgd(0.1), loss="mse")
    history = model.fit(x, y, verbose=0)
    numbers = prefixed("loss", results(model, history))
    model.compile(optimizer=sgd(0.1))
    history = model.fit(x, y, verbose=0)
    numbers |= prefixed("no loss", results(model, history))

    autoencoder = VariationalAutoEncoder(FEATURES, 4, 2)
    autoencoder.compile(sgd(0.5), loss=keras.losses.MeanSquaredError())
    autoencoder = wrap(autoencoder)
    x_train = random_array(EXAMPLES, FEATURES)
    history = fit_arrays(autoencoder, x_train, x_train)
    return numbers | prefixed("autoencoder", results(autoencoder, history))


# guides/training_with_built_in_methods


def make_digits_model() -> keras.Model:
    """Two dense layers before the last."""
    inputs = keras.Input((FEATURES,), name="digits")
    x = layers.Dense(4, activation="relu", name="dense_1")(inputs)
    x = layers.Dense(4, activation="relu", name="dense_2")(x)
    outputs = layers.Dense(CLASSES, activation="softmax", name="predictions")(x)
    return keras.Model(inputs=inputs, outputs=outputs)


def make_compiled_model() -> keras.Model:
    """The same, compiled by names."""
    model = make_digits_model()
    model.compile(
        optimizer=sgd(0.1),
        loss="sparse_categorical_crossentropy",
        metrics=["sparse_categorical_accuracy"],
    )
    return model


def custom_mean_squared_error(y_true, y_pred):
    """A mean for each example."""
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


class CustomMSE(keras.losses.Loss):
    """Two means for each example."""

    def __init__(self, regularization_factor=0.1, name="custom_mse"):
        super().__init__(name=name)
        self.regularization_factor = regularization_factor

    def call(self, y_true, y_pred):
        mse = ops.mean(ops.square(y_true - y_pred), axis=-1)
        reg = ops.mean(ops.square(0.5 - y_pred), axis=-1)
        return mse + reg * self.regularization_factor


class CategoricalTruePositives(keras.metrics.Metric):
    """Compares all labels of the batch with all predictions, for labels have no second axis."""

    def __init__(self, name="categorical_true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_variable(shape=(), name="ctp", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
        values = ops.cast(y_true, "int32") == ops.cast(y_pred, "int32")
        values = ops.cast(values, self.dtype)
        if sample_weight is not None:
            values = ops.multiply(values, ops.cast(sample_weight, self.dtype))
        self.true_positives.assign_add(ops.sum(values))

    def result(self):
        return self.true_positives

    def reset_state(self):
        self.true_positives.assign(0)


class ExampleSequence(keras.utils.PyDataset):
    """Batches by their index."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return math.ceil(len(self.x) / BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


class LossHistory(keras.callbacks.Callback):
    """Keeps the loss after each batch."""

    def on_train_begin(self, logs=None):
        self.per_batch_losses = []

    def on_batch_end(self, batch, logs):
        self.per_batch_losses.append(logs.get("loss"))


def train_custom_losses(wrap: Wrap) -> Numbers:
    """A loss that is a function, a loss of a class and a metric of a class."""
    x, y = class_data(EXAMPLES)
    numbers = {}
    for name, loss in (("function", custom_mean_squared_error), ("class", CustomMSE())):
        model = make_digits_model()
        model.compile(optimizer=sgd(0.5), loss=loss)
        model = wrap(model)
        numbers |= prefixed(name, results(model, fit_arrays(model, x, one_hot(y))))
    model = make_digits_model()
    model.compile(
        optimizer=sgd(0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[CategoricalTruePositives()],
    )
    model = wrap(model)
    return numbers | prefixed("metric", results(model, fit_arrays(model, x, y)))


def train_with_weights(wrap: Wrap) -> Numbers:
    """Weights of classes and of examples, in arrays and in a data set; then a holdout set."""
    x, y = class_data(EXAMPLES)
    sample_weight = np.ones(EXAMPLES)
    sample_weight[y == 1] = 2.0
    class_weight = {0: 1.0, 1: 2.0, 2: 1.0}
    numbers = {}
    options = {"class_weight": class_weight}, {"sample_weight": sample_weight}
    for option in options:
        model = wrap(make_compiled_model())
        history = fit_arrays(model, x, y, **option)
        numbers |= prefixed(*option, results(model, history))
    model = wrap(make_compiled_model())
    history = model.fit(batched((x, y, sample_weight)), epochs=EPOCHS, verbose=0)
    numbers |= prefixed("data set", results(model, history))
    model = wrap(make_compiled_model())
    history = fit_arrays(model, x, y, validation_split=0.2)
    return numbers | prefixed("split", results(model, history))


def train_on_data_sets(wrap: Wrap) -> Numbers:
    """A number of steps for an epoch and for validation; then a `PyDataset`, and callbacks."""
    x, y = class_data(EXAMPLES)
    validation = batched(class_data(VALIDATION_EXAMPLES, seed=1))
    model = wrap(make_compiled_model())
    history = model.fit(
        batched((x, y)).repeat(),
        epochs=3,
        steps_per_epoch=3,
        validation_data=validation,
        validation_steps=1,
        verbose=0,
    )
    scores = model.evaluate(validation, verbose=0, return_dict=True)
    numbers = prefixed("steps", results(model, history, scores=scores))
    numbers["predictions"] = model.predict(x[:3], verbose=0)

    schedule = keras.optimizers.schedules.ExponentialDecay(
        0.5,
        decay_steps=3,
        decay_rate=0.9,
        staircase=True,
    )
    model = make_compiled_model()
    model.compile(optimizer=sgd(schedule), loss="sparse_categorical_crossentropy")
    model = wrap(model)
    losses = LossHistory()
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=1e-2, patience=2)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "mymodel_{epoch}.keras"))
        checkpoint = keras.callbacks.ModelCheckpoint(file, save_best_only=True, monitor="val_loss")
        history = model.fit(
            ExampleSequence(x, y),
            epochs=5,
            validation_data=validation,
            callbacks=[losses, stopping, checkpoint],
            shuffle=False,
            verbose=0,
        )
    numbers["batches"] = np.asarray(losses.per_batch_losses)
    return numbers | prefixed("PyDataset", results(model, history))


def make_two_headed_model() -> keras.Model:
    """An image and a time series of any length in; a score and a class out."""
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3), name="img_input")
    series = keras.Input((None, FEATURES), name="ts_input")
    x1 = layers.GlobalMaxPooling2D()(layers.Conv2D(3, 3)(image))
    x2 = layers.GlobalMaxPooling1D()(layers.Conv1D(3, 3)(series))
    x = layers.concatenate([x1, x2])
    score = layers.Dense(1, name="score_output")(x)
    classes = layers.Dense(CLASSES, activation="softmax", name="class_output")(x)
    return keras.Model(inputs=[image, series], outputs=[score, classes])


def train_two_headed_model(wrap: Wrap) -> Numbers:
    """Losses and metrics in lists and dicts, with weights, and of one output only."""
    image, series = random_images(EXAMPLES), random_array(EXAMPLES, 6, FEATURES)
    score, classes = random_array(EXAMPLES, 1, low=1.0, high=2.0), one_hot(random_labels(EXAMPLES))
    mse, cross_entropy = keras.losses.MeanSquaredError(), keras.losses.CategoricalCrossentropy()
    errors = [
        keras.metrics.MeanAbsolutePercentageError(),
        keras.metrics.MeanAbsoluteError(),
    ]
    numbers = {}

    model = make_two_headed_model()
    model.compile(
        optimizer=sgd(0.1),
        loss=[mse, cross_entropy],
        metrics=[errors, [keras.metrics.CategoricalAccuracy()]],
    )
    model = wrap(model)
    history = fit_arrays(model, [image, series], [score, classes])
    numbers |= prefixed("lists", results(model, history))

    model = make_two_headed_model()
    model.compile(
        optimizer=sgd(0.1),
        loss={"score_output": mse, "class_output": cross_entropy},
        metrics={
            "score_output": errors,
            "class_output": [keras.metrics.CategoricalAccuracy()],
        },
        loss_weights={"score_output": 2.0, "class_output": 1.0},
    )
    model = wrap(model)
    inputs = {"img_input": image, "ts_input": series}
    targets = {"score_output": score, "class_output": classes}
    history = model.fit(batched((inputs, targets)), epochs=EPOCHS, verbose=0)
    numbers |= prefixed("dicts", results(model, history))

    model = make_two_headed_model()
    model.compile(optimizer=sgd(0.1), loss=[None, cross_entropy])
    model = wrap(model)
    history = fit_arrays(model, [image, series], [score, classes])
    return numbers | prefixed("one output", results(model, history))


@published_program("guides/training_with_built_in_methods", "equal")
def train_with_built_in_methods(wrap: Wrap) -> Numbers:
    """What `compile` and `fit` take."""
    return (
        prefixed("losses", train_custom_losses(wrap))
        | prefixed("weights", train_with_weights(wrap))
        | prefixed("data", train_on_data_sets(wrap))
        | prefixed("outputs", train_two_headed_model(wrap))
    )


class ActivitySumLayer(layers.Layer):
    """Adds a sum over the batch."""

    def call(self, inputs):
        self.add_loss(ops.sum(inputs) * 0.1)
        return inputs


class LogisticEndpointOfTargets(layers.Layer):
    """Takes targets first, and adds a loss."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, targets, logits, sample_weights=None):
        self.add_loss(self.loss_fn(targets, logits, sample_weights))
        return ops.softmax(logits)


@published_program("guides/training_with_built_in_methods (ActivityRegularizationLayer)", "equal")
def train_with_activity_sum(wrap: Wrap) -> Numbers:
    """A sum over the batch beside a mean, and an endpoint that has the only loss."""
    inputs = keras.Input((FEATURES,), name="digits")
    x = layers.Dense(4, activation="relu", name="dense_1")(inputs)
    x = ActivitySumLayer()(x)
    x = layers.Dense(4, activation="relu", name="dense_2")(x)
    model = keras.Model(inputs, layers.Dense(CLASSES, name="predictions")(x))
    model.compile(
        optimizer=sgd(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model = wrap(model)
    history = fit_arrays(model, *class_data(EXAMPLES))
    numbers = prefixed("activity", results(model, history))

    inputs = keras.Input((3,), name="inputs")
    targets = keras.Input((4,), name="targets")
    logits = layers.Dense(4)(inputs)
    predictions = LogisticEndpointOfTargets(name="predictions")(targets, logits)
    model = keras.Model(inputs=[inputs, targets], outputs=predictions)
    model.compile(optimizer=sgd(0.5))
    model = wrap(model)
    data = {"inputs": random_array(3, 3), "targets": random_array(3, 4, seed=1)}
    history = model.fit(data, verbose=0)
    return numbers | prefixed("endpoint", results(model, history))
