# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the methods are Keras's, or do what their names say
"""Small programs after the published ones of keras.io that have a `train_step` or `test_step`.

Each keeps what the published step does: its optimizers and how they are called, where its losses
come from, what each metric gets, what is returned, assigned and drawn, how the model is built, and
the form of the data. Networks, images and data are cut to a few units. Optimizers are SGD instead
of Adam, RMSprop or LAMB, because these hide a wrong scale of the gradients. Dropout has rate 0, and
Keras's augmentation layers change nothing: their factors are 0, and images are symmetric.

`compare` trains a program in plain Keras on one device and on N replicas. Print all comparisons,
or some of them: `python -m benchmarks.published_steps --replicas 2 generative/vae`.
"""

import argparse
import contextlib
import functools
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import keras_replicas
from benchmarks.features import largest_difference, no_autotune
from keras_replicas import UserError, data_parallel, make_strategy

EXAMPLES = 27
BATCH = 8  # the last of four batches has 3 examples
EPOCHS = 2
IMAGE_SIZE = 8
CLASSES = 3
BOUNDS = {"float32": 1e-5, "float64": 1e-10}

Wrap = Callable[[keras.Model], keras.Model]
Numbers = dict[str, np.ndarray]


@dataclass(frozen=True)
class PublishedStep:
    """One program.

    Attributes:
        name: its folder and name on keras.io.
        train: a function of `wrap`, which is `data_parallel` or the identity. It makes and trains
            the model in the current strategy scope, and returns numbers by name.
        expected: "equal" when N replicas must compute the same as one device; "warned" when the
            step compares examples, so that they cannot, and the user must be warned;
            "may be refused" when the step cannot run on a shard of the batch.
    """

    name: str
    train: Callable[[Wrap], Numbers]
    expected: str


PUBLISHED_STEPS: dict[str, PublishedStep] = {}


def published_step(name: str, expected: str) -> Callable:
    """Registers the decorated function as the program of that name."""

    def register(train: Callable[[Wrap], Numbers]) -> Callable[[Wrap], Numbers]:
        @functools.wraps(train)
        def train_from_seed(wrap: Wrap) -> Numbers:
            keras.utils.set_random_seed(0)
            return train(wrap)

        PUBLISHED_STEPS[name] = PublishedStep(name, train_from_seed, expected)
        return train_from_seed

    return register


# Comparison


class Comparison(NamedTuple):
    """What N replicas computed, against plain Keras on one device.

    Attributes:
        difference: the largest, relative to the largest number of its tensor; None when refused.
        refusal: the message, in one line, if keras_replicas refuses the program.
        warnings: the messages of the warnings that keras_replicas gave.
    """

    difference: float | None
    refusal: str | None
    warnings: list[str]


PLAIN_NUMBERS: dict[tuple[str, str], Numbers] = {}  # by name and floatx


def compare(name: str, replicas: int) -> Comparison:
    """Trains a program on N replicas, and compares it with plain Keras on one device.

    The CPU must have been divided into at least N logical devices. Errors other than the refusals
    of keras_replicas are raised.
    """
    program = PUBLISHED_STEPS[name]
    key = (name, keras.config.floatx())
    with draws_of_the_example(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if key not in PLAIN_NUMBERS:
            keras.backend.clear_session()  # layers are named alike in both runs
            PLAIN_NUMBERS[key] = program.train(lambda model: model)
        keras.backend.clear_session()
        caught.clear()
        try:
            with make_strategy(replicas).scope():
                found = program.train(data_parallel)
        except ValueError as error:
            if not is_refusal(error):
                raise
            return Comparison(None, refusal_line(error), our_warnings(caught))
    return Comparison(largest_difference(found, PLAIN_NUMBERS[key]), refusal=None, warnings=our_warnings(caught))


def is_refusal(error: ValueError) -> bool:
    """Whether keras_replicas raised the error, and no package that it calls."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, UserError) or raised_in.is_relative_to(package_folder())


def refusal_line(error: ValueError) -> str:
    """The error's message without the lines that Keras puts around it."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(line for line in lines if not line.startswith("Exception encountered"))


def our_warnings(caught: list[warnings.WarningMessage]) -> list[str]:
    """The messages that keras_replicas gave, each once, whatever line they are attributed to."""
    found = []
    for warning in caught:
        message = str(warning.message)
        is_ours = Path(warning.filename).is_relative_to(package_folder()) or "replica" in message
        if is_ours and message not in found:
            found.append(message)
    return found


def package_folder() -> Path:
    """The folder of keras_replicas."""
    return Path(keras_replicas.__file__).parent


class ModuleView:
    """A module with some attributes replaced, for those who use this object in its stead."""

    def __init__(self, module: Any, **replaced: Any):
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def draws_of_the_example() -> Iterator[None]:
    """Context in which every example of every step draws the same fixed numbers.

    Random draws then do not depend on how a batch is divided. It replaces `normal` and `uniform` of
    `tf.random` and `keras.random` for the programs of this module, and for nobody else. Draws
    outside of a `tf.function`, such as those of initial values, stay random, but are of
    `keras.config.floatx()`.
    """
    views = {}
    for module_name, module in (("tf", tf), ("keras", keras)):
        draws = {
            "normal": same_for_each_example(module.random, "normal", tf.random.stateless_normal),
            "uniform": same_for_each_example(module.random, "uniform", tf.random.stateless_uniform),
        }
        views[module_name] = ModuleView(module, random=ModuleView(module.random, **draws))
    with mock.patch.dict(globals(), views):
        yield


def same_for_each_example(module: Any, name: str, draw_from_seed: Callable) -> Callable:
    """Makes a random function that draws shape [1, ...] from a fixed seed for a shape [n, ...].

    The function of that name in `module` is called too, so that its seeds advance as published.
    """

    def draw_fixed(shape, *limits, dtype=None, seed=None, **named_limits):
        draw = getattr(module, name)
        dtype = dtype or keras.config.floatx()
        if tf.executing_eagerly():
            return draw(shape, *limits, dtype=dtype, seed=seed, **named_limits)
        draw((1,), dtype=dtype, seed=seed)
        shape = tf.convert_to_tensor(shape, tf.int32)
        one_example = tf.concat([[1], shape[1:]], axis=0)
        row = draw_from_seed(one_example, (0, 1), *limits, dtype=dtype, **named_limits)
        return tf.broadcast_to(row, shape)

    return draw_fixed


# What the programs share


def random_array(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> np.ndarray:
    """Uniform random numbers of `keras.config.floatx()`."""
    numbers = np.random.default_rng(seed).uniform(low, high, shape)
    return numbers.astype(keras.config.floatx())


def random_images(count: int, channels: int = 3, low: float = 0.0, high: float = 1.0, seed: int = 0) -> np.ndarray:
    """Images that a horizontal flip leaves as they are."""
    images = random_array(count, IMAGE_SIZE, IMAGE_SIZE, channels, low=low, high=high, seed=seed)
    return (images + images[:, :, ::-1]) / 2


def random_labels(count: int, seed: int = 0) -> np.ndarray:
    """Integers below the number of classes."""
    return np.random.default_rng(seed).integers(0, CLASSES, count)


def batched(data: Any, size: int = BATCH, drop_remainder: bool = False) -> tf.data.Dataset:
    """Batches of arrays, in their order."""
    return batch_dataset(tf.data.Dataset.from_tensor_slices(data), size, drop_remainder)


def batch_dataset(dataset: tf.data.Dataset, size: int = BATCH, drop_remainder: bool = False) -> tf.data.Dataset:
    """Batches of a data set's elements, which are prefetched as most programs do."""
    return dataset.batch(size, drop_remainder=drop_remainder).prefetch(2).with_options(no_autotune())


def zipped(*datasets: tf.data.Dataset) -> tf.data.Dataset:
    """Tuples of the elements of several data sets."""
    return tf.data.Dataset.zip(datasets).with_options(no_autotune())


def sgd(learning_rate: Any, **options: Any) -> keras.optimizers.Optimizer:
    """The optimizer in place of the published one."""
    return keras.optimizers.SGD(learning_rate, **options)


def nonzero_bias() -> keras.initializers.Initializer:
    """For a bias with a gradient so small that its rounding would be all that is compared."""
    return keras.initializers.RandomNormal(stddev=0.5)


def results(
    model: keras.Model,
    history: keras.callbacks.History,
    variables: dict[str, tf.Variable] | None = None,
    scores: dict[str, float] | None = None,
) -> Numbers:
    """The numbers of a program by name: of its History, its evaluation, and its variables.

    Keras tracks no `tf.Variable`, so the programs that have some name them here.
    """
    numbers = {f"history/{name}": np.asarray(value) for name, value in history.history.items()}
    numbers |= {f"evaluate/{name}": np.asarray(value) for name, value in (scores or {}).items()}
    for index, weight in enumerate(model.weights):
        if not weight.path.endswith("key/bias"):  # attention ignores it: its gradient is rounding
            numbers |= values_of(f"weights/{index:03}", weight.value)
    for name, variable in (variables or {}).items():
        numbers |= values_of(f"variables/{name}", variable)
    return numbers


def values_of(name: str, variable: tf.Variable) -> Numbers:
    """A variable's value, and the last replica's copy of it, which must be the same.

    A variable that is synchronized when it is read has copies that may differ.
    """
    numbers = {name: np.asarray(variable.numpy())}
    if variable.synchronization != tf.VariableSynchronization.ON_READ:
        copies = tf.distribute.get_strategy().experimental_local_results(variable)
        numbers[f"{name} (last copy)"] = np.asarray(copies[-1].numpy())
    return numbers


# vision/siamese_network


class DistanceLayer(layers.Layer):
    """Squared distances of the anchor to the positive and to the negative embedding."""

    def call(self, anchor, positive, negative):
        to_positive = ops.sum(tf.square(anchor - positive), -1)
        to_negative = ops.sum(tf.square(anchor - negative), -1)
        return to_positive, to_negative


class SiameseModel(keras.Model):
    """The loss is a vector [batch], so gradients are those of a sum; the metric gets the vector."""

    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, inputs):
        return self.siamese_network(inputs)

    def triplet_loss(self, triplets):
        to_positive, to_negative = self.siamese_network(triplets)
        return tf.maximum(to_positive - to_negative + self.margin, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.triplet_loss(data)
        weights = self.siamese_network.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.triplet_loss(data))
        return {"loss": self.loss_tracker.result()}


def make_siamese_network() -> keras.Model:
    """A frozen convolution, and dense layers with BatchNormalization, for three images."""
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    features = layers.Conv2D(2, 3, strides=2, activation="relu", trainable=False)(image)
    hidden = layers.Dense(5, activation="relu")(layers.Flatten()(features))
    hidden = layers.BatchNormalization(beta_initializer=nonzero_bias())(hidden)
    output = layers.Dense(4, bias_initializer=nonzero_bias())(hidden)
    embedding = keras.Model(image, output, name="embedding")
    names = ("anchor", "positive", "negative")
    inputs = [keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3), name=name) for name in names]
    return keras.Model(inputs, DistanceLayer()(*[embedding(each) for each in inputs]))


@published_step("vision/siamese_network", "equal")
def train_siamese_network(wrap: Wrap) -> Numbers:
    """The data are a tuple of three images, which is no (x, y, sample_weight)."""
    model = wrap(SiameseModel(make_siamese_network()))
    model.compile(optimizer=sgd(0.02))
    images = [tf.data.Dataset.from_tensor_slices(random_images(32, seed=n)) for n in range(3)]
    triplets = zipped(*images)
    train, validation = triplets.take(EXAMPLES), triplets.skip(EXAMPLES)
    history = model.fit(batch_dataset(train), epochs=EPOCHS, validation_data=batch_dataset(validation), verbose=0)
    return results(model, history)


