# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the methods are Keras's, or do what their names say
"""Programs of keras.io's folders nlp and timeseries without a `train_step` of their own."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from keras import layers, ops

from benchmarks.features import no_autotune
from benchmarks.published.programs import (
    BATCH,
    CLASSES,
    EPOCHS,
    EXAMPLES,
    Numbers,
    Wrap,
    batched,
    binary_labels,
    fit_arrays,
    nonzero_bias,
    prefixed,
    published_program,
    random_array,
    random_labels,
    results,
    sgd,
    zipped,
)

VALIDATION_EXAMPLES = 13
VOCABULARY = 12  # 0 is padding
LENGTH = 6
EMBEDDING = 4
HEADS = 2
UNITS = 3
WORDS = ["a", "bad", "dull", "film", "good", "great", "it", "plot", "saw", "was"]


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    """Sequences of token ids [count, LENGTH], which are padded at the front."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, VOCABULARY, (count, LENGTH))
    lengths = random.integers(2, LENGTH + 1, (count, 1))
    return np.where(np.arange(LENGTH) >= LENGTH - lengths, tokens, 0)


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of two to six words."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, LENGTH + 1, count)
    return [" ".join(random.choice(WORDS, length)) for length in lengths]


def reviews(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and binary labels."""
    return random_tokens(count, seed), binary_labels(count, seed)


# nlp/text_classification_with_transformer


def feed_forward_network(ff_dim: int, embed_dim: int) -> keras.Sequential:
    """Two dense layers."""
    return keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])


class TransformerBlock(layers.Layer):
    """Attention and a feed-forward network, which may be a mixture of experts."""

    def __init__(self, embed_dim, num_heads, ffn, rate=0.0):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = ffn
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs):
        attention = self.dropout1(self.att(inputs, inputs))
        x = self.layernorm1(inputs + attention)
        hidden = self.dropout2(self.ffn(x))
        return self.layernorm2(x + hidden)


class TokenAndPositionEmbedding(layers.Layer):
    """Embeddings of tokens and of positions."""

    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        positions = ops.arange(start=0, stop=ops.shape(x)[-1], step=1)
        return self.token_emb(x) + self.pos_emb(positions)


def make_classifier(ffn: layers.Layer) -> keras.Model:
    """One block of a transformer, pooled for two classes."""
    inputs = keras.Input((LENGTH,))
    x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, EMBEDDING)(inputs)
    x = TransformerBlock(EMBEDDING, HEADS, ffn)(x)
    x = layers.Dropout(0.0)(layers.GlobalAveragePooling1D()(x))
    x = layers.Dropout(0.0)(layers.Dense(6, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(2, activation="softmax")(x))


@published_program("nlp/text_classification_with_transformer", "equal")
def train_transformer_classifier(wrap: Wrap) -> Numbers:
    """Layers within layers; rows of embeddings repeat."""
    model = make_classifier(feed_forward_network(5, EMBEDDING))
    model.compile(
        optimizer=sgd(0.1),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model = wrap(model)
    validation = reviews(VALIDATION_EXAMPLES, seed=1)
    history = fit_arrays(model, *reviews(EXAMPLES), validation_data=validation)
    return results(model, history)


# nlp/text_classification_with_switch_transformer

EXPERTS = 2
TOKENS_PER_BATCH = BATCH * LENGTH


def load_balanced_loss(router_probs, expert_mask):
    """A product of two means over the batch's tokens."""
    num_experts = ops.shape(expert_mask)[-1]
    density = ops.mean(expert_mask, axis=0)
    density_proxy = ops.mean(router_probs, axis=0)
    return ops.mean(density_proxy * density) * ops.cast(num_experts**2, density.dtype)


class Router(layers.Layer):
    """Sends each token to one expert, unless that has had as many as it takes."""

    def __init__(self, num_experts, expert_capacity):
        super().__init__()
        self.num_experts = num_experts
        self.route = layers.Dense(units=num_experts)
        self.expert_capacity = expert_capacity

    def call(self, inputs, training=False):
        logits = self.route(inputs)
        if training:
            logits += keras.random.uniform(shape=logits.shape, minval=0.9, maxval=1.1)
        probabilities = keras.activations.softmax(logits, axis=-1)
        gate, index = ops.top_k(probabilities, k=1)
        mask = ops.one_hot(index, self.num_experts)
        self.add_loss(load_balanced_loss(probabilities, mask))
        position = ops.cast(ops.cumsum(mask, axis=0) * mask, "int32")
        mask *= ops.cast(ops.less(position, self.expert_capacity), mask.dtype)
        kept = ops.sum(mask, axis=-1)
        chosen = ops.squeeze(ops.one_hot(index, self.num_experts), 1)
        place = ops.squeeze(ops.one_hot(position, self.expert_capacity), 1)
        combined = ops.expand_dims(gate * kept * chosen, -1) * place
        return ops.cast(combined, keras.config.floatx()), combined


class Switch(layers.Layer):
    """Experts, whose tokens are counted with a constant batch size."""

    def __init__(self, num_experts, embed_dim, num_tokens_per_batch):
        super().__init__()
        self.num_experts = num_experts
        self.embed_dim = embed_dim
        self.experts = [feed_forward_network(embed_dim, embed_dim) for _ in range(num_experts)]
        self.expert_capacity = num_tokens_per_batch // num_experts
        self.router = Router(num_experts, self.expert_capacity)

    def call(self, inputs):
        batch_size = ops.shape(inputs)[0]
        num_tokens_per_example = ops.shape(inputs)[1]
        inputs = ops.reshape(inputs, [TOKENS_PER_BATCH, self.embed_dim])
        dispatch, combine = self.router(inputs)
        to_experts = ops.einsum("ab,acd->cdb", inputs, dispatch)
        shape = [self.num_experts, self.expert_capacity, self.embed_dim]
        expert_inputs = ops.unstack(ops.reshape(to_experts, shape), axis=0)
        found = [self.experts[idx](each) for idx, each in enumerate(expert_inputs)]
        outputs = ops.einsum("abc,xba->xc", ops.stack(found, axis=1), combine)
        return ops.reshape(outputs, [batch_size, num_tokens_per_example, self.embed_dim])


@published_program("nlp/text_classification_with_switch_transformer", "may be refused")
def train_switch_transformer(wrap: Wrap) -> Numbers:
    """A constant number of tokens in a batch, so that no batch is shorter than the others."""
    model = make_classifier(Switch(EXPERTS, EMBEDDING, TOKENS_PER_BATCH))
    model.compile(
        optimizer=sgd(0.1),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model = wrap(model)
    validation = reviews(2 * BATCH, seed=1)
    history = fit_arrays(model, *reviews(3 * BATCH), validation_data=validation)
    return results(model, history)


# nlp/neural_machine_translation_with_transformer


class TransformerEncoder(layers.Layer):
    """Attention to the tokens that are no padding."""

    def __init__(self, embed_dim, dense_dim, num_heads):
        super().__init__()
        self.attention = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.dense_proj = feed_forward_network(dense_dim, embed_dim)
        self.layernorm_1 = layers.LayerNormalization()
        self.layernorm_2 = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        padding_mask = None if mask is None else ops.cast(mask[:, None, :], dtype="int32")
        attention = self.attention(
            query=inputs,
            value=inputs,
            key=inputs,
            attention_mask=padding_mask,
        )
        x = self.layernorm_1(inputs + attention)
        return self.layernorm_2(x + self.dense_proj(x))


class PositionalEmbedding(TokenAndPositionEmbedding):
    """Computes the mask of the tokens that are no padding."""

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)


class TransformerDecoder(layers.Layer):
    """Causal attention, and attention to the encoder's outputs; gets two masks."""

    def __init__(self, embed_dim, latent_dim, num_heads):
        super().__init__()
        self.attention_1 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.attention_2 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.dense_proj = feed_forward_network(latent_dim, embed_dim)
        self.layernorm_1 = layers.LayerNormalization()
        self.layernorm_2 = layers.LayerNormalization()
        self.layernorm_3 = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        inputs, encoder_outputs = inputs
        inputs_mask, encoder_mask = (None, None) if mask is None else mask
        attention = self.attention_1(
            query=inputs,
            value=inputs,
            key=inputs,
            attention_mask=self.causal_attention_mask(inputs),
            query_mask=inputs_mask,
        )
        x = self.layernorm_1(inputs + attention)
        attention = self.attention_2(
            query=x,
            value=encoder_outputs,
            key=encoder_outputs,
            query_mask=inputs_mask,
            key_mask=encoder_mask,
        )
        x = self.layernorm_2(x + attention)
        return self.layernorm_3(x + self.dense_proj(x))

    def causal_attention_mask(self, inputs):
        batch_size, length = ops.shape(inputs)[0], ops.shape(inputs)[1]
        mask = ops.cast(ops.arange(length)[:, None] >= ops.arange(length), dtype="int32")
        return ops.tile(ops.reshape(mask, (1, length, length)), (batch_size, 1, 1))


def translations(count: int, seed: int) -> tf.data.Dataset:
    """Texts in two languages with as many words."""
    texts = random_texts(count, seed)
    return batched((texts, [f"[start] {text.upper()} [end]" for text in texts]))


def make_vectorizations() -> tuple[layers.TextVectorization, layers.TextVectorization]:
    """Layers that make token ids of texts; targets have one token more."""
    eng_vectorization = layers.TextVectorization(VOCABULARY, output_sequence_length=LENGTH)
    spa_vectorization = layers.TextVectorization(
        VOCABULARY,
        output_sequence_length=LENGTH + 1,
        standardize=lambda text: tf.strings.lower(text),
    )
    texts = translations(EXAMPLES, seed=0)
    eng_vectorization.adapt(texts.map(lambda eng, spa: eng))
    spa_vectorization.adapt(texts.map(lambda eng, spa: spa))
    return eng_vectorization, spa_vectorization


def make_translator() -> keras.Model:
    """A decoder that is a model of its own, on an encoder."""
    encoder_inputs = keras.Input((None,), dtype="int64", name="encoder_inputs")
    x = PositionalEmbedding(LENGTH, VOCABULARY, EMBEDDING)(encoder_inputs)
    encoder_outputs = TransformerEncoder(EMBEDDING, 5, HEADS)(x)
    decoder_inputs = keras.Input((None,), dtype="int64", name="decoder_inputs")
    states = keras.Input((None, EMBEDDING), name="decoder_state_inputs")
    x = PositionalEmbedding(LENGTH, VOCABULARY, EMBEDDING)(decoder_inputs)
    x = layers.Dropout(0.0)(TransformerDecoder(EMBEDDING, 5, HEADS)([x, states]))
    x = layers.Dense(VOCABULARY, activation="softmax")(x)
    decoder = keras.Model([decoder_inputs, states], x)
    inputs = {"encoder_inputs": encoder_inputs, "decoder_inputs": decoder_inputs}
    return keras.Model(inputs, decoder([decoder_inputs, encoder_outputs]), name="transformer")


@published_program("nlp/neural_machine_translation_with_transformer", "equal")
def train_translator(wrap: Wrap) -> Numbers:
    """Dicts of inputs, masks that layers compute, and a class that the loss ignores."""
    eng_vectorization, spa_vectorization = make_vectorizations()

    def format_dataset(eng, spa):
        eng, spa = eng_vectorization(eng), spa_vectorization(spa)
        return {"encoder_inputs": eng, "decoder_inputs": spa[:, :-1]}, spa[:, 1:]

    data = translations(EXAMPLES, seed=0).map(format_dataset).prefetch(16).cache()
    validation = translations(VALIDATION_EXAMPLES, seed=1).map(format_dataset)
    model = make_translator()
    model.compile(
        sgd(0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
        metrics=["accuracy"],
    )
    model = wrap(model)
    history = model.fit(data, epochs=EPOCHS, validation_data=validation, verbose=0)
    return results(model, history)


# nlp/masked_language_modeling

MASK = VOCABULARY - 1


def made_outside_of_the_scope(make: Callable[[], Any]) -> Any:
    """Calls a function in another thread, to which this thread's strategy scope does not reach."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(make).result()


def masked_language_model_class() -> type[keras.Model]:
    """A class that uses a loss and a tracker which the published program makes at module level."""
    loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
    loss_tracker = made_outside_of_the_scope(lambda: keras.metrics.Mean(name="loss"))

    class MaskedLanguageModel(keras.Model):
        """Minimises a sum over the batch's tokens, and reports a mean."""

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            loss = loss_fn(y, y_pred, sample_weight)
            loss_tracker.update_state(loss, sample_weight=sample_weight)
            return ops.sum(loss)

        def compute_metrics(self, x, y, y_pred, sample_weight):
            return {"loss": loss_tracker.result()}

        @property
        def metrics(self):
            return [loss_tracker]

    return MaskedLanguageModel


def masked_tokens(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids with masks, the token ids, and weights that are 0 where there is no mask."""
    labels = random_tokens(count) % MASK
    is_masked = (np.random.default_rng(2).uniform(size=labels.shape) < 0.3) & (labels > 0)
    return np.where(is_masked, MASK, labels), labels, is_masked.astype(keras.config.floatx())


def make_masked_language_model(model_class: type[keras.Model]) -> keras.Model:
    """A small BERT."""
    inputs = keras.Input((LENGTH,), dtype="int64")
    x = layers.Embedding(VOCABULARY, EMBEDDING, name="word_embedding")(inputs)
    x = x + keras_hub.layers.PositionEmbedding(sequence_length=LENGTH)(x)
    attention = layers.MultiHeadAttention(num_heads=HEADS, key_dim=EMBEDDING // HEADS)(x, x, x)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.0)(attention))
    hidden = feed_forward_network(5, EMBEDDING)(x)
    x = layers.LayerNormalization(epsilon=1e-6, name="encoder_outputs")(x + hidden)
    outputs = layers.Dense(VOCABULARY, name="mlm_cls", activation="softmax")(x)
    model = model_class(inputs, outputs, name="masked_bert_model")
    model.compile(optimizer=sgd(0.01))
    return model


class MaskedTextGenerator(keras.callbacks.Callback):
    """Predicts masked tokens after each epoch."""

    def __init__(self, sample_tokens):
        super().__init__()
        self.sample_tokens = sample_tokens
        self.predictions = []

    def on_epoch_end(self, epoch, logs=None):
        prediction = self.model.predict(self.sample_tokens, verbose=0)
        masked_index = np.where(self.sample_tokens == MASK)[1]
        self.predictions.append(prediction[0][masked_index])


def make_review_classifier(encoder: keras.Model) -> keras.Model:
    """An encoder, which is frozen first, and two dense layers."""
    inputs = keras.Input((LENGTH,), dtype="int64")
    x = layers.GlobalMaxPooling1D()(encoder(inputs))
    x = layers.Dense(6, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x), name="classification")


@published_program("nlp/masked_language_modeling", "equal")
def train_masked_language_model(wrap: Wrap) -> Numbers:
    """Pretraining, then a classifier on the encoder of the saved model, frozen and not frozen."""
    model_class = masked_language_model_class()
    model = wrap(make_masked_language_model(model_class))
    x_masked, y_labels, sample_weight = masked_tokens(EXAMPLES)
    generator = MaskedTextGenerator(np.array([[0, 3, 4, MASK, 5, 6]]))
    data = batched((x_masked, y_labels, sample_weight))
    history = model.fit(data, epochs=EPOCHS, callbacks=[generator], verbose=0)
    numbers = prefixed("pretraining", results(model, history))
    numbers["predictions"] = np.asarray(generator.predictions)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bert_mlm.keras")
        model.save(file)
        custom_objects = {"MaskedLanguageModel": model_class}
        loaded = keras.models.load_model(file, custom_objects=custom_objects)
    encoder = keras.Model(loaded.input, loaded.get_layer("encoder_outputs").output)
    classifier = wrap(make_review_classifier(encoder))
    data = batched(reviews(EXAMPLES))
    validation = batched(reviews(VALIDATION_EXAMPLES, seed=1))
    for is_trainable in (False, True):
        encoder.trainable = is_trainable
        classifier.compile(optimizer=sgd(0.1), loss="binary_crossentropy", metrics=["accuracy"])
        history = classifier.fit(data, epochs=EPOCHS, validation_data=validation, verbose=0)
        numbers |= prefixed(f"classifier, {is_trainable}", results(classifier, history))
    return numbers


# nlp/ner_transformers


class NERModel(keras.Model):
    """A model that the first batch builds; sequences are of another length in each batch."""

    def __init__(self, num_tags, vocab_size, maxlen=LENGTH):
        super().__init__()
        self.embedding_layer = TokenAndPositionEmbedding(maxlen, vocab_size, EMBEDDING)
        ffn = feed_forward_network(5, EMBEDDING)
        self.transformer_block = TransformerBlock(EMBEDDING, HEADS, ffn)
        self.dropout1 = layers.Dropout(0.0)
        self.ff = layers.Dense(6, activation="relu")
        self.dropout2 = layers.Dropout(0.0)
        self.ff_final = layers.Dense(num_tags, activation="softmax")

    def call(self, inputs, training=False):
        x = self.transformer_block(self.embedding_layer(inputs))
        x = self.dropout1(x, training=training)
        x = self.dropout2(self.ff(x), training=training)
        return self.ff_final(x)


class CustomNonPaddingTokenLoss(keras.losses.Loss):
    """A mean over the batch's tokens that are no padding."""

    def __init__(self, name="custom_ner_loss"):
        super().__init__(name=name)

    def call(self, y_true, y_pred):
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
        loss = loss_fn(y_true, y_pred)
        mask = ops.cast(y_true > 0, dtype=loss.dtype)
        return ops.sum(loss * mask) / ops.sum(mask)


def tagged_records(count: int, seed: int) -> list[str]:
    """Lines of the number of tokens, the tokens, and their tags."""
    random = np.random.default_rng(seed)
    records = []
    for text in random_texts(count, seed):
        tokens = text.split()
        tags = [str(tag) for tag in random.integers(0, CLASSES, len(tokens))]
        records.append("\t".join([str(len(tokens)), *tokens, *tags]))
    return records


def map_record_to_training_data(record):
    """Tokens, and tags that begin with 1, since 0 is padding."""
    record = tf.strings.split(record, sep="\t")
    length = tf.strings.to_number(record[0], out_type=tf.int32)
    tags = tf.strings.to_number(record[length + 1 :], out_type=tf.int64)
    return record[1 : length + 1], tags + 1


@published_program("nlp/ner_transformers", "equal")
def train_ner(wrap: Wrap) -> Numbers:
    """Batches that are padded, and a loss over all tokens of a batch."""
    lookup_layer = layers.StringLookup(vocabulary=WORDS)
    records = tf.data.Dataset.from_tensor_slices(tagged_records(EXAMPLES, seed=0))
    data = (
        records.map(map_record_to_training_data)
        .map(lambda tokens, tags: (lookup_layer(tf.strings.lower(tokens)), tags))
        .padded_batch(BATCH)
        .with_options(no_autotune())
    )
    model = NERModel(CLASSES + 1, VOCABULARY)
    model.compile(optimizer=sgd(0.5), loss=CustomNonPaddingTokenLoss())
    model = wrap(model)
    history = model.fit(data, epochs=EPOCHS, verbose=0)
    numbers = results(model, history)
    sample = ops.reshape(lookup_layer(["it", "was", "a", "great", "film"]), (1, -1))
    numbers["prediction"] = model.predict(sample, verbose=0)
    return numbers


# nlp/pretrained_word_embeddings


@published_program("nlp/pretrained_word_embeddings", "equal")
def train_with_pretrained_embeddings(wrap: Wrap) -> Numbers:
    """An embedding that is built by hand, filled and frozen."""
    vectorizer = layers.TextVectorization(VOCABULARY, output_sequence_length=12)
    vectorizer.adapt(tf.data.Dataset.from_tensor_slices(random_texts(EXAMPLES)).batch(BATCH))
    embedding = layers.Embedding(VOCABULARY, EMBEDDING, trainable=False)
    embedding.build((1,))
    embedding.set_weights([random_array(VOCABULARY, EMBEDDING, low=-1.0)])
    inputs = keras.Input((None,), dtype="int64")
    x = layers.Conv1D(UNITS, 3, activation="relu")(embedding(inputs))
    x = layers.MaxPooling1D(2)(x)
    x = layers.Conv1D(UNITS, 3, activation="relu")(x)
    x = layers.GlobalMaxPooling1D()(x)
    x = layers.Dropout(0.0)(layers.Dense(6, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=sgd(0.1),
        metrics=["acc"],
    )
    model = wrap(model)
    x_train = vectorizer(np.array([[text] for text in random_texts(EXAMPLES)])).numpy()
    x_val = vectorizer(np.array([[text] for text in random_texts(13, seed=1)])).numpy()
    validation = (x_val, random_labels(13, seed=1))
    history = fit_arrays(model, x_train, random_labels(EXAMPLES), validation_data=validation)
    return results(model, history)


# nlp/bidirectional_lstm_imdb


@published_program("nlp/bidirectional_lstm_imdb", "equal")
def train_bidirectional_lstm(wrap: Wrap) -> Numbers:
    """Two bidirectional LSTMs, and sequences of any length."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, EMBEDDING)(inputs)
    x = layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(UNITS))(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile(sgd(0.5), "binary_crossentropy", metrics=["accuracy"])
    model = wrap(model)
    validation = reviews(VALIDATION_EXAMPLES, seed=1)
    history = fit_arrays(model, *reviews(EXAMPLES), validation_data=validation)
    return results(model, history)


# nlp/active_learning_review_classification


def make_review_model() -> keras.Model:
    """A bidirectional LSTM, pooled."""
    return keras.Sequential(
        [
            keras.Input((LENGTH,)),
            layers.Embedding(input_dim=VOCABULARY, output_dim=EMBEDDING),
            layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True)),
            layers.GlobalMaxPool1D(),
            layers.Dense(6, activation="relu"),
            layers.Dropout(0.0),
            layers.Dense(1, activation="sigmoid"),
        ]
    )


def compile_review_model(model: keras.Model) -> None:
    """Compiles with a new optimizer and new metrics, whose names count up."""
    model.compile(
        loss="binary_crossentropy",
        optimizer=sgd(0.5),
        metrics=[
            keras.metrics.BinaryAccuracy(),
            keras.metrics.FalseNegatives(),
            keras.metrics.FalsePositives(),
        ],
    )


def texts_of_class(label: int, count: int, seed: int) -> tf.data.Dataset:
    """Texts, one by one, and the same label for each."""
    labels = np.full((count,), label)
    return tf.data.Dataset.from_tensor_slices((random_texts(count, seed), labels))


def sampled_shares(scores: list[float]) -> tuple[float, float]:
    """Which shares of the next examples are negative and positive."""
    _, _, false_negatives, false_positives = scores
    if not false_negatives or not false_positives:
        return 0.5, 0.5
    total = false_negatives + false_positives
    return false_negatives / total, false_positives / total


@published_program("nlp/active_learning_review_classification", "equal")
def train_with_active_learning(wrap: Wrap) -> Numbers:
    """Rounds of training, each on more data; from the second on, of the best model so far."""
    vectorizer = layers.TextVectorization(VOCABULARY, output_sequence_length=LENGTH)
    vectorizer.adapt(tf.data.Dataset.from_tensor_slices(random_texts(EXAMPLES)).batch(256))

    def vectorize_text(text, label):
        return vectorizer(text), label

    train = texts_of_class(0, 6, seed=0).concatenate(texts_of_class(1, 5, seed=1))
    train = train.map(vectorize_text)
    negatives = texts_of_class(0, 20, seed=2).map(vectorize_text)
    positives = texts_of_class(1, 20, seed=3).map(vectorize_text)
    test = texts_of_class(0, 6, seed=4).concatenate(texts_of_class(1, 7, seed=5))
    test = test.batch(BATCH).map(vectorize_text).with_options(no_autotune())
    model = make_review_model()
    compile_review_model(model)
    model = wrap(model)
    numbers = {}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "AL_Model.keras"))
        checkpoint = keras.callbacks.ModelCheckpoint(file, save_best_only=True)
        for iteration in range(3):
            if iteration > 0:
                numbers[f"{iteration}/predictions"] = model.predict(test, verbose=0)
                shares = sampled_shares(model.evaluate(test, verbose=0))
                of_zeros, of_ones = (int(10 * share) for share in shares)
                train = train.concatenate(negatives.take(of_zeros))
                train = train.concatenate(positives.take(of_ones))
                negatives, positives = negatives.skip(of_zeros), positives.skip(of_ones)
                compile_review_model(model)
            history = model.fit(
                train.cache().batch(BATCH).with_options(no_autotune()),
                epochs=4,
                validation_data=test,
                callbacks=[checkpoint, keras.callbacks.EarlyStopping(patience=1)],
                verbose=0,
            )
            numbers |= prefixed(str(iteration), results(model, history))
            if iteration > 0:
                model = wrap(keras.models.load_model(file))
    scores = model.evaluate(test, verbose=0, return_dict=True)
    return numbers | results(model, history, scores=scores)


# nlp/lstm_seq2seq


@published_program("nlp/lstm_seq2seq", "equal")
def train_seq2seq(wrap: Wrap) -> Numbers:
    """An LSTM that begins with another's states; a list of inputs, one-hot."""
    encoder_inputs = keras.Input((None, VOCABULARY))
    _, *states = layers.LSTM(UNITS, return_state=True)(encoder_inputs)
    decoder_inputs = keras.Input((None, VOCABULARY))
    decoder_lstm = layers.LSTM(UNITS, return_sequences=True, return_state=True)
    decoder_outputs, _, _ = decoder_lstm(decoder_inputs, initial_state=states)
    outputs = layers.Dense(VOCABULARY, activation="softmax")(decoder_outputs)
    model = keras.Model([encoder_inputs, decoder_inputs], outputs)
    model.compile(
        optimizer=sgd(0.5),
        loss="categorical_crossentropy",
        metrics=["accuracy"],
    )
    model = wrap(model)
    one_hot = np.eye(VOCABULARY, dtype=keras.config.floatx())
    encoder_data = one_hot[random_tokens(EXAMPLES)]
    decoder_data = one_hot[random_tokens(EXAMPLES, seed=1)]
    target_data = np.roll(decoder_data, -1, axis=1)
    inputs = [encoder_data, decoder_data]
    history = fit_arrays(model, inputs, target_data, validation_split=0.2)
    return results(model, history)


# timeseries/timeseries_classification_from_scratch


@published_program("timeseries/timeseries_classification_from_scratch", "equal")
def train_timeseries_classifier(wrap: Wrap) -> Numbers:
    """`BatchNormalization`, and callbacks that keep the best model and lower the learning rate."""
    inputs = keras.Input((8, 1))
    x = inputs
    for _ in range(3):
        x = layers.Conv1D(UNITS, 3, padding="same", bias_initializer=nonzero_bias())(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))
    model.compile(
        optimizer=sgd(0.5),
        loss="sparse_categorical_crossentropy",
        metrics=["sparse_categorical_accuracy"],
    )
    model = wrap(model)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "best_model.keras"))
        callbacks = [
            keras.callbacks.ModelCheckpoint(file, save_best_only=True, monitor="val_loss"),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1),
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=3),
        ]
        x_train = random_array(EXAMPLES, 8, 1, low=-1.0)
        labels = random_labels(EXAMPLES)
        history = fit_arrays(
            model,
            x_train,
            labels,
            epochs=5,
            callbacks=callbacks,
            validation_split=0.2,
        )
        numbers = prefixed("last", results(model, history))
        model = wrap(keras.models.load_model(file))
    x_test = random_array(VALIDATION_EXAMPLES, 8, 1, low=-1.0, seed=1)
    labels = random_labels(VALIDATION_EXAMPLES, seed=1)
    scores = model.evaluate(x_test, labels, verbose=0, return_dict=True)
    return numbers | prefixed("best", results(model, history, scores=scores))


