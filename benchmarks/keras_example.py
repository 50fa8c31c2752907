# SPDX-License-Identifier: Apache-2.0
"""The yardstick: the pipeline of Keras's published example, reimplemented.

https://keras.io/examples/nlp/data_parallel_training_with_keras_nlp: every line of more than 100 characters, in batches
whose order is cached, goes through KerasHub's preprocessor inside `fit`, which pads it to 512 tokens and masks it on
the fly in 96 slots; AdamW with Keras's settings and a constant rate. It runs on one device, since with its boolean
padding mask `fit` fails under a strategy (docs/keras-under-tf-distribute.md).
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import tensorflow as tf

from benchmarks.clock import WARM, Clock
from common.data.corpora import open_corpus
from common.data.vocabulary import load_wordpieces
from common.model.sizes import dimensions

SHORTEST_LINE = 100  # characters; lines that are not longer are left out
SEQ_LENGTH, SLOTS = 512, 96  # tokens, and the most of them that are masked


def lines(corpus: str, batch_size: int) -> tf.data.Dataset:
    """Batches of the example's lines."""
    texts = (line for document in open_corpus(corpus).splits["train"]() for line in document.splitlines())
    kept = tf.data.Dataset.from_tensor_slices([line for line in texts if len(line) > SHORTEST_LINE])
    # The cache keeps the first epoch's order for ever in the example too; the seed lets tokens be counted beforehand.
    shuffled = kept.shuffle(500, seed=0, reshuffle_each_iteration=False)
    return shuffled.batch(batch_size).cache().prefetch(tf.data.AUTOTUNE)


def build(model: str, vocabulary: str, dropout: float, rate: float) -> keras_hub.models.BertMaskedLM:
    """The example's model, with random weights and a constant learning rate."""
    tokenizer = load_wordpieces(vocabulary)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        **dimensions(model),
        dropout=dropout,
        max_sequence_length=SEQ_LENGTH,
    )
    backbone.get_layer("pooled_dense").trainable = False
    preprocessor = keras_hub.models.BertMaskedLMPreprocessor(
        tokenizer, sequence_length=SEQ_LENGTH, mask_selection_length=SLOTS
    )
    task = keras_hub.models.BertMaskedLM(backbone, preprocessor=preprocessor)
    task.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.AdamW(learning_rate=rate),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
        jit_compile=False,
    )
    return task


def trainer(model: str, corpus: str, vocabulary: str, dropout: float, batch_size: int) -> Callable[..., dict[str, Any]]:
    """A function that trains some steps and times them; see `benchmarks.workers`."""
    task, data = build(model, vocabulary, dropout, 2e-4), lines(corpus, batch_size)
    batches, done = list(data), 0

    @functools.cache
    def tokens_in(batch: int) -> int:
        return int(tf.math.count_nonzero(task.preprocessor(batches[batch])[0]["padding_mask"]))

    def run(steps: int) -> dict[str, Any]:
        nonlocal done
        first, done = done, done + WARM + steps
        numbers = [(first + step) % len(batches) for step in range(WARM + steps)]
        tokens = [tokens_in(number) for number in numbers]  # before the clock starts
        clock = Clock()
        order = data.repeat().skip(first % len(batches))
        task.fit(order, steps_per_epoch=WARM + steps, callbacks=[clock], verbose=0)
        return {"steps": steps, "seconds": clock.seconds, "tokens": sum(tokens[WARM:])}

    return run