# vision/consistency_training


class SelfTrainer(keras.Model):
    """Two losses of Keras, halved; a scalar of the batch is returned beside the metrics.

    `compiled_metrics` updates all metrics, Keras's own tracker of the loss too, and the result of
    the compiled metrics is a dict in the dict.
    """

    def __init__(self, student, teacher):
        super().__init__()
        self.student = student
        self.teacher = teacher

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, temperature):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.temperature = temperature

    def train_step(self, data):
        (clean, _), (noisy, y) = data
        of_teacher = self.teacher(clean, training=False)
        with tf.GradientTape() as tape:
            of_student = self.student(noisy, training=True)
            student_loss = self.student_loss_fn(y, of_student)
            distillation_loss = self.distillation_loss_fn(
                tf.nn.softmax(of_teacher / self.temperature, axis=1),
                tf.nn.softmax(of_student / self.temperature, axis=1),
            )
            total_loss = (student_loss + distillation_loss) / 2
        variables = self.student.trainable_variables
        gradients = tape.gradient(total_loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.compiled_metrics.update_state(y, tf.nn.softmax(of_student, axis=1))
        found = {metric.name: metric.result() for metric in self.metrics}
        return found | {"total_loss": total_loss}

    def test_step(self, data):
        x, y = data
        predicted = self.student(x, training=False)
        self.compiled_metrics.update_state(y, tf.nn.softmax(predicted, axis=1))
        return {metric.name: metric.result() for metric in self.metrics}


def make_classifier() -> keras.Model:
    """A convolution with BatchNormalization, and logits."""
    return keras.Sequential(
        [
            layers.Input((IMAGE_SIZE, IMAGE_SIZE, 3)),
            layers.Rescaling(scale=2.0, offset=-1),
            layers.Conv2D(3, 3, strides=2, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES),
        ]
    )


@published_step("vision/consistency_training", "equal")
def train_consistency(wrap: Wrap) -> Numbers:
    """The data are two zipped pairs of images and labels; those of the validation are one pair."""
    model = SelfTrainer(student=make_classifier(), teacher=make_classifier())
    model.compile(
        optimizer=sgd(0.5),
        metrics=["accuracy"],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
        temperature=10,
    )
    model = wrap(model)
    labels = random_labels(EXAMPLES)
    clean = batched((random_images(EXAMPLES), labels))
    noisy = batched((random_images(EXAMPLES, seed=1), labels))
    validation = batched((random_images(13, seed=2), random_labels(13)))
    history = model.fit(zipped(clean, noisy), epochs=EPOCHS, validation_data=validation, verbose=0)
    scores = model.evaluate(validation, verbose=0, return_dict=True)
    return results(model, history, scores=scores)


# vision/masked_image_modeling

PATCH = 2  # pixels
PATCHES = (IMAGE_SIZE // PATCH) ** 2
ENCODER_UNITS = 6
DECODER_UNITS = 4


class Patches(layers.Layer):
    """Images as rows of patches."""

    def __init__(self, patch_size=PATCH):
        super().__init__()
        self.patch_size = patch_size
        self.resize = layers.Reshape((-1, patch_size * patch_size * 3))

    def call(self, images):
        window = [1, self.patch_size, self.patch_size, 1]
        patches = tf.image.extract_patches(images, window, window, [1, 1, 1, 1], "VALID")
        return self.resize(patches)


class PatchEncoder(layers.Layer):
    """Hides three of four patches, by draws of `tf.random`.

    It makes layers when it is built, in the first step. Its `mask_token` is a `tf.Variable`, which
    Keras does not train.
    """

    def __init__(self, projection_dim=ENCODER_UNITS, mask_proportion=0.75):
        super().__init__()
        self.projection_dim = projection_dim
        self.mask_proportion = mask_proportion
        token = tf.random.normal([1, PATCH * PATCH * 3], dtype=keras.config.floatx())
        self.mask_token = tf.Variable(token, trainable=True)

    def build(self, input_shape):
        self.num_patches = input_shape[1]
        self.projection = layers.Dense(self.projection_dim)
        self.position_embedding = layers.Embedding(self.num_patches, self.projection_dim)
        self.num_mask = int(self.mask_proportion * self.num_patches)

    def call(self, patches):
        batch_size = tf.shape(patches)[0]
        positions = tf.range(0, self.num_patches)
        positions = self.position_embedding(positions[tf.newaxis, ...])
        positions = tf.tile(positions, [batch_size, 1, 1])
        embeddings = self.projection(patches) + positions
        masked, unmasked = self.random_indices(batch_size)
        tokens = tf.repeat(self.mask_token, repeats=self.num_mask, axis=0)
        tokens = tf.repeat(tokens[tf.newaxis, ...], repeats=batch_size, axis=0)
        return (
            tf.gather(embeddings, unmasked, axis=1, batch_dims=1),
            self.projection(tokens) + tf.gather(positions, masked, axis=1, batch_dims=1),
            tf.gather(positions, unmasked, axis=1, batch_dims=1),
            masked,
        )

    def random_indices(self, batch_size):
        """The indices of the patches that are masked, and of the others."""
        order = tf.argsort(tf.random.uniform(shape=(batch_size, self.num_patches)), axis=-1)
        return order[:, : self.num_mask], order[:, self.num_mask :]


class MaskedAutoencoder(keras.Model):
    """The loss is that of `compute_loss`, with y and predictions that are not the data.

    Every metric gets (y, predictions), and so does the tracker of the loss, a mean of y weighted by
    the predictions. Variables are listed by layer, gradients likewise.
    """

    def __init__(self, train_augmentation, test_augmentation, networks):
        super().__init__()
        self.train_augmentation = train_augmentation
        self.test_augmentation = test_augmentation
        self.patch_layer, self.patch_encoder, self.encoder, self.decoder = networks

    def calculate_loss(self, images, test=False):
        augmentation = self.test_augmentation if test else self.train_augmentation
        patches = self.patch_layer(augmentation(images))
        unmasked, masked, unmasked_positions, masked_indices = self.patch_encoder(patches)
        encoded = self.encoder(unmasked) + unmasked_positions
        decoded = self.decoder(tf.concat([encoded, masked], axis=1))
        predicted = self.patch_layer(decoded)
        y = tf.gather(patches, masked_indices, axis=1, batch_dims=1)
        y_pred = tf.gather(predicted, masked_indices, axis=1, batch_dims=1)
        return self.compute_loss(y=y, y_pred=y_pred), y, y_pred

    def train_step(self, images):
        with tf.GradientTape() as tape:
            loss, y, y_pred = self.calculate_loss(images)
        parts = (
            self.train_augmentation,
            self.patch_layer,
            self.patch_encoder,
            self.encoder,
            self.decoder,
        )
        variables = [part.trainable_variables for part in parts]
        pairs = []
        for gradients, of_part in zip(tape.gradient(loss, variables), variables, strict=True):
            pairs.extend(zip(gradients, of_part, strict=True))
        self.optimizer.apply_gradients(pairs)
        return self.updated_metrics(y, y_pred)

    def test_step(self, images):
        _, y, y_pred = self.calculate_loss(images, test=True)
        return self.updated_metrics(y, y_pred)

    def updated_metrics(self, y, y_pred):
        found = {}
        for metric in self.metrics:
            metric.update_state(y, y_pred)
            found[metric.name] = metric.result()
        return found


def transformer_block(x, num_heads: int, key_dim: int, units: tuple[int, ...]):
    """Attention and two dense layers, each with LayerNormalization and a skip connection."""
    normalized = layers.LayerNormalization(epsilon=1e-6)(x)
    attention = layers.MultiHeadAttention(num_heads, key_dim, dropout=0.0)
    x = layers.Add()([attention(normalized, normalized), x])
    hidden = layers.LayerNormalization(epsilon=1e-6)(x)
    for width in units:
        hidden = layers.Dense(width, activation=tf.nn.gelu)(hidden)
        hidden = layers.Dropout(0.0)(hidden)
    return layers.Add()([hidden, x])


def make_masked_autoencoder() -> MaskedAutoencoder:
    """The parts of the autoencoder: augmentation, patches, encoder and decoder."""
    encoder_input = keras.Input((None, ENCODER_UNITS))
    x = transformer_block(encoder_input, 2, ENCODER_UNITS, (8, ENCODER_UNITS))
    encoder = keras.Model(encoder_input, layers.LayerNormalization(epsilon=1e-6)(x))
    decoder_input = keras.Input((PATCHES, ENCODER_UNITS))
    x = layers.Dense(DECODER_UNITS)(decoder_input)
    x = transformer_block(x, 2, DECODER_UNITS, (8, DECODER_UNITS))
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x))
    x = layers.Dense(IMAGE_SIZE * IMAGE_SIZE * 3, activation="sigmoid")(x)
    decoder = keras.Model(decoder_input, layers.Reshape((IMAGE_SIZE, IMAGE_SIZE, 3))(x))
    train_augmentation = keras.Sequential(
        [
            layers.Rescaling(1 / 255.0),
            layers.Resizing(IMAGE_SIZE, IMAGE_SIZE),
            layers.RandomCrop(IMAGE_SIZE, IMAGE_SIZE),
            layers.RandomFlip("horizontal"),
        ]
    )
    test_augmentation = keras.Sequential([layers.Rescaling(1 / 255.0), layers.Resizing(IMAGE_SIZE, IMAGE_SIZE)])
    networks = (Patches(), PatchEncoder(), encoder, decoder)
    return MaskedAutoencoder(train_augmentation, test_augmentation, networks)


@published_step("vision/masked_image_modeling", "equal")
def train_masked_autoencoder(wrap: Wrap) -> Numbers:
    """Single tensors; no `call`; a learning rate schedule with weight decay."""
    model = wrap(make_masked_autoencoder())
    schedule = keras.optimizers.schedules.CosineDecay(0.0, 8, warmup_target=0.5, warmup_steps=3)
    model.compile(
        optimizer=sgd(schedule, weight_decay=0.01),
        loss=keras.losses.MeanSquaredError(),
        metrics=["mae"],
    )
    train = batched(random_images(EXAMPLES, high=255.0))
    validation = batched(random_images(13, high=255.0, seed=1))
    history = model.fit(train, epochs=EPOCHS, validation_data=validation, verbose=0)
    scores = model.evaluate(validation, verbose=0, return_dict=True)
    return results(model, history, {"mask_token": model.patch_encoder.mask_token}, scores)


# vision/nnclr and vision/semisupervised_simclr

WIDTH = 6
TEMPERATURE = 0.1


