# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the methods are Keras's, or do what their names say
"""Programs of keras.io's folder vision without a `train_step` of their own."""

import math
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.published.programs import (
    BATCH,
    CLASSES,
    EPOCHS,
    EXAMPLES,
    IMAGE_SIZE,
    Numbers,
    Wrap,
    batch_dataset,
    batched,
    nonzero_bias,
    published_program,
    random_array,
    random_images,
    random_labels,
    results,
    sgd,
    zipped,
)

SPLIT_EXAMPLES = 30  # of which `validation_split=0.1` leaves EXAMPLES to train on
TEST_EXAMPLES = 13


def part_of_program(name: str, numbers: Numbers) -> Numbers:
    """The numbers of one of a program's models, named after it."""
    return {f"{name}/{key}": value for key, value in numbers.items()}


def one_hot_labels(count: int, seed: int = 0) -> np.ndarray:
    """A row with a single 1 for each example."""
    return keras.utils.to_categorical(random_labels(count, seed=seed), CLASSES)


# vision/mnist_convnet


@published_program("vision/mnist_convnet", "equal")
def train_mnist_convnet(wrap: Wrap) -> Numbers:
    """Arrays with `validation_split`; a loss and a metric by name."""
    model = keras.Sequential(
        [
            keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1)),
            layers.Conv2D(2, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(3, kernel_size=(3, 3), activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.0),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model = wrap(model)
    model.compile(loss="categorical_crossentropy", optimizer=sgd(0.1), metrics=["accuracy"])
    history = model.fit(
        random_images(SPLIT_EXAMPLES, channels=1),
        one_hot_labels(SPLIT_EXAMPLES),
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_split=0.1,
        shuffle=False,
        verbose=0,
    )
    test_images = random_images(TEST_EXAMPLES, channels=1, seed=1)
    loss, accuracy = model.evaluate(test_images, one_hot_labels(TEST_EXAMPLES, seed=1), verbose=0)
    return results(model, history, scores={"loss": loss, "accuracy": accuracy})


# vision/image_classification_with_vision_transformer

PATCH_SIZE = 4
PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2
PROJECTION = 4


def mlp(x, hidden_units, dropout_rate):
    """Dense layers with dropout."""
    for units in hidden_units:
        x = layers.Dense(units, activation=keras.activations.gelu)(x)
        x = layers.Dropout(dropout_rate)(x)
    return x


def top_k_metrics(metric_class: type[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    """The metric of the two best classes; none in float64, which TensorFlow's operation refuses."""
    if keras.config.floatx() == "float64":
        return []
    return [metric_class(2, name="top-2-accuracy")]


class Patches(layers.Layer):
    """Cuts images into patches, and takes the batch size from the images."""

    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def call(self, images):
        batch_size, height, width, channels = ops.shape(images)
        count = (height // self.patch_size) * (width // self.patch_size)
        patches = ops.image.extract_patches(images, size=self.patch_size)
        return ops.reshape(patches, (batch_size, count, self.patch_size**2 * channels))


class PatchEncoder(layers.Layer):
    """Adds an embedding of the position, which is one row for all examples."""

    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(projection_dim)
        self.position_embedding = layers.Embedding(num_patches, projection_dim)

    def call(self, patch):
        positions = ops.expand_dims(ops.arange(0, self.num_patches, step=1), axis=0)
        return self.projection(patch) + self.position_embedding(positions)


def make_vision_transformer(images: np.ndarray) -> keras.Model:
    """Augmentation with an adapted `Normalization`, and two blocks of attention."""
    augmentation = keras.Sequential(
        [
            layers.Normalization(),
            layers.Resizing(IMAGE_SIZE, IMAGE_SIZE),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(0.0, 0.0),  # for RandomRotation, which fails in float64
            layers.RandomZoom(height_factor=0.0, width_factor=0.0),
        ],
        name="data_augmentation",
    )
    augmentation.layers[0].adapt(images)
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    patches = Patches(PATCH_SIZE)(augmentation(inputs))
    encoded = PatchEncoder(PATCHES, PROJECTION)(patches)
    for _ in range(2):
        x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
        attention = layers.MultiHeadAttention(num_heads=2, key_dim=PROJECTION, dropout=0.0)(x1, x1)
        x2 = layers.Add()([attention, encoded])
        shifted = {"epsilon": 1e-6, "beta_initializer": nonzero_bias()}
        x3 = layers.LayerNormalization(**shifted)(x2)
        x3 = mlp(x3, hidden_units=[2 * PROJECTION, PROJECTION], dropout_rate=0.0)
        encoded = layers.Add()([x3, x2])
    representation = layers.LayerNormalization(epsilon=1e-6)(encoded)
    representation = layers.Dropout(0.0)(layers.Flatten()(representation))
    features = mlp(representation, hidden_units=[8, 6], dropout_rate=0.0)
    return keras.Model(inputs, layers.Dense(CLASSES)(features))


@published_program("vision/image_classification_with_vision_transformer", "equal")
def train_vision_transformer(wrap: Wrap) -> Numbers:
    """The best weights are saved by a callback, and loaded before the evaluation."""
    images, labels = random_images(SPLIT_EXAMPLES), random_labels(SPLIT_EXAMPLES)[:, None]
    model = wrap(make_vision_transformer(images))
    model.compile(
        optimizer=sgd(0.05, weight_decay=0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            *top_k_metrics(keras.metrics.SparseTopKCategoricalAccuracy),
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint_filepath = str(Path(folder, "checkpoint.weights.h5"))
        checkpoint_callback = keras.callbacks.ModelCheckpoint(
            checkpoint_filepath,
            monitor="val_accuracy",
            save_best_only=True,
            save_weights_only=True,
        )
        history = model.fit(
            x=images,
            y=labels,
            batch_size=BATCH,
            epochs=EPOCHS,
            validation_split=0.1,
            callbacks=[checkpoint_callback],
            shuffle=False,
            verbose=0,
        )
        model.load_weights(checkpoint_filepath)
    test_labels = random_labels(TEST_EXAMPLES, seed=1)[:, None]
    test_images = random_images(TEST_EXAMPLES, seed=1)
    scores = model.evaluate(test_images, test_labels, verbose=0, return_dict=True)
    return results(model, history, scores=scores)


# vision/cct


class CCTTokenizer(layers.Layer):
    """Convolutions and pooling in place of patches."""

    def __init__(self, output_channels=(3, PROJECTION)):
        super().__init__()
        self.conv_model = keras.Sequential()
        for channels in output_channels:
            convolution = layers.Conv2D(
                channels,
                kernel_size=3,
                padding="valid",
                use_bias=False,
                activation="relu",
                kernel_initializer="he_normal",
            )
            self.conv_model.add(convolution)
            self.conv_model.add(layers.ZeroPadding2D(1))
            self.conv_model.add(layers.MaxPooling2D(3, 2, "same"))

    def call(self, images):
        outputs = self.conv_model(images)
        _, height, width, channels = ops.shape(outputs)
        return ops.reshape(outputs, (-1, height * width, channels))


class PositionEmbedding(layers.Layer):
    """A weight that is added to each example."""

    def __init__(self, sequence_length):
        super().__init__()
        self.sequence_length = sequence_length

    def build(self, input_shape):
        shape = (self.sequence_length, input_shape[-1])
        self.position_embeddings = self.add_weight(
            name="embeddings",
            shape=shape,
            initializer="glorot_uniform",
        )

    def call(self, inputs, start_index=0):
        length = ops.shape(inputs)[-2]
        size = (length, ops.shape(inputs)[-1])
        embeddings = ops.slice(self.position_embeddings, (start_index, 0), size)
        return ops.broadcast_to(embeddings, ops.shape(inputs))


class SequencePooling(layers.Layer):
    """A mean over a sequence, weighted by attention to each of its members."""

    def __init__(self):
        super().__init__()
        # The softmax ignores the bias, so its gradient is rounding.
        self.attention = layers.Dense(1, bias_initializer=nonzero_bias())

    def call(self, x):
        weights = ops.softmax(self.attention(x), axis=1)
        weights = ops.transpose(weights, axes=(0, 2, 1))
        return ops.squeeze(ops.matmul(weights, x), axis=-2)


class StochasticDepth(layers.Layer):
    """Draws a number for each example, from a seed generator of the layer."""

    def __init__(self, drop_prop):
        super().__init__()
        self.drop_prob = drop_prop
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, x, training=None):
        if not training:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        drawn = keep_prob + keras.random.uniform(shape, 0, 1, seed=self.seed_generator)
        return (x / keep_prob) * ops.floor(drawn)


def make_cct_model(stochastic_depth_rate: float = 0.0) -> keras.Model:
    """Two transformer layers after convolutions."""
    augmentation = keras.Sequential(
        [
            layers.Rescaling(scale=1.0 / 2),
            layers.RandomCrop(IMAGE_SIZE, IMAGE_SIZE),
            layers.RandomFlip("horizontal"),
        ],
        name="data_augmentation",
    )
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    encoded = CCTTokenizer()(augmentation(inputs))
    encoded += PositionEmbedding(sequence_length=encoded.shape[1])(encoded)
    for rate in np.linspace(0, stochastic_depth_rate, 2):
        x1 = layers.LayerNormalization(epsilon=1e-5)(encoded)
        attention = layers.MultiHeadAttention(num_heads=2, key_dim=PROJECTION, dropout=0.0)(x1, x1)
        x2 = layers.Add()([StochasticDepth(float(rate))(attention), encoded])
        x3 = layers.LayerNormalization(epsilon=1e-5)(x2)
        x3 = mlp(x3, hidden_units=[PROJECTION, PROJECTION], dropout_rate=0.0)
        encoded = layers.Add()([StochasticDepth(float(rate))(x3), x2])
    representation = layers.LayerNormalization(epsilon=1e-5)(encoded)
    logits = layers.Dense(CLASSES)(SequencePooling()(representation))
    return keras.Model(inputs=inputs, outputs=logits)


@published_program("vision/cct", "equal")
def train_cct(wrap: Wrap) -> Numbers:
    """Smoothed labels; the model is evaluated with the best weights."""
    model = wrap(make_cct_model())
    model.compile(
        optimizer=sgd(0.05, weight_decay=0.0001),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        metrics=[
            keras.metrics.CategoricalAccuracy(name="accuracy"),
            *top_k_metrics(keras.metrics.TopKCategoricalAccuracy),
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint_filepath = str(Path(folder, "checkpoint.weights.h5"))
        checkpoint_callback = keras.callbacks.ModelCheckpoint(
            checkpoint_filepath,
            monitor="val_accuracy",
            save_best_only=True,
            save_weights_only=True,
        )
        history = model.fit(
            x=random_images(SPLIT_EXAMPLES),
            y=one_hot_labels(SPLIT_EXAMPLES),
            batch_size=BATCH,
            epochs=EPOCHS,
            validation_split=0.1,
            callbacks=[checkpoint_callback],
            shuffle=False,
            verbose=0,
        )
        model.load_weights(checkpoint_filepath)
    test_images = random_images(TEST_EXAMPLES, seed=1)
    scores = model.evaluate(
        test_images,
        one_hot_labels(TEST_EXAMPLES, seed=1),
        verbose=0,
        return_dict=True,
    )
    return results(model, history, scores=scores)


# vision/convmixer


def activation_block(x):
    """BatchNormalization after the activation."""
    return layers.BatchNormalization()(layers.Activation("gelu")(x))


def conv_stem(x, filters: int, patch_size: int):
    """A convolution whose stride is its size."""
    options = {"strides": patch_size, "bias_initializer": nonzero_bias()}
    x = layers.Conv2D(filters, kernel_size=patch_size, **options)(x)
    return activation_block(x)


def conv_mixer_block(x, filters: int, kernel_size: int):
    """A depthwise convolution beside the input, then a pointwise one."""
    x0 = x
    options = {"padding": "same", "bias_initializer": nonzero_bias()}
    x = layers.DepthwiseConv2D(kernel_size=kernel_size, **options)(x)
    x = layers.Add()([activation_block(x), x0])
    x = layers.Conv2D(filters, kernel_size=1, bias_initializer=nonzero_bias())(x)
    return activation_block(x)


@published_program("vision/convmixer", "equal")
def train_convmixer(wrap: Wrap) -> Numbers:
    """Data sets that are mapped over batches; the best weights are loaded."""
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = conv_stem(layers.Rescaling(scale=1.0 / 2)(inputs), filters=4, patch_size=2)
    for _ in range(2):
        x = conv_mixer_block(x, filters=4, kernel_size=3)
    outputs = layers.Dense(CLASSES, activation="softmax")(layers.GlobalAvgPool2D()(x))
    model = wrap(keras.Model(inputs, outputs))
    model.compile(
        optimizer=sgd(0.02, weight_decay=0.0001),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    flip = keras.Sequential([layers.RandomFlip("horizontal")], name="data_augmentation")
    train = batched((random_images(EXAMPLES), random_labels(EXAMPLES)))
    train = train.map(lambda images, labels: (flip(images, training=True), labels)).prefetch(2)
    validation = batched((random_images(11, seed=1), random_labels(11, seed=1)))
    test = batched((random_images(TEST_EXAMPLES, seed=2), random_labels(TEST_EXAMPLES, seed=2)))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint_filepath = str(Path(folder, "checkpoint.weights.h5"))
        checkpoint_callback = keras.callbacks.ModelCheckpoint(
            checkpoint_filepath,
            monitor="val_accuracy",
            save_best_only=True,
            save_weights_only=True,
        )
        history = model.fit(
            train,
            validation_data=validation,
            epochs=EPOCHS,
            callbacks=[checkpoint_callback],
            verbose=0,
        )
        model.load_weights(checkpoint_filepath)
    loss, accuracy = model.evaluate(test, verbose=0)
    return results(model, history, scores={"loss": loss, "accuracy": accuracy})


# vision/siamese_contrastive


def make_pairs(count: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Pairs of images, of one class and of two in turn; and 1 for those of two classes."""
    random = np.random.default_rng(seed)
    images, labels = random_images(count, channels=1, seed=seed), random_labels(count, seed=seed)
    partners, differ = [], []
    for index in range(count):
        is_other = index % 2
        candidates = np.flatnonzero((labels != labels[index]) == bool(is_other))
        partners.append(random.choice(candidates))
        differ.append(is_other)
    return [images, images[partners]], np.array(differ, keras.config.floatx())


def euclidean_distance(vectors):
    """The distance of two embeddings, [batch, 1]."""
    x, y = vectors
    sum_square = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(sum_square, keras.backend.epsilon()))


def loss_of_margin(margin=1):
    """A function of labels and predictions that returns a mean over the batch."""

    def contrastive_loss(y_true, y_pred):
        square_pred = ops.square(y_pred)
        margin_square = ops.square(ops.maximum(margin - y_pred, 0))
        return ops.mean((1 - y_true) * square_pred + y_true * margin_square)

    return contrastive_loss


def make_contrastive_network() -> keras.Model:
    """One network, which is called twice, so that its BatchNormalization is updated twice."""
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1))
    x = layers.BatchNormalization()(image)
    x = layers.Conv2D(2, (3, 3), activation="tanh")(x)
    x = layers.AveragePooling2D(pool_size=(2, 2))(x)
    x = layers.Conv2D(3, (2, 2), activation="tanh")(x)
    x = layers.Flatten()(x)
    x = layers.BatchNormalization()(x)
    embedding_network = keras.Model(image, layers.Dense(4, activation="tanh")(x))
    inputs = [keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1)) for _ in range(2)]
    towers = [embedding_network(each) for each in inputs]
    distance = layers.Lambda(euclidean_distance, output_shape=(1,))(towers)
    normal = layers.BatchNormalization()(distance)
    return keras.Model(inputs=inputs, outputs=layers.Dense(1, activation="sigmoid")(normal))


@published_program("vision/siamese_contrastive", "equal")
def train_siamese_contrastive(wrap: Wrap) -> Numbers:
    """Lists of two arrays; the loss is a function that takes the mean itself."""
    model = make_contrastive_network()
    model.compile(loss=loss_of_margin(1), optimizer=sgd(0.05), metrics=["accuracy"])
    model = wrap(model)
    pairs, differ = make_pairs(EXAMPLES, seed=0)
    history = model.fit(
        pairs,
        differ,
        validation_data=make_pairs(TEST_EXAMPLES, seed=1),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    test_pairs, test_differ = make_pairs(TEST_EXAMPLES, seed=2)
    loss, accuracy = model.evaluate(test_pairs, test_differ, verbose=0)
    predictions = model.predict(test_pairs, verbose=0)
    scores = {"loss": loss, "accuracy": accuracy, "predictions": predictions}
    return results(model, history, scores=scores)


# vision/knowledge_distillation


class Distiller(keras.Model):
    """`call` is the student's; `compute_loss` calls the teacher, which is trained too."""

    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self,
        optimizer,
        metrics,
        student_loss_fn,
        distillation_loss_fn,
        alpha=0.1,
        temperature=3,
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        )
        distillation_loss *= self.temperature**2
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def make_classifier_of_size(filters: int, name: str) -> keras.Model:
    """Two convolutions."""
    return keras.Sequential(
        [
            keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1)),
            layers.Conv2D(filters, (3, 3), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.MaxPooling2D(pool_size=(2, 2), strides=(1, 1), padding="same"),
            layers.Conv2D(2 * filters, (3, 3), strides=(2, 2), padding="same"),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ],
        name=name,
    )


def compile_classifier(model: keras.Model) -> None:
    """Keras's loss and metric of classes."""
    model.compile(
        optimizer=sgd(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )


@published_program("vision/knowledge_distillation", "equal")
def train_knowledge_distillation(wrap: Wrap) -> Numbers:
    """The teacher is trained, then the student by it, then the student's clone without it."""
    teacher = make_classifier_of_size(3, "teacher")
    student = make_classifier_of_size(2, "student")
    student_scratch = keras.models.clone_model(student)
    images, labels = random_images(EXAMPLES, channels=1), random_labels(EXAMPLES)
    test_images = random_images(TEST_EXAMPLES, channels=1, seed=1)
    test_labels = random_labels(TEST_EXAMPLES, seed=1)
    numbers = {}

    def fit_and_evaluate(model, name):
        history = model.fit(
            images,
            labels,
            epochs=EPOCHS,
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
        )
        scores = model.evaluate(test_images, test_labels, verbose=0, return_dict=True)
        numbers.update(part_of_program(name, results(model, history, scores=scores)))

    teacher = wrap(teacher)
    compile_classifier(teacher)
    fit_and_evaluate(teacher, "teacher")
    distiller = wrap(Distiller(student=student, teacher=teacher))
    distiller.compile(
        optimizer=sgd(0.02),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=10,
    )
    fit_and_evaluate(distiller, "distiller")
    student_scratch = wrap(student_scratch)
    compile_classifier(student_scratch)
    fit_and_evaluate(student_scratch, "scratch")
    return numbers


# vision/mixup


def sample_beta_distribution(size, concentration_0=0.2, concentration_1=0.2):
    """Numbers that depend on nothing but how many there are."""
    dtype = keras.config.floatx()
    gamma_1 = tf.random.stateless_gamma([size], seed=(0, 1), alpha=concentration_1, dtype=dtype)
    gamma_2 = tf.random.stateless_gamma([size], seed=(0, 2), alpha=concentration_0, dtype=dtype)
    return gamma_1 / (gamma_1 + gamma_2)


def mix_up(batch_one, batch_two, alpha=0.2):
    """Weighted means of the images and labels of two batches."""
    images_one, labels_one = batch_one
    images_two, labels_two = batch_two
    batch_size = tf.shape(images_one)[0]
    weight = sample_beta_distribution(batch_size, alpha, alpha)
    weight_of_images = tf.reshape(weight, (batch_size, 1, 1, 1))
    weight_of_labels = tf.reshape(weight, (batch_size, 1))
    images = images_one * weight_of_images + images_two * (1 - weight_of_images)
    labels = labels_one * weight_of_labels + labels_two * (1 - weight_of_labels)
    return images, labels


def make_mixup_model() -> keras.Model:
    """Two convolutions and two dense layers."""
    return keras.Sequential(
        [
            keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1)),
            layers.Conv2D(2, (3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(3, (2, 2), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Dropout(0.0),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


@published_program("vision/mixup", "equal")
def train_mixup(wrap: Wrap) -> Numbers:
    """Data sets that are shuffled, batched, zipped and mixed; initial weights are loaded."""
    floatx = keras.config.floatx()
    arrays = (random_images(EXAMPLES, channels=1), one_hot_labels(EXAMPLES).astype(floatx))
    examples = tf.data.Dataset.from_tensor_slices(arrays)
    orders = [
        examples.shuffle(100, seed=seed, reshuffle_each_iteration=False)  # the same in both runs
        for seed in (1, 2)
    ]
    shuffled = [batch_dataset(order) for order in orders]
    mixed = zipped(*shuffled).map(lambda one, two: mix_up(one, two, alpha=0.2))
    held_out = [
        batched((random_images(count, channels=1, seed=count), one_hot_labels(count, seed=count)))
        for count in (11, TEST_EXAMPLES)
    ]
    validation, test = held_out
    numbers = {}
    with tempfile.TemporaryDirectory() as folder:
        initial_weights = str(Path(folder, "initial.weights.h5"))
        make_mixup_model().save_weights(initial_weights)
        for name, train in (("mixed", mixed), ("plain", shuffled[0])):
            model = wrap(make_mixup_model())
            model.load_weights(initial_weights)
            model.compile(
                loss="categorical_crossentropy",
                optimizer=sgd(0.1),
                metrics=["accuracy"],
            )
            history = model.fit(train, validation_data=validation, epochs=EPOCHS, verbose=0)
            loss, accuracy = model.evaluate(test, verbose=0)
            found = results(model, history, scores={"loss": loss, "accuracy": accuracy})
            numbers |= part_of_program(name, found)
    return numbers


# vision/super_resolution_sub_pixel

UPSCALE = 2


class DepthToSpace(layers.Layer):
    """Makes rows and columns of channels, with the batch size in its reshapes."""

    def __init__(self, block_size):
        super().__init__()
        self.block_size = block_size

    def call(self, inputs):
        block = self.block_size
        batch, height, width, depth = ops.shape(inputs)
        depth = depth // block**2
        x = ops.reshape(inputs, [batch, height, width, block, block, depth])
        x = ops.transpose(x, [0, 1, 3, 2, 4, 5])
        return ops.reshape(x, [batch, height * block, width * block, depth])


class ESPCNCallback(keras.callbacks.Callback):
    """Keeps what it finds in the logs of each batch of the evaluation, and predicts one image."""

    def __init__(self, test_image):
        super().__init__()
        self.test_image = test_image
        self.psnr_of_batches = []
        self.psnr_of_epochs = []
        self.predictions = []

    def on_epoch_begin(self, epoch, logs=None):
        self.psnr_of_batches = []

    def on_epoch_end(self, epoch, logs=None):
        self.psnr_of_epochs.append(np.mean(self.psnr_of_batches))
        self.predictions.append(self.model.predict(self.test_image[None], verbose=0))

    def on_test_batch_end(self, batch, logs=None):
        self.psnr_of_batches.append(10 * math.log10(1 / logs["loss"]))


def make_sub_pixel_network() -> keras.Model:
    """Three convolutions, whose channels become pixels."""
    size = IMAGE_SIZE // UPSCALE
    inputs = keras.Input((size, size, 1))
    options = {"kernel_initializer": "orthogonal", "padding": "same"}
    x = layers.Conv2D(4, 5, activation="relu", **options)(inputs)
    x = layers.Conv2D(3, 3, activation="relu", **options)(x)
    # Published with a relu, whose few channels here would all be 0.
    x = layers.Conv2D(UPSCALE**2, 3, **options)(x)
    return keras.Model(inputs, DepthToSpace(UPSCALE)(x))


def low_resolution_pairs(count: int, seed: int) -> tf.data.Dataset:
    """Batches of images; then each batch becomes small images, and the images."""
    size = IMAGE_SIZE // UPSCALE
    images = batched(random_images(count, channels=1, seed=seed))

    def small(batch):
        return tf.cast(tf.image.resize(batch, [size, size], method="area"), batch.dtype)

    return images.map(lambda batch: (small(batch), batch)).prefetch(2)


@published_program("vision/super_resolution_sub_pixel", "equal")
def train_super_resolution(wrap: Wrap) -> Numbers:
    """Three callbacks, one of which predicts an epoch's single image."""
    model = wrap(make_sub_pixel_network())
    validation = low_resolution_pairs(11, seed=1)
    test_image = next(iter(validation))[0][0].numpy()
    monitor = ESPCNCallback(test_image)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint_filepath = str(Path(folder, "checkpoint.weights.h5"))
        callbacks = [
            monitor,
            keras.callbacks.EarlyStopping(monitor="loss", patience=10),
            keras.callbacks.ModelCheckpoint(
                filepath=checkpoint_filepath,
                save_weights_only=True,
                monitor="loss",
                mode="min",
                save_best_only=True,
            ),
        ]
        model.compile(optimizer=sgd(0.05), loss=keras.losses.MeanSquaredError())
        history = model.fit(
            low_resolution_pairs(EXAMPLES, seed=0),
            epochs=EPOCHS,
            callbacks=callbacks,
            validation_data=validation,
            verbose=0,
        )
        model.load_weights(checkpoint_filepath)
    scores = {"psnr": monitor.psnr_of_epochs, "predictions": monitor.predictions}
    return results(model, history, scores=scores)


# vision/captcha_ocr

CAPTCHA_WIDTH = 16
CAPTCHA_HEIGHT = 4
CAPTCHA_LENGTH = 2
CHARACTERS = list("abcd")


def sparse_labels_of(labels, lengths):
    """The labels of each example up to its length, as a sparse tensor."""
    indices = tf.where(tf.sequence_mask(lengths, maxlen=tf.shape(labels)[1]))
    values = tf.cast(tf.gather_nd(labels, indices), tf.int32)
    return tf.SparseTensor(indices, values, tf.cast(tf.shape(labels), tf.int64))


def ctc_batch_cost(y_true, y_pred, input_length, label_length):
    """A cost for each example, [batch, 1], of TensorFlow's operation, which wants time first.

    In float64 too, the operation computes its gradient by functions of float32.
    """
    label_length = ops.cast(ops.squeeze(label_length, axis=-1), "int32")
    input_length = ops.cast(ops.squeeze(input_length, axis=-1), "int32")
    y_pred = ops.log(ops.transpose(y_pred, axes=[1, 0, 2]) + keras.backend.epsilon())
    cost = tf.compat.v1.nn.ctc_loss(
        inputs=y_pred,
        labels=sparse_labels_of(y_true, label_length),
        sequence_length=input_length,
    )
    return ops.expand_dims(cost, 1)


class CTCLayer(layers.Layer):
    """Adds the costs of the examples as a loss, which Keras sums."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = ctc_batch_cost

    def call(self, y_true, y_pred):
        ones = ops.ones(shape=(ops.shape(y_true)[0], 1), dtype="int64")
        input_length = ops.cast(ops.shape(y_pred)[1], dtype="int64") * ones
        label_length = ops.cast(ops.shape(y_true)[1], dtype="int64") * ones
        self.add_loss(self.loss_fn(y_true, y_pred, input_length, label_length))
        return y_pred


def make_ocr_model() -> keras.Model:
    """Convolutions and LSTMs; the labels are an input; no loss is compiled."""
    image = keras.Input((CAPTCHA_WIDTH, CAPTCHA_HEIGHT, 1), name="image")
    labels = keras.Input((None,), name="label")
    x = image
    for number in (1, 2):
        x = layers.Conv2D(
            2,
            (3, 3),
            activation="relu",
            kernel_initializer="he_normal",
            padding="same",
            name=f"Conv{number}",
        )(x)
        x = layers.MaxPooling2D((2, 2), name=f"pool{number}")(x)
    new_shape = (CAPTCHA_WIDTH // 4, (CAPTCHA_HEIGHT // 4) * 2)
    x = layers.Reshape(target_shape=new_shape, name="reshape")(x)
    x = layers.Dropout(0.0)(layers.Dense(4, activation="relu", name="dense1")(x))
    x = layers.Bidirectional(layers.LSTM(3, return_sequences=True, dropout=0.0))(x)
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True, dropout=0.0))(x)
    x = layers.Dense(len(CHARACTERS) + 2, activation="softmax", name="dense2")(x)
    output = CTCLayer(name="ctc_loss")(labels, x)
    model = keras.Model(inputs=[image, labels], outputs=output, name="ocr_model_v1")
    model.compile(optimizer=sgd(0.01))
    return model


def captcha_data(count: int, seed: int) -> tf.data.Dataset:
    """Dicts of an image and the numbers of the characters of a text."""
    random = np.random.default_rng(seed)
    texts = ["".join(random.choice(CHARACTERS, CAPTCHA_LENGTH)) for _ in range(count)]
    images = random_array(count, CAPTCHA_HEIGHT, CAPTCHA_WIDTH, 1, seed=seed)
    character_number = layers.StringLookup(vocabulary=CHARACTERS, mask_token=None)

    def encode_single_sample(image, text):
        image = ops.transpose(image, axes=[1, 0, 2])
        label = character_number(tf.strings.unicode_split(text, input_encoding="UTF-8"))
        return {"image": image, "label": label}

    pairs = tf.data.Dataset.from_tensor_slices((images, texts))
    return batch_dataset(pairs.map(encode_single_sample))


@published_program("vision/captcha_ocr", "equal")
def train_captcha_ocr(wrap: Wrap) -> Numbers:
    """The last batch has three examples, and in a second training one."""
    numbers = {}
    for last, count in (("three", EXAMPLES), ("one", EXAMPLES - 2)):
        model = wrap(make_ocr_model())
        early_stopping = keras.callbacks.EarlyStopping(
            monitor="val_loss",
            patience=10,
            restore_best_weights=True,
        )
        history = model.fit(
            captcha_data(count, seed=0),
            validation_data=captcha_data(TEST_EXAMPLES, seed=1),
            epochs=EPOCHS,
            callbacks=[early_stopping],
            verbose=0,
        )
        prediction_model = keras.Model(model.input[0], model.get_layer(name="dense2").output)
        batch = next(iter(captcha_data(TEST_EXAMPLES, seed=1)))
        predictions = prediction_model.predict(batch["image"], verbose=0)
        found = results(model, history, scores={"predictions": predictions})
        numbers |= part_of_program(last, found)
    return numbers


# vision/oxford_pets_image_segmentation


def make_u_net() -> keras.Model:
    """Separable and transposed convolutions, each before BatchNormalization, beside residuals."""
    biased = {"padding": "same", "bias_initializer": nonzero_bias()}

    def normalization():
        return layers.BatchNormalization(beta_initializer=nonzero_bias())

    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.Conv2D(2, 3, strides=2, **biased)(inputs)
    x = layers.Activation("relu")(normalization()(x))
    previous = x
    for filters in (3, 4):
        for _ in range(2):
            x = layers.Activation("relu")(x)
            x = layers.SeparableConv2D(filters, 3, **biased)(x)
            x = normalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(filters, 1, strides=2, padding="same")(previous)
        x = layers.add([x, residual])
        previous = x
    for filters in (4, 3, 2):
        for _ in range(2):
            x = layers.Activation("relu")(x)
            x = layers.Conv2DTranspose(filters, 3, **biased)(x)
            x = normalization()(x)
        x = layers.UpSampling2D(2)(x)
        residual = layers.Conv2D(filters, 1, padding="same")(layers.UpSampling2D(2)(previous))
        x = layers.add([x, residual])
        previous = x
    outputs = layers.Conv2D(CLASSES, 3, activation="softmax", padding="same")(x)
    return keras.Model(inputs, outputs)


def segmentation_data(count: int, seed: int) -> tf.data.Dataset:
    """Images with a class for each pixel, from 1 on, of which 1 is taken in the data set."""
    random = np.random.default_rng(seed)
    classes = random.integers(1, CLASSES + 1, (count, IMAGE_SIZE, IMAGE_SIZE, 1)).astype("uint8")
    pairs = tf.data.Dataset.from_tensor_slices((random_images(count, seed=seed), classes))
    return batch_dataset(pairs.map(lambda image, target: (image, target - 1)))


@published_program("vision/oxford_pets_image_segmentation", "equal")
def train_image_segmentation(wrap: Wrap) -> Numbers:
    """A loss by name of a class for each pixel; the best model is saved."""
    model = make_u_net()
    model.compile(optimizer=sgd(0.02), loss="sparse_categorical_crossentropy")
    model = wrap(model)
    validation = segmentation_data(TEST_EXAMPLES, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "oxford_segmentation.keras"))
        history = model.fit(
            segmentation_data(EXAMPLES, seed=0),
            epochs=EPOCHS,
            validation_data=validation,
            callbacks=[keras.callbacks.ModelCheckpoint(path, save_best_only=True)],
            verbose=0,
        )
    scores = {"predictions": model.predict(validation, verbose=0)}
    return results(model, history, scores=scores)


# vision/conv_lstm


def shifted_frames(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Films without their last frame, and without their first."""
    films = random_array(count, 4, IMAGE_SIZE, IMAGE_SIZE, 1, seed=seed)
    return films[:, :-1], films[:, 1:]


@published_program("vision/conv_lstm", "equal")
def train_conv_lstm(wrap: Wrap) -> Numbers:
    """Sequences of images of no fixed length; the learning rate is reduced by a callback."""
    films = keras.Input((None, IMAGE_SIZE, IMAGE_SIZE, 1))
    x = films
    for kernel_size in (5, 3, 1):
        if kernel_size < 5:
            x = layers.BatchNormalization()(x)
        x = layers.ConvLSTM2D(
            filters=2,
            kernel_size=kernel_size,
            padding="same",
            return_sequences=True,
            activation="relu",
        )(x)
    x = layers.Conv3D(1, kernel_size=3, activation="sigmoid", padding="same")(x)
    model = wrap(keras.Model(films, x))
    model.compile(loss=keras.losses.binary_crossentropy, optimizer=sgd(0.05))
    x_train, y_train = shifted_frames(EXAMPLES, seed=0)
    history = model.fit(
        x_train,
        y_train,
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_data=shifted_frames(TEST_EXAMPLES, seed=1),
        callbacks=[
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=10),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=5),
        ],
        shuffle=False,
        verbose=0,
    )
    example = shifted_frames(TEST_EXAMPLES, seed=1)[0][0]
    prediction = model.predict(np.expand_dims(example, axis=0), verbose=0)
    return results(model, history, scores={"prediction": prediction})


# vision/supervised-contrastive-learning


def npairs_loss(y_true, y_pred):
    """The crossentropy of similarities to all examples, of which those of the same class count."""
    y_true = tf.expand_dims(tf.cast(y_true, y_pred.dtype), -1)
    y_true = tf.cast(tf.equal(y_true, tf.transpose(y_true)), y_pred.dtype)
    y_true /= tf.reduce_sum(y_true, 1, keepdims=True)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y_true, y_pred))


class SupervisedContrastiveLoss(keras.losses.Loss):
    """Compares each example with all of the batch, in `__call__`."""

    def __init__(self, temperature=1, name=None):
        super().__init__(name=name)
        self.temperature = temperature

    def __call__(self, labels, feature_vectors, sample_weight=None):
        normalized = tf.math.l2_normalize(feature_vectors, axis=1)
        logits = tf.matmul(normalized, normalized, transpose_b=True) / self.temperature
        return npairs_loss(tf.squeeze(labels), logits)


def make_contrastive_encoder(images: np.ndarray) -> keras.Model:
    """Augmentation with an adapted `Normalization`, and convolutions in place of a ResNet."""
    augmentation = keras.Sequential(
        [
            layers.Normalization(),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(0.0, 0.0),  # for RandomRotation, which fails in float64
        ]
    )
    augmentation.layers[0].adapt(images)
    image = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.Conv2D(3, 3, strides=2, use_bias=False)(image)
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    resnet = keras.Model(image, layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(x)))
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    return keras.Model(inputs=inputs, outputs=resnet(augmentation(inputs)))


def make_classifier_of_encoder(encoder: keras.Model, trainable: bool = True) -> keras.Model:
    """Dense layers after an encoder whose layers are trained or not."""
    for layer in encoder.layers:
        layer.trainable = trainable
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    features = layers.Dropout(0.0)(encoder(inputs))
    features = layers.Dropout(0.0)(layers.Dense(5, activation="relu")(features))
    outputs = layers.Dense(CLASSES, activation="softmax")(features)
    model = keras.Model(inputs=inputs, outputs=outputs)
    model.compile(
        optimizer=sgd(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


@published_program("vision/supervised-contrastive-learning", "equal")
def train_supervised_contrastive(wrap: Wrap) -> Numbers:
    """A classifier; an encoder by a loss that compares examples; a classifier of that encoder."""
    images, labels = random_images(EXAMPLES), random_labels(EXAMPLES)[:, None]
    test_images = random_images(TEST_EXAMPLES, seed=1)
    test_labels = random_labels(TEST_EXAMPLES, seed=1)[:, None]
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}

    def fit_and_evaluate(classifier):
        classifier = wrap(classifier)
        history = classifier.fit(x=images, y=labels, **options)
        scores = classifier.evaluate(test_images, test_labels, verbose=0, return_dict=True)
        return results(classifier, history, scores=scores)

    encoder = make_contrastive_encoder(images)
    numbers = part_of_program("baseline", fit_and_evaluate(make_classifier_of_encoder(encoder)))

    encoder = make_contrastive_encoder(images)
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    projected = layers.Dense(4, activation="relu", bias_initializer="ones")(encoder(inputs))
    with_projection_head = wrap(keras.Model(inputs=inputs, outputs=projected))
    with_projection_head.compile(optimizer=sgd(0.01), loss=SupervisedContrastiveLoss(0.5))
    history = with_projection_head.fit(x=images, y=labels, **options)
    numbers |= part_of_program("encoder", results(with_projection_head, history))

    classifier = make_classifier_of_encoder(encoder, trainable=False)
    return numbers | part_of_program("classifier", fit_and_evaluate(classifier))