# timeseries/timeseries_traffic_forecasting

ROUTES = 3
HORIZON = 2


class GraphInfo:
    """Edges as two lists of nodes."""

    def __init__(self, edges, num_nodes):
        self.edges = edges
        self.num_nodes = num_nodes


class GraphConv(layers.Layer):
    """Means over neighbours; nodes are the first axis, and examples the second."""

    def __init__(self, in_feat, out_feat, graph_info):
        super().__init__()
        self.graph_info = graph_info
        self.weight = self.add_weight(
            initializer=keras.initializers.GlorotUniform(),
            shape=(in_feat, out_feat),
            trainable=True,
        )

    def call(self, features):
        neighbours = tf.gather(features, self.graph_info.edges[1])
        aggregated = tf.math.unsorted_segment_mean(
            neighbours,
            self.graph_info.edges[0],
            num_segments=self.graph_info.num_nodes,
        )
        # No `tf.matmul`, as published: TensorFlow 2.21 with oneDNN crashes, on one device too, when
        # two products of ranks 4 and 2 in float32 are computed at the same time.
        nodes = tf.tensordot(features, self.weight, axes=1)
        messages = tf.tensordot(aggregated, self.weight, axes=1)
        return tf.concat([nodes, messages], axis=-1)


class LSTMGC(layers.Layer):
    """An LSTM over all nodes of all examples."""

    def __init__(self, in_feat, out_feat, lstm_units, output_seq_len, graph_info):
        super().__init__()
        self.graph_conv = GraphConv(in_feat, out_feat, graph_info)
        self.lstm = layers.LSTM(lstm_units, activation="relu")
        self.dense = layers.Dense(output_seq_len)
        self.output_seq_len = output_seq_len

    def call(self, inputs):
        x = self.graph_conv(tf.transpose(inputs, [2, 0, 1, 3]))
        num_nodes, batch_size, length, features = tf.unstack(tf.shape(x))
        x = tf.reshape(x, (batch_size * num_nodes, length, features))
        x = self.dense(self.lstm(x))
        x = tf.reshape(x, (num_nodes, batch_size, self.output_seq_len))
        return tf.transpose(x, [1, 2, 0])