def make_encoder() -> keras.Sequential:
    """An encoder without an input layer, which nothing builds before it is called."""
    return keras.Sequential(
        [
            layers.Conv2D(WIDTH, kernel_size=3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(WIDTH, activation="relu"),
        ],
        name="encoder",
    )


def make_projection_head() -> keras.Sequential:
    """Two dense layers."""
    return keras.Sequential(
        [keras.Input((WIDTH,)), layers.Dense(WIDTH, activation="relu"), layers.Dense(WIDTH)],
        name="projection_head",
    )


def make_linear_probe() -> keras.Sequential:
    """A classifier of the encoder's features."""
    return keras.Sequential([keras.Input((WIDTH,)), layers.Dense(CLASSES)], name="linear_probe")


class NNCLR(keras.Model):
    """A vector of losses that compare all examples, two optimizers, and a queue of features.

    The queue is assigned in the loss. The number of examples is divided by, and used as an index,
    as a number: batches must have a known size. The vector of losses itself is returned.
    """

    def __init__(self, temperature, queue_size):
        super().__init__()
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.correlation_accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_augmenter = self.make_augmenter("contrastive_augmenter")
        self.classification_augmenter = self.make_augmenter("classification_augmenter")
        self.encoder = make_encoder()
        self.encoder.build((None, IMAGE_SIZE, IMAGE_SIZE, 3))
        self.projection_head = make_projection_head()
        self.linear_probe = make_linear_probe()
        self.temperature = temperature
        features = keras.random.normal(shape=(queue_size, WIDTH))
        self.feature_queue = keras.Variable(keras.utils.normalize(features, axis=1, order=2), trainable=False)

    def make_augmenter(self, name):
        return keras.Sequential(
            [
                layers.Input((IMAGE_SIZE, IMAGE_SIZE, 3)),
                layers.Rescaling(1 / 255),
                layers.RandomFlip("horizontal"),
                layers.RandomBrightness(0.0, value_range=(0.0, 1.0)),
            ],
            name=name,
        )

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer

    def nearest_neighbour(self, projections):
        similarities = ops.matmul(projections, ops.transpose(self.feature_queue))
        nearest = ops.take(self.feature_queue, ops.argmax(similarities, axis=1), axis=0)
        return projections + ops.stop_gradient(nearest - projections)

    def update_contrastive_accuracy(self, first, second):
        first = keras.utils.normalize(first, axis=1, order=2)
        second = keras.utils.normalize(second, axis=1, order=2)
        similarities = ops.matmul(first, ops.transpose(second))
        labels = ops.arange(ops.shape(first)[0])
        self.contrastive_accuracy.update_state(
            ops.concatenate([labels, labels], axis=0),
            ops.concatenate([similarities, ops.transpose(similarities)], axis=0),
        )

    def update_correlation_accuracy(self, first, second):
        first = (first - ops.mean(first, axis=0)) / ops.std(first, axis=0)
        second = (second - ops.mean(second, axis=0)) / ops.std(second, axis=0)
        correlation = ops.matmul(ops.transpose(first), second) / ops.shape(first)[0]
        labels = ops.arange(ops.shape(first)[1])
        self.correlation_accuracy.update_state(
            ops.concatenate([labels, labels], axis=0),
            ops.concatenate([correlation, ops.transpose(correlation)], axis=0),
        )

    def contrastive_loss(self, first, second):
        first = keras.utils.normalize(first, axis=1, order=2)
        second = keras.utils.normalize(second, axis=1, order=2)
        pairs = [
            (self.nearest_neighbour(first), second),
            (second, self.nearest_neighbour(first)),
            (self.nearest_neighbour(second), first),
            (first, self.nearest_neighbour(second)),
        ]
        similarities = [ops.matmul(a, ops.transpose(b)) / self.temperature for a, b in pairs]
        batch_size = ops.shape(first)[0]
        labels = ops.arange(batch_size)
        losses = keras.losses.sparse_categorical_crossentropy(
            ops.concatenate([labels] * 4, axis=0),
            ops.concatenate(similarities, axis=0),
            from_logits=True,
        )
        self.feature_queue.assign(ops.concatenate([first, self.feature_queue[:-batch_size]], axis=0))
        return losses

    def train_step(self, data):
        (unlabeled, _), (labeled, labels) = data
        images = ops.concatenate((unlabeled, labeled), axis=0)
        first_view = self.contrastive_augmenter(images)
        second_view = self.contrastive_augmenter(images)
        with tf.GradientTape() as tape:
            first, second = self.encoder(first_view), self.encoder(second_view)
            contrastive_loss = self.contrastive_loss(self.projection_head(first), self.projection_head(second))
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(contrastive_loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.update_contrastive_accuracy(first, second)
        self.update_correlation_accuracy(first, second)
        views = self.classification_augmenter(labeled)
        with tf.GradientTape() as tape:
            logits = self.linear_probe(self.encoder(views))
            probe_loss = self.probe_loss(labels, logits)
        weights = self.linear_probe.trainable_weights
        gradients = tape.gradient(probe_loss, weights)
        self.probe_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.probe_accuracy.update_state(labels, logits)
        return {
            "c_loss": contrastive_loss,
            "c_acc": self.contrastive_accuracy.result(),
            "r_acc": self.correlation_accuracy.result(),
            "p_loss": probe_loss,
            "p_acc": self.probe_accuracy.result(),
        }

    def test_step(self, data):
        images, labels = data
        views = self.classification_augmenter(images, training=False)
        logits = self.linear_probe(self.encoder(views, training=False), training=False)
        probe_loss = self.probe_loss(labels, logits)
        self.probe_accuracy.update_state(labels, logits)
        return {"p_loss": probe_loss, "p_acc": self.probe_accuracy.result()}


def semisupervised_data(drop_remainder: bool) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """For training, zipped pairs: six unlabeled and two labeled images a batch. For validation."""
    unlabeled = (random_images(EXAMPLES, high=255.0), random_labels(EXAMPLES))
    labeled = (random_images(9, high=255.0, seed=1), random_labels(9, seed=1))
    train = zipped(
        batched(unlabeled, 6, drop_remainder=drop_remainder),
        batched(labeled, 2, drop_remainder=drop_remainder),
    )
    return train, batched((random_images(13, high=255.0, seed=2), random_labels(13, seed=2)))


@published_step("vision/nnclr", "may be refused")
def train_nnclr(wrap: Wrap) -> Numbers:
    """Zipped pairs of batches of two sizes, without their remainders."""
    model = NNCLR(temperature=TEMPERATURE, queue_size=20)
    model.compile(contrastive_optimizer=sgd(0.002), probe_optimizer=sgd(0.5), jit_compile=False)
    model = wrap(model)
    train, validation = semisupervised_data(drop_remainder=True)
    history = model.fit(train, epochs=EPOCHS, validation_data=validation, verbose=0)
    return results(model, history)


class RandomColorAffine(layers.Layer):
    """Draws of `keras.random`, from a seed generator of the layer, as many as there are images."""

    def __init__(self, brightness, jitter):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.brightness = brightness
        self.jitter = jitter

    def call(self, images, training=True):
        if not training:
            return images
        batch_size = ops.shape(images)[0]
        scales = 1 + keras.random.uniform(
            (batch_size, 1, 1, 1),
            minval=-self.brightness,
            maxval=self.brightness,
            seed=self.seed_generator,
        )
        jitter = keras.random.uniform(
            (batch_size, 1, 3, 3), minval=-self.jitter, maxval=self.jitter, seed=self.seed_generator
        )
        identity = ops.tile(ops.expand_dims(ops.eye(3), axis=0), (batch_size, 1, 1, 1))
        return ops.clip(ops.matmul(images, identity * scales + jitter), 0, 1)


class ContrastiveModel(keras.Model):
    """A vector of losses that compare all examples; optimizers and metrics made in `compile`.

    A metric is updated twice in the loss. The encoder is built in the first step.
    """

    def __init__(self):
        super().__init__()
        self.temperature = TEMPERATURE
        self.contrastive_augmenter = self.make_augmenter(brightness=0.6, jitter=0.2)
        self.classification_augmenter = self.make_augmenter(brightness=0.3, jitter=0.1)
        self.encoder = make_encoder()
        self.projection_head = make_projection_head()
        self.linear_probe = make_linear_probe()

    def make_augmenter(self, brightness, jitter):
        return keras.Sequential(
            [
                layers.Rescaling(1 / 255),
                layers.RandomFlip("horizontal"),
                layers.RandomTranslation(0.0, 0.0),
                layers.RandomZoom((0.0, 0.0), (0.0, 0.0)),
                RandomColorAffine(brightness, jitter),
            ]
        )

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [
            self.contrastive_loss_tracker,
            self.contrastive_accuracy,
            self.probe_loss_tracker,
            self.probe_accuracy,
        ]

    def contrastive_loss(self, first, second):
        first = ops.normalize(first, axis=1)
        second = ops.normalize(second, axis=1)
        similarities = ops.matmul(first, ops.transpose(second)) / self.temperature
        labels = ops.arange(ops.shape(first)[0])
        self.contrastive_accuracy.update_state(labels, similarities)
        self.contrastive_accuracy.update_state(labels, ops.transpose(similarities))
        cross_entropy = keras.losses.sparse_categorical_crossentropy
        of_rows = cross_entropy(labels, similarities, from_logits=True)
        of_columns = cross_entropy(labels, ops.transpose(similarities), from_logits=True)
        return (of_rows + of_columns) / 2

    def train_step(self, data):
        (unlabeled, _), (labeled, labels) = data
        images = ops.concatenate((unlabeled, labeled), axis=0)
        first_view = self.contrastive_augmenter(images, training=True)
        second_view = self.contrastive_augmenter(images, training=True)
        with tf.GradientTape() as tape:
            first = self.encoder(first_view, training=True)
            second = self.encoder(second_view, training=True)
            contrastive_loss = self.contrastive_loss(
                self.projection_head(first, training=True),
                self.projection_head(second, training=True),
            )
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(contrastive_loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.contrastive_loss_tracker.update_state(contrastive_loss)
        views = self.classification_augmenter(labeled, training=True)
        with tf.GradientTape() as tape:
            features = self.encoder(views, training=False)
            logits = self.linear_probe(features, training=True)
            probe_loss = self.probe_loss(labels, logits)
        weights = self.linear_probe.trainable_weights
        gradients = tape.gradient(probe_loss, weights)
        self.probe_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        images, labels = data
        views = self.classification_augmenter(images, training=False)
        logits = self.linear_probe(self.encoder(views, training=False), training=False)
        self.probe_loss_tracker.update_state(self.probe_loss(labels, logits))
        self.probe_accuracy.update_state(labels, logits)
        return {metric.name: metric.result() for metric in self.metrics[2:]}


@published_step("vision/semisupervised_simclr", "warned")
def train_simclr(wrap: Wrap) -> Numbers:
    """Zipped pairs of batches of two sizes, with a short last batch of each."""
    model = wrap(ContrastiveModel())
    model.compile(contrastive_optimizer=sgd(0.005), probe_optimizer=sgd(0.5))
    train, validation = semisupervised_data(drop_remainder=False)
    history = model.fit(train, epochs=EPOCHS, validation_data=validation, verbose=0)
    return results(model, history)


# vision/metric_learning


class AnchorPositivePairs(keras.utils.PyDataset):
    """Batches [2, classes, ...] of anchors and positives, whose first dimension is no batch."""

    def __init__(self, num_batches):
        super().__init__()
        self.pairs = [
            random_images(2 * CLASSES, seed=n).reshape(2, CLASSES, IMAGE_SIZE, IMAGE_SIZE, 3)
            for n in range(num_batches)
        ]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


class EmbeddingModel(keras.Model):
    """`compute_loss` with labels and similarities that are not the data."""

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[0], data[1]
        with tf.GradientTape() as tape:
            anchor_embeddings = self(anchors, training=True)
            positive_embeddings = self(positives, training=True)
            similarities = tf.einsum("ae,pe->ap", anchor_embeddings, positive_embeddings)
            similarities /= 0.2
            labels = ops.arange(CLASSES)
            loss = self.compute_loss(y=labels, y_pred=similarities)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(labels, similarities)
        return {metric.name: metric.result() for metric in self.metrics}


@published_step("vision/metric_learning", "may be refused")
def train_metric_learning(wrap: Wrap) -> Numbers:
    """A functional model, and a PyDataset that gives single arrays."""
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.Conv2D(4, kernel_size=3, strides=2, activation="relu")(inputs)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(4)(x)
    model = EmbeddingModel(inputs, layers.UnitNormalization()(x))
    model.compile(optimizer=sgd(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model = wrap(model)
    history = model.fit(AnchorPositivePairs(4), epochs=EPOCHS, shuffle=False, verbose=0)
    return results(model, history)


# vision/semantic_image_clustering


class RepresentationLearner(keras.Model):
    """A vector of losses that compare all examples in all their views.

    `call` puts the views one below the other, so that outputs are no rows of examples, and calls
    preprocessing layers that are not the model's.
    """

    def __init__(self, encoder, preprocess, num_augmentations, temperature):
        super().__init__()
        self.encoder = encoder
        self.projector = keras.Sequential(
            [
                layers.Dropout(0.0),
                layers.Dense(5, use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
            ]
        )
        self.preprocess = preprocess
        self.num_augmentations = num_augmentations
        self.temperature = temperature
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def contrastive_loss(self, vectors, batch_size):
        num_augmentations = tf.shape(vectors)[0] // batch_size
        logits = tf.linalg.matmul(vectors, vectors, transpose_b=True) / self.temperature
        logits = logits - tf.math.reduce_max(logits, axis=1)
        targets = tf.tile(tf.eye(batch_size), [num_augmentations, num_augmentations])
        return keras.losses.categorical_crossentropy(targets, logits, from_logits=True)

    def call(self, inputs):
        views = self.preprocess(inputs, self.num_augmentations)
        return self.projector(self.encoder(layers.Concatenate(axis=0)(views)))

    def train_step(self, inputs):
        batch_size = tf.shape(inputs)[0]
        with tf.GradientTape() as tape:
            vectors = self(inputs, training=True)
            loss = self.contrastive_loss(vectors, batch_size)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, inputs):
        batch_size = tf.shape(inputs)[0]
        vectors = self(inputs, training=False)
        self.loss_tracker.update_state(self.contrastive_loss(vectors, batch_size))
        return {"loss": self.loss_tracker.result()}


@published_step("vision/semantic_image_clustering", "warned")
def train_representation_learner(wrap: Wrap) -> Numbers:
    """An array; the learning rate follows a schedule, with weight decay."""
    images = random_images(EXAMPLES, high=255.0)
    normalization = layers.Normalization()
    normalization.adapt(images)
    preprocessing = keras.Sequential([layers.Resizing(IMAGE_SIZE, IMAGE_SIZE), normalization])
    augmentation = keras.Sequential(
        [
            layers.RandomTranslation(0.0, 0.0, fill_mode="nearest"),
            layers.RandomFlip("horizontal"),
            layers.RandomZoom((0.0, 0.0), (0.0, 0.0), fill_mode="nearest"),
        ]
    )

    def preprocess(inputs, count):
        preprocessed = preprocessing(inputs)
        return [augmentation(preprocessed) for _ in range(count)]

    encoder = keras.Sequential(
        [
            layers.Conv2D(3, 3, strides=2, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(6, bias_initializer=nonzero_bias()),
        ]
    )
    model = RepresentationLearner(encoder, preprocess, num_augmentations=2, temperature=0.1)
    schedule = keras.optimizers.schedules.CosineDecay(0.001, decay_steps=500, alpha=0.1)
    model.compile(optimizer=sgd(schedule, weight_decay=0.0001))
    model = wrap(model)
    history = model.fit(x=images, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return results(model, history)


# vision/zero_dce


def color_constancy_loss(images):
    """A value [batch, 1] for the differences between the mean red, green and blue."""
    means = tf.reduce_mean(images, axis=(1, 2), keepdims=True)
    red, green, blue = (means[:, :, :, channel] for channel in range(3))
    differences = (red - green, red - blue, blue - green)
    return tf.sqrt(sum(tf.square(tf.square(difference)) for difference in differences))


def exposure_loss(images, mean_val=0.6):
    """A scalar for the distance of regions from a good exposure."""
    gray = tf.reduce_mean(images, axis=3, keepdims=True)
    means = tf.nn.avg_pool2d(gray, ksize=4, strides=4, padding="VALID")
    return tf.reduce_mean(tf.square(means - mean_val))


def illumination_smoothness_loss(curves):
    """A scalar: sums over the batch, divided by its size."""
    shape = tf.shape(curves)
    count_h = tf.cast((shape[2] - 1) * shape[3], curves.dtype)
    count_w = tf.cast(shape[2] * (shape[3] - 1), curves.dtype)
    down = tf.reduce_sum(tf.square(curves[:, 1:, :, :] - curves[:, : shape[1] - 1, :, :]))
    across = tf.reduce_sum(tf.square(curves[:, :, 1:, :] - curves[:, :, : shape[2] - 1, :]))
    return 2 * (down / count_h + across / count_w) / tf.cast(shape[0], curves.dtype)


class SpatialConsistencyLoss(keras.losses.Loss):
    """A loss of Keras's class, not reduced: a value for each region."""

    NEIGHBOURS = (
        [[0, 0, 0], [-1, 1, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 1, -1], [0, 0, 0]],
        [[0, -1, 0], [0, 1, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 1, 0], [0, -1, 0]],
    )

    def __init__(self):
        super().__init__(reduction="none")
        kernels = np.array(self.NEIGHBOURS, keras.config.floatx())
        self.kernels = [tf.constant(kernel[:, :, None, None]) for kernel in kernels]

    def call(self, y_true, y_pred):
        pools = []
        for images in (y_true, y_pred):
            gray = tf.reduce_mean(images, 3, keepdims=True)
            pools.append(tf.nn.avg_pool2d(gray, ksize=4, strides=4, padding="VALID"))
        losses = []
        for kernel in self.kernels:
            original, enhanced = (tf.nn.conv2d(pool, kernel, 1, "SAME") for pool in pools)
            losses.append(tf.square(original - enhanced))
        return tf.add_n(losses)


class ZeroDCE(keras.Model):
    """Scalars of the batch are returned, of four losses and their sum; there is no metric.

    `compile` gets no optimizer, and sets one afterwards.
    """

    def __init__(self):
        super().__init__()
        self.dce_model = self.build_dce_net()

    def build_dce_net(self):
        image = keras.Input([None, None, 3])
        conv1 = layers.Conv2D(4, 3, activation="relu", padding="same")(image)
        conv2 = layers.Conv2D(4, 3, activation="relu", padding="same")(conv1)
        joined = layers.Concatenate(axis=-1)([conv2, conv1])
        curves = layers.Conv2D(24, 3, activation="tanh", padding="same")(joined)
        return keras.Model(image, curves)

    def compile(self, learning_rate, **kwargs):
        super().compile(**kwargs)
        self.optimizer = sgd(learning_rate)
        self.spatial_constancy_loss = SpatialConsistencyLoss()

    def get_enhanced_image(self, images, curves):
        for curve in tf.split(curves, 8, axis=-1):
            images = images + curve * (tf.square(images) - images)
        return images

    def call(self, data):
        return self.get_enhanced_image(data, self.dce_model(data))

    def compute_losses(self, images, curves):
        enhanced = self.get_enhanced_image(images, curves)
        illumination = 200 * illumination_smoothness_loss(curves)
        spatial_constancy = tf.reduce_mean(self.spatial_constancy_loss(enhanced, images))
        color_constancy = 5 * tf.reduce_mean(color_constancy_loss(enhanced))
        exposure = 10 * tf.reduce_mean(exposure_loss(enhanced))
        return {
            "total_loss": illumination + spatial_constancy + color_constancy + exposure,
            "illumination_smoothness_loss": illumination,
            "spatial_constancy_loss": spatial_constancy,
            "color_constancy_loss": color_constancy,
            "exposure_loss": exposure,
        }

    def train_step(self, data):
        with tf.GradientTape() as tape:
            output = self.dce_model(data)
            losses = self.compute_losses(data, output)
        weights = self.dce_model.trainable_weights
        gradients = tape.gradient(losses["total_loss"], weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return losses

    def test_step(self, data):
        return self.compute_losses(data, self.dce_model(data))


@published_step("vision/zero_dce", "equal")
def train_zero_dce(wrap: Wrap) -> Numbers:
    """Single tensors, in batches without the remainder; validated."""
    model = ZeroDCE()
    model.compile(learning_rate=0.0005)
    model = wrap(model)
    train = batched(random_images(EXAMPLES, high=0.5), drop_remainder=True)
    validation = batched(random_images(13, high=0.5, seed=1), drop_remainder=True)
    history = model.fit(train, epochs=EPOCHS, validation_data=validation, verbose=0)
    return results(model, history)


# vision/barlow_twins


class BarlowLoss(keras.losses.Loss):
    """A loss of the batch's cross-correlations, divided by a batch size that is a constant."""

    def __init__(self, batch_size):
        super().__init__()
        self.lambda_amt = 5e-3
        self.batch_size = batch_size

    def normalize(self, output):
        return (output - tf.reduce_mean(output, axis=0)) / tf.math.reduce_std(output, axis=0)

    def call(self, z_a, z_b):
        correlation = (tf.transpose(self.normalize(z_a)) @ self.normalize(z_b)) / self.batch_size
        on_diagonal = tf.pow(tf.linalg.diag_part(correlation) - 1, 2)
        zeros = tf.zeros(correlation.shape[-1], correlation.dtype)
        off_diagonal = tf.pow(tf.linalg.set_diag(correlation, zeros), 2) * self.lambda_amt
        return tf.reduce_sum(on_diagonal) + tf.reduce_sum(off_diagonal)


class BarlowModel(keras.Model):
    """The compiled loss is called as `self.loss`, with two predictions."""

    def __init__(self):
        super().__init__()
        self.model = self.build_twin()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def build_twin(self):
        inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
        x = layers.Conv2D(3, 3, strides=2, padding="same", use_bias=False)(inputs)
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
        x = layers.Dense(6, use_bias=False)(layers.Flatten()(x))
        x = layers.ReLU()(layers.BatchNormalization()(x))
        return keras.Model(inputs, layers.Dense(4, bias_initializer=nonzero_bias())(x))

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, batch):
        y_a, y_b = batch
        with tf.GradientTape() as tape:
            z_a = self.model(y_a, training=True)
            z_b = self.model(y_b, training=True)
            loss = self.loss(z_a, z_b)
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


@published_step("vision/barlow_twins", "warned")
def train_barlow_twins(wrap: Wrap) -> Numbers:
    """Two versions of each image, in batches without the remainder."""
    model = wrap(BarlowModel())
    model.compile(optimizer=sgd(0.02), loss=BarlowLoss(BATCH))
    versions = zipped(
        batched(random_images(EXAMPLES), drop_remainder=True),
        batched(random_images(EXAMPLES, seed=1), drop_remainder=True),
    )
    history = model.fit(versions, epochs=EPOCHS, verbose=0)
    return results(model, history)


# vision/adamatch

SOURCE_BATCH = 4
TARGET_BATCH = 3 * SOURCE_BATCH


class AdaMatch(keras.Model):
    """Thresholds and ratios of the whole batch, draws of `tf.random`, and a step counter.

    The counter is a `tf.Variable` that is assigned under the tape. Regularizers of the network add
    losses that the step leaves out. BatchNormalization is updated by one of two passes.
    """

    def __init__(self, model, total_steps, tau=0.9):
        super().__init__()
        self.model = model
        self.tau = tau
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.total_steps = total_steps
        self.current_step = tf.Variable(0, dtype="int64")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def target_loss_weight(self):
        pi = tf.constant(np.pi, keras.config.floatx())
        step = tf.cast(self.current_step, keras.config.floatx())
        return 0.5 - tf.cos(tf.math.minimum(pi, (2 * pi * step) / self.total_steps)) / 2

    def source_loss(self, labels, weak_logits, strong_logits):
        loss_function = keras.losses.CategoricalCrossentropy(from_logits=True)
        return loss_function(labels, weak_logits) + loss_function(labels, strong_logits)

    def target_loss(self, pseudo_labels, strong_logits, mask):
        loss_function = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="none")
        losses = loss_function(tf.stop_gradient(pseudo_labels), strong_logits)
        return tf.reduce_mean(losses * tf.cast(mask, losses.dtype), 0)

    def train_step(self, data):
        ((source_w, labels), (source_s, _)), ((target_w, _), (target_s, _)) = data
        sources = tf.concat([source_w, source_s], 0)
        total_source = tf.shape(sources)[0]
        weak_source, weak_target = tf.shape(source_w)[0], tf.shape(target_w)[0]
        images = tf.concat([source_w, source_s, target_w, target_s], 0)
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            fixed_logits = self.model(sources, training=False)
            lambd = tf.random.uniform((total_source, CLASSES), 0, 1)
            source_logits = lambd * logits[:total_source] + (1 - lambd) * fixed_logits
            source_probabilities = tf.nn.softmax(source_logits[:weak_source])
            target_logits = logits[total_source:]
            target_probabilities = tf.nn.softmax(target_logits[:weak_target])
            ratio = tf.reduce_mean(source_probabilities) / tf.reduce_mean(target_probabilities)
            pseudo_labels = tf.math.l2_normalize(target_probabilities * ratio, 1)
            threshold = self.tau * tf.reduce_mean(tf.reduce_max(source_probabilities, axis=-1), 0)
            mask = tf.reduce_max(pseudo_labels, axis=-1) >= threshold
            source_loss = self.source_loss(labels, source_logits[:weak_source], source_logits[weak_source:])
            target_loss = self.target_loss(pseudo_labels, target_logits[weak_target:], mask)
            total_loss = source_loss + self.target_loss_weight() * target_loss
            self.current_step.assign_add(1)
        variables = self.model.trainable_variables
        gradients = tape.gradient(total_loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.loss_tracker.update_state(total_loss)
        return {"loss": self.loss_tracker.result()}


def make_residual_network() -> keras.Model:
    """Convolutions with BatchNormalization and regularizers."""
    regularizer = keras.regularizers.L2(0.0005)
    options = {"use_bias": False, "kernel_regularizer": regularizer, "padding": "same"}
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.Conv2D(3, 3, kernel_initializer="he_normal", **options)(layers.Rescaling(1.0 / 255)(inputs))
    hidden = layers.Activation("relu")(layers.BatchNormalization()(x))
    hidden = layers.Conv2D(3, 3, kernel_initializer="he_normal", **options)(hidden)
    x = layers.Add()([hidden, x])
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES, kernel_regularizer=regularizer)(x))


@published_step("vision/adamatch", "warned")
def train_adamatch(wrap: Wrap) -> Numbers:
    """Two zipped pairs of zipped data sets, with three times as many target images in a batch."""
    model = wrap(AdaMatch(make_residual_network(), total_steps=14))
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 14, 0.25)
    model.compile(optimizer=sgd(schedule))
    labels = keras.utils.to_categorical(random_labels(EXAMPLES), CLASSES)
    sources = [random_images(EXAMPLES, high=255.0, seed=n) for n in range(2)]
    targets = [random_images(3 * EXAMPLES, high=255.0, seed=n) for n in range(2, 4)]
    target_labels = random_labels(3 * EXAMPLES)
    source = zipped(*[batched((each, labels), SOURCE_BATCH) for each in sources])
    target = zipped(*[batched((each, target_labels), TARGET_BATCH) for each in targets])
    history = model.fit(zipped(source, target), epochs=EPOCHS, verbose=0)
    return results(model, history, {"current_step": model.current_step})


# generative/vae


class Sampling(layers.Layer):
    """Draws of `keras.random` from a seed generator of the layer."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        shape = (ops.shape(mean)[0], ops.shape(mean)[1])
        epsilon = keras.random.normal(shape=shape, seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * epsilon


class VAE(keras.Model):
    """Two means over the batch are added; three metrics get scalars. There is no `call`."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, z = self.encoder(data)
            reconstruction = self.decoder(z)
            of_pixels = keras.losses.binary_crossentropy(data, reconstruction)
            reconstruction_loss = ops.mean(ops.sum(of_pixels, axis=(1, 2)))
            kl_loss = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        gradients = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


@published_step("generative/vae", "equal")
def train_vae(wrap: Wrap) -> Numbers:
    """An array."""
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1))
    x = layers.Conv2D(2, 3, activation="relu", strides=2, padding="same")(image)
    x = layers.Dense(4, activation="relu")(layers.Flatten()(x))
    mean, log_variance = layers.Dense(2, name="z_mean")(x), layers.Dense(2, name="z_log_var")(x)
    z = Sampling()([mean, log_variance])
    encoder = keras.Model(image, [mean, log_variance, z], name="encoder")
    latent = keras.Input((2,))
    x = layers.Reshape((4, 4, 2))(layers.Dense(4 * 4 * 2, activation="relu")(latent))
    x = layers.Conv2DTranspose(2, 3, activation="relu", strides=2, padding="same")(x)
    x = layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x)
    model = VAE(encoder, keras.Model(latent, x, name="decoder"))
    model.compile(optimizer=sgd(0.01))
    model = wrap(model)
    images = random_images(EXAMPLES, channels=1)
    history = model.fit(images, epochs=EPOCHS, batch_size=BATCH, shuffle=False, verbose=0)
    return results(model, history)


# generative/dcgan_overriding_train_step


class GAN(keras.Model):
    """Two optimizers, one for each network; draws of `keras.random` and of `tf.random`."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def random_latent_vectors(self, batch_size):
        shape = (batch_size, self.latent_dim)
        return keras.random.normal(shape=shape, seed=self.seed_generator)

    def train_step(self, real_images):
        batch_size = ops.shape(real_images)[0]
        generated = self.generator(self.random_latent_vectors(batch_size))
        combined = ops.concatenate([generated, real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        weights = self.discriminator.trainable_weights
        gradients = tape.gradient(d_loss, weights)
        self.d_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        latent = self.random_latent_vectors(batch_size)
        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(misleading_labels, predictions)
        weights = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


@published_step("generative/dcgan_overriding_train_step", "equal")
def train_dcgan(wrap: Wrap) -> Numbers:
    """Single tensors; no `call`; the loss is Keras's, of twice as many rows as there are images."""
    discriminator = keras.Sequential(
        [
            keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3)),
            layers.Conv2D(3, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.0),
            layers.Dense(1, activation="sigmoid"),
        ],
        name="discriminator",
    )
    generator = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4 * 4 * 3),
            layers.Reshape((4, 4, 3)),
            layers.Conv2DTranspose(3, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(3, kernel_size=5, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )
    model = wrap(GAN(discriminator, generator, latent_dim=4))
    model.compile(d_optimizer=sgd(0.05), g_optimizer=sgd(0.2), loss_fn=keras.losses.BinaryCrossentropy())
    history = model.fit(batched(random_images(EXAMPLES)), epochs=EPOCHS, verbose=0)
    return results(model, history)


# generative/wgan_gp


class WGAN(keras.Model):
    """Three updates by one optimizer, then one by another, with the gradient of a gradient.

    Losses are functions that take means. Scalars of the batch are returned; there is no metric.
    """

    def __init__(self, discriminator, generator, latent_dim, d_steps=3, gp_weight=10.0):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_steps = d_steps
        self.gp_weight = gp_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def gradient_penalty(self, batch_size, real_images, fake_images):
        alpha = tf.random.normal([batch_size, 1, 1, 1], 0.0, 1.0)
        interpolated = real_images + alpha * (fake_images - real_images)
        with tf.GradientTape() as tape:
            tape.watch(interpolated)
            predictions = self.discriminator(interpolated, training=True)
        gradients = tape.gradient(predictions, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(gradients), axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        for _ in range(self.d_steps):
            latent = tf.random.normal(shape=(batch_size, self.latent_dim))
            with tf.GradientTape() as tape:
                fake_images = self.generator(latent, training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                penalty = self.gradient_penalty(batch_size, real_images, fake_images)
                d_loss = d_cost + penalty * self.gp_weight
            variables = self.discriminator.trainable_variables
            gradients = tape.gradient(d_loss, variables)
            self.d_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        latent = tf.random.normal(shape=(batch_size, self.latent_dim))
        with tf.GradientTape() as tape:
            generated = self.generator(latent, training=True)
            g_loss = self.g_loss_fn(self.discriminator(generated, training=True))
        variables = self.generator.trainable_variables
        gradients = tape.gradient(g_loss, variables)
        self.g_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def discriminator_loss(real_img, fake_img):
    """The difference of two means."""
    return tf.reduce_mean(fake_img) - tf.reduce_mean(real_img)


def generator_loss(fake_img):
    """A negative mean."""
    return -tf.reduce_mean(fake_img)


def normalization_of_noise(**options: Any) -> layers.Layer:
    """BatchNormalization where all examples are the same, so that only its beta remains."""
    beta_initializer = keras.initializers.RandomNormal(stddev=1.0)
    return layers.BatchNormalization(beta_initializer=beta_initializer, **options)


def make_critic() -> keras.Model:
    """Two convolutions and a score."""
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1))
    x = layers.LeakyReLU(0.2)(layers.Conv2D(2, 5, strides=2, padding="same")(image))
    x = layers.LeakyReLU(0.2)(layers.Conv2D(3, 5, strides=2, padding="same")(x))
    x = layers.Dropout(0.0)(layers.Flatten()(layers.Dropout(0.0)(x)))
    x = layers.Dense(1, bias_initializer=nonzero_bias())(x)
    return keras.Model(image, x, name="discriminator")


def make_upsampling_generator() -> keras.Model:
    """A dense layer and two convolutions, all with BatchNormalization."""
    noise = keras.Input((3,))
    x = normalization_of_noise()(layers.Dense(2 * 2 * 3, use_bias=False)(noise))
    x = layers.Reshape((2, 2, 3))(layers.LeakyReLU(0.2)(x))
    x = layers.Conv2D(3, 3, padding="same", use_bias=False)(layers.UpSampling2D()(x))
    x = layers.LeakyReLU(0.2)(layers.BatchNormalization(beta_initializer=nonzero_bias())(x))
    x = layers.Conv2D(1, 3, padding="same", use_bias=False)(layers.UpSampling2D()(x))
    x = layers.Activation("tanh")(layers.BatchNormalization(beta_initializer=nonzero_bias())(x))
    return keras.Model(noise, x, name="generator")


@published_step("generative/wgan_gp", "equal")
def train_wgan_gp(wrap: Wrap) -> Numbers:
    """An array; no `call`."""
    model = WGAN(make_critic(), make_upsampling_generator(), latent_dim=3)
    model.compile(
        d_optimizer=sgd(0.002),
        g_optimizer=sgd(0.01),
        d_loss_fn=discriminator_loss,
        g_loss_fn=generator_loss,
    )
    model = wrap(model)
    images = random_images(EXAMPLES, channels=1, low=-1.0)
    history = model.fit(images, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return results(model, history)


# generative/ddim and generative/gan_ada


class KID(keras.metrics.Metric):
    """A metric that compares all images of a batch, and owns another metric and a network."""

    def __init__(self, name="kid"):
        super().__init__(name=name)
        self.kid_tracker = keras.metrics.Mean()
        self.encoder = keras.Sequential(
            [
                keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3)),
                layers.Rescaling(255.0),
                layers.Resizing(IMAGE_SIZE, IMAGE_SIZE),
                layers.Lambda(lambda images: images / 127.5 - 1.0),
                layers.Conv2D(4, 3, activation="relu"),
                layers.GlobalAveragePooling2D(),
            ]
        )

    def polynomial_kernel(self, first, second):
        dimensions = ops.cast(ops.shape(first)[1], keras.config.floatx())
        return (first @ ops.transpose(second) / dimensions + 1.0) ** 3.0

    def update_state(self, real_images, generated_images, sample_weight=None):
        real = self.encoder(real_images, training=False)
        generated = self.encoder(generated_images, training=False)
        batch_size = ops.shape(real)[0]
        others = 1.0 - ops.eye(batch_size)
        pairs = ops.cast(batch_size * (batch_size - 1), keras.config.floatx())
        of_real = ops.sum(self.polynomial_kernel(real, real) * others) / pairs
        of_generated = ops.sum(self.polynomial_kernel(generated, generated) * others) / pairs
        of_both = ops.mean(self.polynomial_kernel(real, generated))
        self.kid_tracker.update_state(of_real + of_generated - 2.0 * of_both)

    def result(self):
        return self.kid_tracker.result()

    def reset_state(self):
        self.kid_tracker.reset_state()


