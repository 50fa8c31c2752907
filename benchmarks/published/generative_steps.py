# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the methods are Keras's, or do what their names say
"""Programs of keras.io's folder generative that have a `train_step`."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.published.programs import (
    BATCH,
    EPOCHS,
    EXAMPLES,
    IMAGE_SIZE,
    Numbers,
    Wrap,
    batched,
    nonzero_bias,
    published_program,
    random_array,
    random_images,
    results,
    sgd,
    zipped,
)

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


@published_program("generative/vae", "equal")
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


@published_program("generative/dcgan_overriding_train_step", "equal")
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


@published_program("generative/wgan_gp", "equal")
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


@keras.saving.register_keras_serializable(package="published")
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


@published_program("generative/ddim", "may be refused")
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


@published_program("generative/gan_ada", "warned")
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


@published_program("generative/real_nvp", "equal")
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


@published_program("generative/vq_vae", "equal")
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


@published_program("generative/cyclegan", "equal")
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


@published_program("generative/wgan-graphs", "equal")
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