def traffic_data(count: int, seed: int) -> tf.data.Dataset:
    """Windows of a time series, and what follows each of them."""
    series = random_array(count + LENGTH + HORIZON - 1, ROUTES, seed=seed)
    inputs = keras.utils.timeseries_dataset_from_array(
        np.expand_dims(series[:-HORIZON], axis=-1),
        None,
        sequence_length=LENGTH,
        shuffle=False,
        batch_size=BATCH,
    )
    targets = keras.utils.timeseries_dataset_from_array(
        series[LENGTH:],
        None,
        sequence_length=HORIZON,
        shuffle=False,
        batch_size=BATCH,
    )
    return zipped(inputs, targets).prefetch(16).cache()


@published_program("timeseries/timeseries_traffic_forecasting", "equal")
def train_traffic_forecaster(wrap: Wrap) -> Numbers:
    """A graph among the features, which is an attribute of a layer."""
    graph = GraphInfo(edges=([0, 0, 1, 2], [1, 2, 0, 0]), num_nodes=ROUTES)
    inputs = keras.Input((LENGTH, ROUTES, 1))
    outputs = LSTMGC(1, 2, UNITS, HORIZON, graph)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=sgd(0.5), loss=keras.losses.MeanSquaredError())
    model = wrap(model)
    history = model.fit(
        traffic_data(EXAMPLES, seed=0),
        validation_data=traffic_data(VALIDATION_EXAMPLES, seed=1),
        epochs=EPOCHS,
        callbacks=[keras.callbacks.EarlyStopping(patience=10)],
        verbose=0,
    )
    x_test, _ = next(traffic_data(VALIDATION_EXAMPLES, seed=2).as_numpy_iterator())
    numbers = results(model, history)
    numbers["predictions"] = model.predict(x_test, verbose=0)
    return numbers