EMA = 0.9
MIN_SIGNAL_RATE = 0.02
MAX_SIGNAL_RATE = 0.95
EMBEDDING_DIMS = 4
KID_DIFFUSION_STEPS = 2


@keras.saving.register_keras_serializable(package="published_steps")
def sinusoidal_embedding(x):
    """Sines and cosines of the noise variance."""
    frequencies = ops.exp(ops.linspace(ops.log(1.0), ops.log(100.0), EMBEDDING_DIMS // 2, dtype=keras.config.floatx()))
    angles = 2.0 * np.pi * frequencies * x
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=3)


def make_denoising_network() -> keras.Model:
    """A U-Net of one level."""
    noisy_images = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    noise_variances = keras.Input((1, 1, 1))
    embedding = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, EMBEDDING_DIMS))
    e = layers.UpSampling2D(IMAGE_SIZE, interpolation="nearest")(embedding(noise_variances))
    x = layers.Concatenate()([layers.Conv2D(3, kernel_size=1)(noisy_images), e])
    residual = layers.Conv2D(4, kernel_size=1)(x)
    x = layers.BatchNormalization(center=False, scale=False)(x)
    x = layers.Conv2D(4, kernel_size=3, padding="same", activation="swish")(x)
    skip = layers.Add()([layers.Conv2D(4, kernel_size=3, padding="same")(x), residual])
    x = layers.UpSampling2D(2, interpolation="bilinear")(layers.AveragePooling2D(2)(skip))
    x = layers.Concatenate()([x, skip])
    x = layers.Conv2D(3, kernel_size=1, kernel_initializer="zeros")(x)
    return keras.Model([noisy_images, noise_variances], x)


