# SPDX-License-Identifier: Apache-2.0
"""Times the first step of `fit`, most of which TensorFlow spends on tracing, by kind of model.

Each model is trained by this library on two replicas, by plain Keras in the same strategy, and by
plain Keras on one device. `python -m benchmarks waits` measures and shows them.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.workers import once

OURS = "ours, 2 replicas"
KERAS = "Keras, 2 replicas"
ONE_DEVICE = "Keras, one device"
WAYS = (OURS, KERAS, ONE_DEVICE)
APPLICATIONS = ("MobileNetV2", "ResNet50", "EfficientNetB0", "DenseNet121")  # of keras.applications
MODELS = ("dense", *APPLICATIONS, "BERT classifier", "GAN")
CLASSES = 10
BATCH_SIZE = 16  # examples per step on all replicas; two replicas divide it evenly, as Keras needs
BATCHES = 3
IMAGE = (64, 64, 3)
SEQUENCE_LENGTH = 32  # tokens
VOCABULARY_SIZE = 1000


class ModelAndData(NamedTuple):
    """A compiled model, and the arrays that `fit` takes; y is None for the GAN."""

    model: Any
    x: Any
    y: Any


def measure(models: Sequence[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of each round, by model and way. Each is measured in a new process."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for model in models:
        seconds[model] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for model in models:
            for way in WAYS:
                options = {"name": model, "way": way}
                found = once("benchmarks.first_steps:make_first_step", options)
                seconds[model][way].append(round(found["seconds"], 2))
            print(model, seconds[model], file=sys.stderr, flush=True)
    return seconds


def table(results: dict[str, Any]) -> str:
    """Returns the results in Markdown: medians, and the ratio of those on two replicas."""
    titles = ["model", *WAYS, "ours / Keras, 2 replicas"]
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for model, rounds in results["seconds"].items():
        medians = {way: statistics.median(rounds[way]) for way in WAYS}
        cells = [model, *(f"{medians[way]:.1f} s" for way in WAYS)]
        cells.append(f"{medians[OURS] / medians[KERAS]:.2f} x")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def make_first_step(name: str, way: str) -> Callable[[], dict[str, float]]:
    """Builds a model, and returns a function that calls `fit` and times its first step."""
    import keras
    import numpy as np

    import keras_replicas as kr

    keras.utils.set_random_seed(0)
    scope = contextlib.nullcontext() if way == ONE_DEVICE else kr.make_strategy(2).scope()
    with scope:
        model, x, y = build(name)
        if way == OURS:
            model = kr.data_parallel(model)

    class FirstStep(keras.callbacks.Callback):
        ended = 0.0

        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                for value in (logs or {}).values():
                    np.asarray(value)  # waits for the step
                self.ended = time.perf_counter()

    def first_step() -> dict[str, float]:
        clock = FirstStep()
        began = time.perf_counter()
        model.fit(x, y, batch_size=BATCH_SIZE, callbacks=[clock], verbose=0)
        return {"seconds": clock.ended - began}

    return first_step


def build(name: str) -> ModelAndData:
    """Builds one of `MODELS` with random weights and makes its data. Call it in the scope."""
    import keras
    import numpy as np

    random = np.random.default_rng(0)
    examples = BATCH_SIZE * BATCHES
    images = random.normal(size=(examples, *IMAGE)).astype("float32")
    labels = random.integers(0, CLASSES, examples)
    if name == "GAN":
        return ModelAndData(build_gan(), images, None)
    if name == "BERT classifier":
        model = build_bert_classifier()
        ids = random.integers(1, VOCABULARY_SIZE, (examples, SEQUENCE_LENGTH))
        x = {
            "token_ids": ids,
            "segment_ids": np.zeros_like(ids),
            "padding_mask": np.ones_like(ids),
        }
    elif name == "dense":
        hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
        layers = [keras.Input((32,)), *hidden, keras.layers.Dense(CLASSES)]
        model = keras.Sequential(layers)
        x = random.normal(size=(examples, 32)).astype("float32")
    else:
        application = getattr(keras.applications, name)
        model = application(
            weights=None,
            input_shape=IMAGE,
            classes=CLASSES,
            classifier_activation=None,
        )
        x = images
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return ModelAndData(model, x, labels)


def build_bert_classifier() -> Any:
    """Builds KerasHub's classifier on a BERT of four layers."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=VOCABULARY_SIZE,
        num_layers=4,
        num_heads=4,
        hidden_dim=256,
        intermediate_dim=1024,
        max_sequence_length=SEQUENCE_LENGTH,
    )
    return keras_hub.models.BertTextClassifier(backbone, num_classes=CLASSES, preprocessor=None)


def build_gan() -> Any:
    """Builds a compiled generative adversarial network, whose `train_step` is its own.

    The step is that of Keras's example "DCGAN to generate face images", with a loss that is divided
    by the number of replicas, as a custom step under a strategy needs.
    """
    import keras
    import tensorflow as tf
    from keras import layers

    noise_size = 64
    discriminator = keras.Sequential(
        [
            keras.Input(IMAGE),
            layers.Conv2D(32, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(64, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [
            keras.Input((noise_size,)),
            layers.Dense(16 * 16 * 64),
            layers.Reshape((16, 16, 64)),
            layers.Conv2DTranspose(64, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2DTranspose(32, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(3, 5, padding="same", activation="tanh"),
        ]
    )
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    class GAN(keras.Model):
        def __init__(self):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator
            self.built = True  # its layers are; Keras asks under a strategy, where there is no `call`

        def compile(self, discriminator_optimizer, generator_optimizer, **options):
            super().compile(**options)
            self.discriminator_optimizer = discriminator_optimizer
            self.generator_optimizer = generator_optimizer
            discriminator_optimizer.build(discriminator.trainable_variables)
            generator_optimizer.build(generator.trainable_variables)

        def train_step(self, data):
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            images, *_ = keras.utils.unpack_x_y_sample_weight(data)
            noise = tf.random.normal([tf.shape(images)[0], noise_size])
            with tf.GradientTape() as tape:
                real = discriminator(images, training=True)
                fake = discriminator(generator(noise, training=True), training=True)
                real_loss = cross_entropy(tf.ones_like(real), real)
                fake_loss = cross_entropy(tf.zeros_like(fake), fake)
                discriminator_loss = (real_loss + fake_loss) / replicas
            weights = discriminator.trainable_variables
            gradients = tape.gradient(discriminator_loss, weights)
            self.discriminator_optimizer.apply_gradients(zip(gradients, weights, strict=True))
            with tf.GradientTape() as tape:
                fake = discriminator(generator(noise, training=True), training=True)
                generator_loss = cross_entropy(tf.ones_like(fake), fake) / replicas
            weights = generator.trainable_variables
            gradients = tape.gradient(generator_loss, weights)
            self.generator_optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {
                "discriminator_loss": discriminator_loss * replicas,
                "generator_loss": generator_loss * replicas,
            }

    model = GAN()
    model.compile(keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4), jit_compile=False)
    return model
