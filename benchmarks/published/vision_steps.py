# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the methods are Keras's, or do what their names say
"""Programs of keras.io's folder vision that have a `train_step`."""

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
    random_images,
    random_labels,
    results,
    sgd,
    zipped,
)

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


@published_program("vision/siamese_network", "equal")
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


@published_program("vision/consistency_training", "equal")
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


@published_program("vision/masked_image_modeling", "equal")
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


@published_program("vision/nnclr", "may be refused")
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


@published_program("vision/semisupervised_simclr", "warned")
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


@published_program("vision/metric_learning", "may be refused")
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


@published_program("vision/semantic_image_clustering", "warned")
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


@published_program("vision/zero_dce", "equal")
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


@published_program("vision/barlow_twins", "warned")
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


@published_program("vision/adamatch", "warned")
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