class DiffusionModel(keras.Model):
    """As many draws as a constant batch size; the loss is a tensor [batch, height, width].

    A copy of the network follows it as a moving average, BatchNormalization's moments too.
    """

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = make_denoising_network()
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")
        self.kid = KID(name="kid")

    @property
    def metrics(self):
        return [self.noise_loss_tracker, self.image_loss_tracker, self.kid]

    def denormalize(self, images):
        images = self.normalizer.mean + images * self.normalizer.variance**0.5
        return ops.clip(images, 0.0, 1.0)

    def diffusion_schedule(self, diffusion_times):
        start_angle = ops.cast(ops.arccos(MAX_SIGNAL_RATE), keras.config.floatx())
        end_angle = ops.cast(ops.arccos(MIN_SIGNAL_RATE), keras.config.floatx())
        angles = start_angle + diffusion_times * (end_angle - start_angle)
        return ops.sin(angles), ops.cos(angles)

    def denoise(self, noisy_images, noise_rates, signal_rates, training):
        network = self.network if training else self.ema_network
        noises = network([noisy_images, noise_rates**2], training=training)
        return noises, (noisy_images - noise_rates * noises) / signal_rates

    def reverse_diffusion(self, initial_noise, diffusion_steps):
        num_images = initial_noise.shape[0]
        step_size = 1.0 / diffusion_steps
        noisy_images = initial_noise
        for step in range(diffusion_steps):
            times = ops.ones((num_images, 1, 1, 1)) - step * step_size
            noise_rates, signal_rates = self.diffusion_schedule(times)
            noises, images = self.denoise(noisy_images, noise_rates, signal_rates, training=False)
            next_noise_rates, next_signal_rates = self.diffusion_schedule(times - step_size)
            noisy_images = next_signal_rates * images + next_noise_rates * noises
        return images

    def generate(self, num_images, diffusion_steps):
        shape = (num_images, IMAGE_SIZE, IMAGE_SIZE, 3)
        initial_noise = keras.random.normal(shape=shape)
        return self.denormalize(self.reverse_diffusion(initial_noise, diffusion_steps))

    def mix_with_noise(self, images):
        noises = keras.random.normal(shape=(BATCH, IMAGE_SIZE, IMAGE_SIZE, 3))
        times = keras.random.uniform(shape=(BATCH, 1, 1, 1), minval=0.0, maxval=1.0)
        noise_rates, signal_rates = self.diffusion_schedule(times)
        return noises, noise_rates, signal_rates, signal_rates * images + noise_rates * noises

    def train_step(self, images):
        images = self.normalizer(images, training=True)
        noises, noise_rates, signal_rates, noisy_images = self.mix_with_noise(images)
        with tf.GradientTape() as tape:
            pred_noises, pred_images = self.denoise(noisy_images, noise_rates, signal_rates, training=True)
            noise_loss = self.loss(noises, pred_noises)
            image_loss = self.loss(images, pred_images)
        weights = self.network.trainable_weights
        gradients = tape.gradient(noise_loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(EMA * average + (1 - EMA) * weight)
        return {metric.name: metric.result() for metric in self.metrics[:-1]}

    def test_step(self, images):
        images = self.normalizer(images, training=False)
        noises, noise_rates, signal_rates, noisy_images = self.mix_with_noise(images)
        pred_noises, pred_images = self.denoise(noisy_images, noise_rates, signal_rates, training=False)
        self.image_loss_tracker.update_state(self.loss(images, pred_images))
        self.noise_loss_tracker.update_state(self.loss(noises, pred_noises))
        generated = self.generate(num_images=BATCH, diffusion_steps=KID_DIFFUSION_STEPS)
        self.kid.update_state(self.denormalize(images), generated)
        return {metric.name: metric.result() for metric in self.metrics}


@published_step("generative/ddim", "may be refused")
def train_ddim(wrap: Wrap) -> Numbers:
    """Single tensors, in batches without the remainder; a layer is adapted to the data."""
    model = DiffusionModel()
    model.compile(optimizer=sgd(0.0002, weight_decay=0.0001), loss=keras.losses.mean_absolute_error)
    model = wrap(model)
    train = batched(random_images(EXAMPLES), drop_remainder=True)
    validation = batched(random_images(16, seed=1), drop_remainder=True)
    model.normalizer.adapt(train)
    history = model.fit(train, epochs=EPOCHS, validation_data=validation, verbose=0)
    return results(model, history)


TARGET_ACCURACY = 0.2
INTEGRATION_STEPS = 10
NOISE_SIZE = 4


def hard_step(values):
    """0 for negative values, and 1 for positive ones."""
    return 0.5 * (1.0 + ops.sign(values))


class AdaptiveAugmenter(keras.Model):
    """A probability that follows the accuracy of the batch."""

    def __init__(self):
        super().__init__()
        self.probability = keras.Variable(0.0)
        self.seed_generator = keras.random.SeedGenerator(42)
        self.augmenter = keras.Sequential(
            [
                keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3)),
                layers.RandomFlip("horizontal"),
                layers.RandomTranslation(0.0, 0.0, interpolation="nearest"),
                layers.RandomZoom((0.0, 0.0), (0.0, 0.0)),
            ]
        )

    def call(self, images, training):
        if training:
            augmented = self.augmenter(images, training=training)
            values = keras.random.uniform(shape=(ops.shape(images)[0], 1, 1, 1), seed=self.seed_generator)
            images = ops.where(ops.less(values, self.probability), augmented, images)
        return images

    def update(self, real_logits):
        error = ops.mean(hard_step(real_logits)) - TARGET_ACCURACY
        self.probability.assign(ops.clip(self.probability + error / INTEGRATION_STEPS, 0.0, 1.0))


class GANADA(keras.Model):
    """Two optimizers under one persistent tape, and a moving average.

    The published program takes the batch size from a constant, and here from the data.
    """

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(seed=42)
        self.augmenter = AdaptiveAugmenter()
        self.generator = self.make_generator()
        self.ema_generator = keras.models.clone_model(self.generator)
        self.discriminator = self.make_discriminator()
        self.built = True

    def make_generator(self):
        noise = keras.Input((NOISE_SIZE,))
        x = layers.Dense(4 * 4 * 3, use_bias=False)(noise)
        x = layers.ReLU()(normalization_of_noise(scale=False)(x))
        x = layers.Reshape((4, 4, 3))(x)
        x = layers.Conv2DTranspose(3, 4, strides=2, padding="same", activation="sigmoid")(x)
        return keras.Model(noise, x)

    def make_discriminator(self):
        image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
        x = layers.Conv2D(3, 4, strides=2, padding="same", use_bias=False)(image)
        x = layers.LeakyReLU(negative_slope=0.2)(layers.BatchNormalization(scale=False)(x))
        x = layers.Dropout(0.0)(layers.Flatten()(x))
        return keras.Model(image, layers.Dense(1)(x))

    def compile(self, generator_optimizer, discriminator_optimizer, **kwargs):
        super().compile(**kwargs)
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer
        self.generator_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.discriminator_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.real_accuracy = keras.metrics.BinaryAccuracy(name="real_acc")
        self.generated_accuracy = keras.metrics.BinaryAccuracy(name="gen_acc")
        self.augmentation_probability_tracker = keras.metrics.Mean(name="aug_p")
        self.kid = KID()

    @property
    def metrics(self):
        return [
            self.generator_loss_tracker,
            self.discriminator_loss_tracker,
            self.real_accuracy,
            self.generated_accuracy,
            self.augmentation_probability_tracker,
            self.kid,
        ]

    def generate(self, batch_size, training):
        shape = (batch_size, NOISE_SIZE)
        latent = keras.random.normal(shape=shape, seed=self.seed_generator)
        generator = self.generator if training else self.ema_generator
        return generator(latent, training=training)

    def adversarial_loss(self, real_logits, generated_logits):
        real_labels = ops.ones_like(real_logits)
        generated_labels = ops.zeros_like(generated_logits)
        generator_loss = keras.losses.binary_crossentropy(real_labels, generated_logits, from_logits=True)
        discriminator_loss = keras.losses.binary_crossentropy(
            ops.concatenate([real_labels, generated_labels], axis=0),
            ops.concatenate([real_logits, generated_logits], axis=0),
            from_logits=True,
        )
        return ops.mean(generator_loss), ops.mean(discriminator_loss)

    def train_step(self, real_images):
        real_images = self.augmenter(real_images, training=True)
        with tf.GradientTape(persistent=True) as tape:
            generated = self.augmenter(self.generate(ops.shape(real_images)[0], training=True), training=True)
            real_logits = self.discriminator(real_images, training=True)
            generated_logits = self.discriminator(generated, training=True)
            generator_loss, discriminator_loss = self.adversarial_loss(real_logits, generated_logits)
        generator_weights = self.generator.trainable_weights
        generator_gradients = tape.gradient(generator_loss, generator_weights)
        discriminator_weights = self.discriminator.trainable_weights
        discriminator_gradients = tape.gradient(discriminator_loss, discriminator_weights)
        self.generator_optimizer.apply_gradients(zip(generator_gradients, generator_weights, strict=True))
        self.discriminator_optimizer.apply_gradients(zip(discriminator_gradients, discriminator_weights, strict=True))
        self.augmenter.update(real_logits)
        self.generator_loss_tracker.update_state(generator_loss)
        self.discriminator_loss_tracker.update_state(discriminator_loss)
        self.real_accuracy.update_state(1.0, hard_step(real_logits))
        self.generated_accuracy.update_state(0.0, hard_step(generated_logits))
        self.augmentation_probability_tracker.update_state(self.augmenter.probability)
        for weight, average in zip(self.generator.weights, self.ema_generator.weights, strict=True):
            average.assign(EMA * average + (1 - EMA) * weight)
        return {metric.name: metric.result() for metric in self.metrics[:-1]}

    def test_step(self, real_images):
        self.kid.update_state(real_images, self.generate(ops.shape(real_images)[0], training=False))
        return {self.kid.name: self.kid.result()}


@published_step("generative/gan_ada", "warned")
def train_gan_ada(wrap: Wrap) -> Numbers:
    """Single tensors, in batches without the remainder; validated by a metric alone."""
    model = wrap(GANADA())
    model.compile(generator_optimizer=sgd(0.2), discriminator_optimizer=sgd(0.05))
    train = batched(random_images(EXAMPLES), drop_remainder=True)
    validation = batched(random_images(16, seed=1), drop_remainder=True)
    history = model.fit(train, epochs=EPOCHS, validation_data=validation, verbose=0)
    return results(model, history)


# generative/real_nvp


def make_coupling(size: int) -> keras.Model:
    """A scale and a translation, by dense layers with regularizers."""
    regularizer = keras.regularizers.L2(0.01)
    inputs = keras.Input((size,))
    outputs = []
    for activation in ("tanh", "linear"):
        x = layers.Dense(5, activation="relu", kernel_regularizer=regularizer)(inputs)
        x = layers.Dense(5, activation="relu", kernel_regularizer=regularizer)(x)
        x = layers.Dense(size, activation=activation, kernel_regularizer=regularizer)(x)
        outputs.append(x)
    return keras.Model(inputs, outputs)


class RealNVP(keras.Model):
    """A negative mean is the loss. Regularizers add losses that the step leaves out.

    The step calls the model itself, without saying whether it trains; the default is that it does.
    """

    def __init__(self, num_coupling_layers):
        super().__init__()
        self.num_coupling_layers = num_coupling_layers
        masks = [[0, 1], [1, 0]] * (num_coupling_layers // 2)
        self.masks = np.array(masks, dtype=keras.config.floatx())
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.layers_list = [make_coupling(2) for _ in range(num_coupling_layers)]

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x, training=True):
        log_determinant = 0
        direction = -1 if training else 1
        gate = (direction - 1) / 2
        for index in range(self.num_coupling_layers)[::direction]:
            masked = x * self.masks[index]
            reversed_mask = 1 - self.masks[index]
            scale, translation = self.layers_list[index](masked)
            scale *= reversed_mask
            translation *= reversed_mask
            moved = x * tf.exp(direction * scale) + direction * translation * tf.exp(gate * scale)
            x = reversed_mask * moved + masked
            log_determinant += gate * tf.reduce_sum(scale, [1])
        return x, log_determinant

    def log_loss(self, x):
        y, log_determinant = self(x)
        log_probability = -0.5 * tf.reduce_sum(tf.square(y), [1]) - np.log(2 * np.pi)
        return -tf.reduce_mean(log_probability + log_determinant)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.log_loss(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.log_loss(data))
        return {"loss": self.loss_tracker.result()}


@published_step("generative/real_nvp", "equal")
def train_real_nvp(wrap: Wrap) -> Numbers:
    """An array, a fifth of which is for validation."""
    model = RealNVP(num_coupling_layers=4)
    model.compile(optimizer=sgd(0.05))
    model = wrap(model)
    points = random_array(34, 2, low=-1.5, high=1.5)
    history = model.fit(points, batch_size=BATCH, epochs=EPOCHS, validation_split=0.2, shuffle=False, verbose=0)
    return results(model, history)


# generative/vq_vae


class VectorQuantizer(layers.Layer):
    """Calls `add_loss`. Its codebook is a `tf.Variable`, which Keras does not train."""

    def __init__(self, num_embeddings, embedding_dim, beta=0.25, **kwargs):
        super().__init__(**kwargs)
        self.embedding_dim = embedding_dim
        self.num_embeddings = num_embeddings
        self.beta = beta
        initializer = tf.random_uniform_initializer()
        shape = (embedding_dim, num_embeddings)
        self.embeddings = tf.Variable(initializer(shape=shape, dtype=keras.config.floatx()), trainable=True)

    def call(self, x):
        flattened = tf.reshape(x, [-1, self.embedding_dim])
        codes = tf.one_hot(self.get_code_indices(flattened), self.num_embeddings, dtype=x.dtype)
        quantized = tf.matmul(codes, self.embeddings, transpose_b=True)
        quantized = tf.reshape(quantized, tf.shape(x))
        commitment_loss = tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2)
        codebook_loss = tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment_loss + codebook_loss)
        return x + tf.stop_gradient(quantized - x)

    def get_code_indices(self, flattened):
        distances = (
            tf.reduce_sum(flattened**2, axis=1, keepdims=True)
            + tf.reduce_sum(self.embeddings**2, axis=0)
            - 2 * tf.matmul(flattened, self.embeddings)
        )
        return tf.argmin(distances, axis=1)


class VQVAETrainer(keras.Model):
    """Reads the losses of a layer, under the tape and after the update. There is no `call`."""

    def __init__(self, train_variance, latent_dim, num_embeddings):
        super().__init__()
        self.train_variance = train_variance
        self.vqvae = self.get_vqvae(latent_dim, num_embeddings)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.vq_loss_tracker = keras.metrics.Mean(name="vq_loss")

    def get_vqvae(self, latent_dim, num_embeddings):
        inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1))
        x = layers.Conv2D(3, 3, activation="relu", strides=2, padding="same")(inputs)
        x = layers.Conv2D(latent_dim, 1, padding="same")(x)
        x = VectorQuantizer(num_embeddings, latent_dim, name="vector_quantizer")(x)
        x = layers.Conv2DTranspose(3, 3, activation="relu", strides=2, padding="same")(x)
        return keras.Model(inputs, layers.Conv2DTranspose(1, 3, padding="same")(x))

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.vq_loss_tracker]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstructions = self.vqvae(x)
            reconstruction_loss = tf.reduce_mean((x - reconstructions) ** 2) / self.train_variance
            total_loss = reconstruction_loss + sum(self.vqvae.losses)
        variables = self.vqvae.trainable_variables
        gradients = tape.gradient(total_loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.vq_loss_tracker.update_state(sum(self.vqvae.losses))
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "vqvae_loss": self.vq_loss_tracker.result(),
        }


@published_step("generative/vq_vae", "equal")
def train_vq_vae(wrap: Wrap) -> Numbers:
    """An array."""
    images = random_images(EXAMPLES, channels=1, low=-0.5, high=0.5)
    model = wrap(VQVAETrainer(float(np.var(images)), latent_dim=2, num_embeddings=5))
    model.compile(optimizer=sgd(0.01))
    history = model.fit(images, epochs=EPOCHS, batch_size=BATCH, shuffle=False, verbose=0)
    quantizer = model.vqvae.get_layer("vector_quantizer")
    return results(model, history, {"embeddings": quantizer.embeddings})


# generative/cyclegan

FILTERS = 2


class ReflectionPadding2D(layers.Layer):
    """Padding by reflection."""

    def __init__(self, padding=(1, 1)):
        super().__init__()
        self.padding = tuple(padding)

    def call(self, input_tensor):
        width, height = self.padding
        paddings = [[0, 0], [height, height], [width, width], [0, 0]]
        return tf.pad(input_tensor, paddings, mode="REFLECT")


class CycleGan(keras.Model):
    """Four networks and four optimizers under one persistent tape; losses of Keras.

    Scalars of the batch are returned; there is no metric. There is a `call`, of one of the two
    images that a step gets.
    """

    def __init__(self, generators, discriminators, lambda_cycle=10.0, lambda_identity=0.5):
        super().__init__()
        self.gen_G, self.gen_F = generators
        self.disc_X, self.disc_Y = discriminators
        self.lambda_cycle = lambda_cycle
        self.lambda_identity = lambda_identity

    def call(self, inputs):
        return (
            self.disc_X(inputs),
            self.disc_Y(inputs),
            self.gen_G(inputs),
            self.gen_F(inputs),
        )

    def compile(self, gen_optimizers, disc_optimizers, gen_loss_fn, disc_loss_fn):
        super().compile()
        self.gen_G_optimizer, self.gen_F_optimizer = gen_optimizers
        self.disc_X_optimizer, self.disc_Y_optimizer = disc_optimizers
        self.generator_loss_fn = gen_loss_fn
        self.discriminator_loss_fn = disc_loss_fn
        self.cycle_loss_fn = keras.losses.MeanAbsoluteError()
        self.identity_loss_fn = keras.losses.MeanAbsoluteError()

    def generator_loss(self, fake_score, real, cycled, same):
        cycle_loss = self.cycle_loss_fn(real, cycled) * self.lambda_cycle
        identity_loss = self.identity_loss_fn(real, same) * self.lambda_cycle * self.lambda_identity
        return self.generator_loss_fn(fake_score) + cycle_loss + identity_loss

    def train_step(self, batch_data):
        real_x, real_y = batch_data
        with tf.GradientTape(persistent=True) as tape:
            fake_y = self.gen_G(real_x, training=True)
            fake_x = self.gen_F(real_y, training=True)
            cycled_x = self.gen_F(fake_y, training=True)
            cycled_y = self.gen_G(fake_x, training=True)
            same_x = self.gen_F(real_x, training=True)
            same_y = self.gen_G(real_y, training=True)
            real_x_score = self.disc_X(real_x, training=True)
            fake_x_score = self.disc_X(fake_x, training=True)
            real_y_score = self.disc_Y(real_y, training=True)
            fake_y_score = self.disc_Y(fake_y, training=True)
            loss_g = self.generator_loss(fake_y_score, real_y, cycled_y, same_y)
            loss_f = self.generator_loss(fake_x_score, real_x, cycled_x, same_x)
            loss_x = self.discriminator_loss_fn(real_x_score, fake_x_score)
            loss_y = self.discriminator_loss_fn(real_y_score, fake_y_score)
        updates = [
            (self.gen_G_optimizer, loss_g, self.gen_G),
            (self.gen_F_optimizer, loss_f, self.gen_F),
            (self.disc_X_optimizer, loss_x, self.disc_X),
            (self.disc_Y_optimizer, loss_y, self.disc_Y),
        ]
        gradients = [tape.gradient(loss, net.trainable_variables) for _, loss, net in updates]
        for (optimizer, _, net), of_net in zip(updates, gradients, strict=True):
            optimizer.apply_gradients(zip(of_net, net.trainable_variables, strict=True))
        return {"G_loss": loss_g, "F_loss": loss_f, "D_X_loss": loss_x, "D_Y_loss": loss_y}


def instance_normalization() -> layers.Layer:
    """Normalizes each channel of each image."""
    gamma_initializer = keras.initializers.RandomNormal(stddev=0.02, seed=3)
    return layers.GroupNormalization(groups=-1, gamma_initializer=gamma_initializer)


def make_resnet_generator(seed: int) -> keras.Model:
    """One block that halves the image, one residual block, and one that doubles the image."""
    kernel = {"kernel_initializer": keras.initializers.RandomNormal(stddev=0.02, seed=seed)}
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.Conv2D(FILTERS, 7, use_bias=False, **kernel)(ReflectionPadding2D((3, 3))(image))
    x = layers.Activation("relu")(instance_normalization()(x))
    x = layers.Conv2D(2 * FILTERS, 3, strides=2, padding="same", use_bias=False, **kernel)(x)
    x = layers.Activation("relu")(instance_normalization()(x))
    hidden = layers.Conv2D(2 * FILTERS, 3, use_bias=False, **kernel)(ReflectionPadding2D()(x))
    x = layers.add([x, instance_normalization()(hidden)])
    x = layers.Conv2DTranspose(FILTERS, 3, strides=2, padding="same", use_bias=False, **kernel)(x)
    x = layers.Activation("relu")(instance_normalization()(x))
    x = layers.Conv2D(3, 7, padding="valid")(ReflectionPadding2D((3, 3))(x))
    return keras.Model(image, layers.Activation("tanh")(x))


def make_patch_discriminator(seed: int) -> keras.Model:
    """Scores of an image's patches."""
    kernel = {"kernel_initializer": keras.initializers.RandomNormal(stddev=0.02, seed=seed)}
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.LeakyReLU(0.2)(layers.Conv2D(FILTERS, 4, strides=2, padding="same", **kernel)(image))
    x = layers.Conv2D(2 * FILTERS, 4, strides=2, padding="same", use_bias=False, **kernel)(x)
    x = layers.LeakyReLU(0.2)(instance_normalization()(x))
    return keras.Model(image, layers.Conv2D(1, 4, padding="same", **kernel)(x))


@published_step("generative/cyclegan", "equal")
def train_cyclegan(wrap: Wrap) -> Numbers:
    """Zipped images of two kinds; the mean squared error of Keras is in both given losses."""
    adversarial_loss = keras.losses.MeanSquaredError()

    def of_generator(fake):
        return adversarial_loss(ops.ones_like(fake), fake)

    def of_discriminator(real, fake):
        real_loss = adversarial_loss(ops.ones_like(real), real)
        fake_loss = adversarial_loss(ops.zeros_like(fake), fake)
        return (real_loss + fake_loss) * 0.5

    generators = [make_resnet_generator(seed) for seed in (1, 2)]
    discriminators = [make_patch_discriminator(seed) for seed in (4, 5)]
    model = wrap(CycleGan(generators, discriminators))
    model.compile(
        gen_optimizers=(sgd(0.01), sgd(0.02)),
        disc_optimizers=(sgd(0.05), sgd(0.1)),
        gen_loss_fn=of_generator,
        disc_loss_fn=of_discriminator,
    )
    horses = batched(random_images(EXAMPLES, low=-1.0))
    zebras = batched(random_images(EXAMPLES, low=-1.0, seed=1))
    history = model.fit(zipped(horses, zebras), epochs=EPOCHS, verbose=0)
    return results(model, history)


# generative/wgan-graphs

BOND_DIM = 3
NUM_ATOMS = 4
ATOM_DIM = 3


class RelationalGraphConvLayer(layers.Layer):
    """Sums each atom's neighbours by kind of bond."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, input_shape):
        shape = (input_shape[0][1], input_shape[1][2], self.units)
        self.kernel = self.add_weight(shape=shape, initializer="glorot_uniform", name="W")
        self.built = True

    def call(self, inputs, training=False):
        adjacency, features = inputs
        x = ops.matmul(adjacency, features[:, None, :, :])
        x = ops.matmul(x, self.kernel)
        return ops.relu(ops.sum(x, axis=1))


class GraphWGAN(keras.Model):
    """Two optimizers; the step stores the number of examples on the model.

    Metrics are made in `compile`, and Keras's tracker of the loss is one of those that are
    returned.
    """

    def __init__(self, generator, discriminator, discriminator_steps=1, generator_steps=1):
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator
        self.discriminator_steps = discriminator_steps
        self.generator_steps = generator_steps
        self.gp_weight = 10
        self.latent_dim = self.generator.input_shape[-1]

    def compile(self, optimizer_generator, optimizer_discriminator, **kwargs):
        super().compile(**kwargs)
        self.optimizer_generator = optimizer_generator
        self.optimizer_discriminator = optimizer_discriminator
        self.metric_generator = keras.metrics.Mean(name="loss_gen")
        self.metric_discriminator = keras.metrics.Mean(name="loss_dis")

    def train_step(self, inputs):
        if isinstance(inputs[0], list | tuple):
            inputs = inputs[0]
        self.batch_size = tf.shape(inputs[0])[0]
        for _ in range(self.discriminator_steps):
            z = tf.random.normal((self.batch_size, self.latent_dim))
            with tf.GradientTape() as tape:
                generated = self.generator(z, training=True)
                loss = self.discriminator_loss(inputs, generated)
            weights = self.discriminator.trainable_weights
            gradients = tape.gradient(loss, weights)
            self.optimizer_discriminator.apply_gradients(zip(gradients, weights, strict=True))
            self.metric_discriminator.update_state(loss)
        for _ in range(self.generator_steps):
            z = tf.random.normal((self.batch_size, self.latent_dim))
            with tf.GradientTape() as tape:
                generated = self.generator(z, training=True)
                loss = -tf.reduce_mean(self.discriminator(generated, training=True))
                weights = self.generator.trainable_weights
                gradients = tape.gradient(loss, weights)
                self.optimizer_generator.apply_gradients(zip(gradients, weights, strict=True))
                self.metric_generator.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def discriminator_loss(self, real, generated):
        real_logits = self.discriminator(real, training=True)
        generated_logits = self.discriminator(generated, training=True)
        loss = tf.reduce_mean(generated_logits) - tf.reduce_mean(real_logits)
        return loss + self.gradient_penalty(real, generated) * self.gp_weight

    def gradient_penalty(self, real, generated):
        alpha = tf.random.uniform([self.batch_size])
        alpha = tf.reshape(alpha, (self.batch_size, 1, 1, 1))
        adjacency = real[0] * alpha + (1 - alpha) * generated[0]
        alpha = tf.reshape(alpha, (self.batch_size, 1, 1))
        features = real[1] * alpha + (1 - alpha) * generated[1]
        with tf.GradientTape() as tape:
            tape.watch(adjacency)
            tape.watch(features)
            logits = self.discriminator([adjacency, features], training=True)
        gradients = tape.gradient(logits, [adjacency, features])
        of_adjacency = (1 - tf.norm(gradients[0], axis=1)) ** 2
        of_features = (1 - tf.norm(gradients[1], axis=2)) ** 2
        return tf.reduce_mean(tf.reduce_mean(of_adjacency, axis=(-2, -1)) + tf.reduce_mean(of_features, axis=-1))


def make_graph_generator() -> keras.Model:
    """Bonds and atoms from noise."""
    z = keras.Input((4,))
    x = layers.Dropout(0.0)(layers.Dense(6, activation="tanh")(z))
    adjacency = layers.Dense(BOND_DIM * NUM_ATOMS * NUM_ATOMS)(x)
    adjacency = layers.Reshape((BOND_DIM, NUM_ATOMS, NUM_ATOMS))(adjacency)
    adjacency = (adjacency + ops.transpose(adjacency, (0, 1, 3, 2))) / 2
    adjacency = layers.Softmax(axis=1)(adjacency)
    features = layers.Reshape((NUM_ATOMS, ATOM_DIM))(layers.Dense(NUM_ATOMS * ATOM_DIM)(x))
    return keras.Model(z, [adjacency, layers.Softmax(axis=2)(features)])


def make_graph_discriminator() -> keras.Model:
    """A score of a graph."""
    adjacency = keras.Input((BOND_DIM, NUM_ATOMS, NUM_ATOMS))
    features = keras.Input((NUM_ATOMS, ATOM_DIM))
    x = RelationalGraphConvLayer(12)([adjacency, features])
    x = RelationalGraphConvLayer(12)([adjacency, x])
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dropout(0.0)(layers.Dense(6, activation="relu")(x))
    x = layers.Dense(1, bias_initializer=nonzero_bias(), dtype=keras.config.floatx())(x)
    return keras.Model([adjacency, features], x)


@published_step("generative/wgan-graphs", "equal")
def train_wgan_graphs(wrap: Wrap) -> Numbers:
    """A list of two arrays."""
    model = GraphWGAN(make_graph_generator(), make_graph_discriminator())
    model.compile(optimizer_generator=sgd(0.1), optimizer_discriminator=sgd(0.01))
    model = wrap(model)
    random = np.random.default_rng(0)
    bonds = random.integers(0, BOND_DIM, (EXAMPLES, NUM_ATOMS, NUM_ATOMS))
    atoms = random.integers(0, ATOM_DIM, (EXAMPLES, NUM_ATOMS))
    adjacency = np.moveaxis(np.eye(BOND_DIM)[bonds], -1, 1).astype(keras.config.floatx())
    features = np.eye(ATOM_DIM)[atoms].astype(keras.config.floatx())
    history = model.fit([adjacency, features], epochs=EPOCHS, batch_size=BATCH, shuffle=False, verbose=0)
    return results(model, history)


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


@published_step("audio/transformer_asr", "equal")
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


@published_step("keras_recipes/trainer_pattern", "equal")
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


@published_step("guides/custom_train_step_in_tensorflow (first example)", "equal")
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


@published_step("guides/custom_train_step_in_tensorflow (going lower-level)", "equal")
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


@published_step("guides/custom_train_step_in_tensorflow (sample_weight, test_step)", "equal")
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


def main() -> None:
    """Prints what each program gives on N replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs, all if none is given")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--floatx", choices=list(BOUNDS), default="float32")
    arguments = parser.parse_args()
    keras.config.set_floatx(arguments.floatx)
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, devices)
    for name in arguments.names or PUBLISHED_STEPS:
        print(f"{name} ({PUBLISHED_STEPS[name].expected}): ", end="", flush=True)
        try:
            print(describe(compare(name, arguments.replicas)), flush=True)
        except Exception as error:  # whatever it is, the other programs are still compared
            print(f"fails: {type(error).__name__}: {' '.join(str(error).split())}", flush=True)


def describe(comparison: Comparison) -> str:
    """The difference or the refusal, and a line for each warning."""
    lines = [f"    warned: {message}" for message in comparison.warnings]
    if comparison.difference is None:
        return "\n".join([f"refused: {comparison.refusal}", *lines])
    return "\n".join([f"{comparison.difference:.1e}", *lines])


if __name__ == "__main__":
    main()
