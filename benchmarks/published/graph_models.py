# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the methods are Keras's, or do what their names say
"""Programs of keras.io's folders graph and generative without a `train_step` of their own."""

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
    published_program,
    random_array,
    random_labels,
    results,
    sgd,
)

# generative/text_generation_with_miniature_gpt

MAX_LENGTH = 6
EMBEDDING = 4
WORDS = ["this", "movie", "is", "good", "bad", "long"]
VOCABULARY = len(WORDS) + 2  # with padding and unknown words


def causal_attention_mask(batch_size, n_dest, n_src, dtype):
    """A triangle for each example, as attention wants it."""
    i = ops.arange(n_dest)[:, None]
    j = ops.arange(n_src)
    mask = ops.cast(i >= j - n_src + n_dest, dtype)
    mask = ops.reshape(mask, [1, n_dest, n_src])
    return ops.tile(mask, [batch_size, 1, 1])


class TransformerBlock(layers.Layer):
    """Attention with a mask that is made for the batch."""

    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.0):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads, embed_dim)
        dense_layers = [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        self.ffn = keras.Sequential(dense_layers)
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs):
        batch_size, length, _ = ops.shape(inputs)
        mask = causal_attention_mask(batch_size, length, length, "bool")
        attention = self.dropout1(self.att(inputs, inputs, attention_mask=mask))
        out1 = self.layernorm1(inputs + attention)
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))


class TokenAndPositionEmbedding(layers.Layer):
    """Embeddings of tokens and of positions."""

    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.token_emb(x) + self.pos_emb(positions)


class TextGenerator(keras.callbacks.Callback):
    """Predicts one text at a time, and draws the next word from the likeliest ones."""

    def __init__(self, max_tokens, start_tokens, top_k=3):
        super().__init__()
        self.max_tokens = max_tokens
        self.start_tokens = start_tokens
        self.top_k = top_k
        self.random = np.random.default_rng(0)
        self.texts = []

    def sample_from(self, logits):
        logits, indices = ops.top_k(logits, k=self.top_k, sorted=True)
        probabilities = np.asarray(ops.softmax(ops.expand_dims(logits, 0))[0], "float64")
        return self.random.choice(np.asarray(indices), p=probabilities / probabilities.sum())

    def on_epoch_end(self, epoch, logs=None):
        tokens = list(self.start_tokens)
        for _ in range(self.max_tokens):
            padded = np.array([tokens + [0] * (MAX_LENGTH - len(tokens))])
            logits, _ = self.model.predict(padded, verbose=0)
            tokens.append(self.sample_from(logits[0][len(tokens) - 1]))
        self.texts.append(tokens)


def random_texts(count: int) -> tf.data.Dataset:
    """Batches of texts of a few words."""
    random = np.random.default_rng(0)
    lengths = random.integers(2, MAX_LENGTH + 2, count)
    texts = [" ".join(random.choice(WORDS, length)) for length in lengths]
    return batch_dataset(tf.data.Dataset.from_tensor_slices(texts))


@published_program("generative/text_generation_with_miniature_gpt", "equal")
def train_miniature_gpt(wrap: Wrap) -> Numbers:
    """Two outputs, of which one has no loss; a callback predicts in each epoch."""
    inputs = keras.Input((MAX_LENGTH,), dtype="int32")
    x = TokenAndPositionEmbedding(MAX_LENGTH, VOCABULARY, EMBEDDING)(inputs)
    x = TransformerBlock(EMBEDDING, num_heads=2, ff_dim=EMBEDDING)(x)
    outputs = layers.Dense(VOCABULARY)(x)
    model = keras.Model(inputs=inputs, outputs=[outputs, x])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(sgd(0.1), loss=[loss_fn, None])
    model = wrap(model)
    texts = random_texts(EXAMPLES)
    vectorize = layers.TextVectorization(
        max_tokens=VOCABULARY - 1,
        output_mode="int",
        output_sequence_length=MAX_LENGTH + 1,
    )
    vectorize.adapt(texts)

    def prepare_lm_inputs_labels(text):
        tokens = vectorize(tf.expand_dims(text, -1))
        return tokens[:, :-1], tokens[:, 1:]

    word_numbers = {word: index for index, word in enumerate(vectorize.get_vocabulary())}
    start_tokens = [word_numbers.get(word, 1) for word in WORDS[:3]]
    generator = TextGenerator(max_tokens=3, start_tokens=start_tokens)
    history = model.fit(
        texts.map(prepare_lm_inputs_labels).prefetch(2),
        epochs=EPOCHS,
        callbacks=[generator],
        verbose=0,
    )
    return results(model, history, scores={"texts": generator.texts})


# generative/pixelcnn


class PixelConvLayer(layers.Layer):
    """Masks its convolution's kernel by an assignment in `call`."""

    def __init__(self, mask_type, **kwargs):
        super().__init__()
        self.mask_type = mask_type
        self.conv = layers.Conv2D(**kwargs)

    def build(self, input_shape):
        self.conv.build(input_shape)
        shape = ops.shape(self.conv.kernel)
        self.mask = np.zeros(shape=shape)
        self.mask[: shape[0] // 2, ...] = 1.0
        self.mask[shape[0] // 2, : shape[1] // 2, ...] = 1.0
        if self.mask_type == "B":
            self.mask[shape[0] // 2, shape[1] // 2, ...] = 1.0

    def call(self, inputs):
        self.conv.kernel.assign(self.conv.kernel * self.mask)
        return self.conv(inputs)


class ResidualBlock(layers.Layer):
    """Three convolutions, one of them masked, beside the input."""

    def __init__(self, filters):
        super().__init__()
        self.conv1 = layers.Conv2D(filters=filters, kernel_size=1, activation="relu")
        self.pixel_conv = PixelConvLayer(
            mask_type="B",
            filters=filters // 2,
            kernel_size=3,
            activation="relu",
            padding="same",
        )
        self.conv2 = layers.Conv2D(filters=filters, kernel_size=1, activation="relu")

    def call(self, inputs):
        x = self.conv2(self.pixel_conv(self.conv1(inputs)))
        return layers.add([inputs, x])


@published_program("generative/pixelcnn", "equal")
def train_pixelcnn(wrap: Wrap) -> Numbers:
    """The images are the labels; they are black and white."""
    inputs = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1), batch_size=None)
    x = PixelConvLayer(
        mask_type="A",
        filters=4,
        kernel_size=7,
        activation="relu",
        padding="same",
    )(inputs)
    for _ in range(2):
        x = ResidualBlock(filters=4)(x)
    for _ in range(2):
        x = PixelConvLayer(
            mask_type="B",
            filters=4,
            kernel_size=1,
            strides=1,
            activation="relu",
            padding="valid",
        )(x)
    options = {"kernel_size": 1, "strides": 1, "padding": "valid"}
    outputs = layers.Conv2D(filters=1, activation="sigmoid", **options)(x)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=sgd(0.1), loss="binary_crossentropy")
    model = wrap(model)
    count = 30  # of which EXAMPLES are to train on
    images = random_array(count, IMAGE_SIZE, IMAGE_SIZE, 1)
    data = np.where(images < 0.33, 0, 1).astype(keras.config.floatx())
    history = model.fit(
        x=data,
        y=data,
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_split=0.1,
        shuffle=False,
        verbose=0,
    )
    predictions = model.predict(np.zeros_like(data[:4]), verbose=0)
    return results(model, history, scores={"predictions": predictions})


# graph/gat_node_classification

NODES = 45
FEATURES = 5


def random_edges(count: int, seed: int = 0) -> np.ndarray:
    """Pairs of nodes, [edges, 2]; each node is the first of a pair at least once."""
    random = np.random.default_rng(seed)
    firsts = np.concatenate([np.arange(NODES), random.integers(0, NODES, count - NODES)])
    return np.stack([firsts, random.integers(0, NODES, count)], axis=1).astype("int32")


class GraphAttention(layers.Layer):
    """Attention of each node to its neighbours, by sums over the edges."""

    def __init__(self, units, kernel_initializer="glorot_uniform"):
        super().__init__()
        self.units = units
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[0][-1], self.units),
            initializer=self.kernel_initializer,
            name="kernel",
        )
        self.kernel_attention = self.add_weight(
            shape=(2 * self.units, 1),
            initializer=self.kernel_initializer,
            name="kernel_attention",
        )
        self.built = True

    def call(self, inputs):
        node_states, edges = inputs
        z = ops.matmul(node_states, self.kernel)
        targets, sources = edges[:, 0], edges[:, 1]
        of_targets, of_sources = ops.take(z, targets, axis=0), ops.take(z, sources, axis=0)
        both = ops.concatenate([of_targets, of_sources], axis=-1)
        scores = ops.leaky_relu(ops.matmul(both, self.kernel_attention))
        scores = ops.exp(ops.clip(ops.squeeze(scores, -1), -2, 2))
        num_nodes = ops.shape(node_states)[0]
        sums = ops.segment_sum(scores, targets, num_segments=num_nodes)
        normalized = scores / (ops.take(sums, targets, axis=0) + 1e-8)
        weighted = of_sources * ops.expand_dims(normalized, axis=-1)
        return ops.segment_sum(weighted, targets, num_segments=num_nodes)


class MultiHeadGraphAttention(layers.Layer):
    """Several attentions, side by side."""

    def __init__(self, units, num_heads):
        super().__init__()
        self.attention_layers = [GraphAttention(units) for _ in range(num_heads)]

    def call(self, inputs):
        node_states, edges = inputs
        outputs = [layer([node_states, edges]) for layer in self.attention_layers]
        return ops.relu(ops.concatenate(outputs, axis=-1))


class GraphAttentionNetwork(keras.Model):
    """Holds the graph, whose nodes are computed whatever the batch is; inputs are indices."""

    def __init__(self, node_states, edges, hidden_units, num_heads, num_layers, output_dim):
        super().__init__()
        self.node_states = node_states
        self.edges = edges
        self.preprocess = layers.Dense(hidden_units * num_heads, activation="relu")
        heads = [MultiHeadGraphAttention(hidden_units, num_heads) for _ in range(num_layers)]
        self.attention_layers = heads
        self.output_layer = layers.Dense(output_dim)

    def call(self, inputs, training=False):
        x = self.preprocess(self.node_states)
        for attention_layer in self.attention_layers:
            x = attention_layer([x, self.edges]) + x
        return ops.take(self.output_layer(x), inputs, axis=0)


@published_program("graph/gat_node_classification", "equal")
def train_gat(wrap: Wrap) -> Numbers:
    """An array of indices; a subclassed model that nothing builds before the first step."""
    model = GraphAttentionNetwork(
        node_states=ops.convert_to_tensor(random_array(NODES, FEATURES)),
        edges=ops.convert_to_tensor(random_edges(80), dtype="int32"),
        hidden_units=3,
        num_heads=2,
        num_layers=2,
        output_dim=CLASSES,
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=sgd(0.05, momentum=0.9),
        metrics=["accuracy"],
    )
    model = wrap(model)
    indices, labels = np.random.default_rng(1).permutation(NODES), random_labels(NODES)
    train, test = indices[:30], indices[30:]  # `validation_split` leaves EXAMPLES of 30
    history = model.fit(
        x=train,
        y=labels[train],
        validation_split=0.1,
        batch_size=BATCH,
        epochs=EPOCHS,
        callbacks=[
            keras.callbacks.EarlyStopping(
                monitor="val_accuracy",
                patience=5,
                restore_best_weights=True,
            )
        ],
        shuffle=False,
        verbose=0,
    )
    loss, accuracy = model.evaluate(x=test, y=labels[test], verbose=0)
    predictions = model.predict(x=test, verbose=0)
    scores = {"loss": loss, "accuracy": accuracy, "predictions": predictions}
    return results(model, history, scores=scores)


# graph/gnn_citations


def create_ffn(hidden_units, dropout_rate, name=None):
    """Dense layers, each after BatchNormalization and dropout."""
    fnn_layers = []
    for units in hidden_units:
        fnn_layers.append(layers.BatchNormalization())
        fnn_layers.append(layers.Dropout(dropout_rate))
        fnn_layers.append(layers.Dense(units, activation="gelu"))
    return keras.Sequential(fnn_layers, name=name)


class GraphConvLayer(layers.Layer):
    """Sends each node the sum of what its neighbours become."""

    def __init__(self, hidden_units, dropout_rate=0.0, normalize=False, name=None):
        super().__init__(name=name)
        self.normalize = normalize
        self.ffn_prepare = create_ffn(hidden_units, dropout_rate)
        self.update_fn = create_ffn(hidden_units, dropout_rate)

    def call(self, inputs):
        node_repesentations, edges, edge_weights = inputs
        node_indices, neighbour_indices = edges[0], edges[1]
        neighbours = ops.take(node_repesentations, neighbour_indices, axis=0)
        messages = self.ffn_prepare(neighbours) * ops.expand_dims(edge_weights, -1)
        num_nodes = node_repesentations.shape[0]
        aggregated = ops.segment_sum(messages, node_indices, num_segments=num_nodes)
        embeddings = self.update_fn(ops.concatenate([node_repesentations, aggregated], axis=1))
        if self.normalize:
            embeddings = ops.normalize(embeddings, axis=-1, order=2)
        return embeddings


class GNNNodeClassifier(keras.Model):
    """Holds the graph; its BatchNormalization is of all nodes or edges, whatever the batch is."""

    def __init__(self, graph_info, num_classes, hidden_units, dropout_rate=0.0, name=None):
        super().__init__(name=name)
        node_features, edges, edge_weights = graph_info
        self.node_features = node_features
        self.edges = edges
        self.edge_weights = edge_weights / ops.sum(edge_weights)
        self.preprocess = create_ffn(hidden_units, dropout_rate, name="preprocess")
        self.conv1 = GraphConvLayer(hidden_units, dropout_rate, normalize=True, name="graph_conv1")
        self.conv2 = GraphConvLayer(hidden_units, dropout_rate, normalize=True, name="graph_conv2")
        self.postprocess = create_ffn(hidden_units, dropout_rate, name="postprocess")
        self.compute_logits = layers.Dense(units=num_classes, name="logits")

    def call(self, input_node_indices):
        x = self.preprocess(self.node_features)
        x = self.conv1((x, self.edges, self.edge_weights)) + x
        x = self.conv2((x, self.edges, self.edge_weights)) + x
        x = self.postprocess(x)
        node_embeddings = ops.take(x, input_node_indices, axis=0)
        return self.compute_logits(node_embeddings)


def fit_nodes(model, x_train, y_train) -> keras.callbacks.History:
    """Compiles and trains a model; `validation_split` leaves EXAMPLES."""
    model.compile(
        optimizer=sgd(0.02),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
    )
    early_stopping = keras.callbacks.EarlyStopping(
        monitor="val_acc",
        patience=50,
        restore_best_weights=True,
    )
    return model.fit(
        x=x_train,
        y=y_train,
        epochs=EPOCHS,
        batch_size=BATCH,
        validation_split=0.15,
        callbacks=[early_stopping],
        shuffle=False,
        verbose=0,
    )


def make_baseline_of_nodes(hidden_units) -> keras.Model:
    """The same layers without the graph."""
    inputs = keras.Input((FEATURES,), name="input_features")
    x = create_ffn(hidden_units, 0.0, name="ffn_block1")(inputs)
    for block in range(2):
        x1 = create_ffn(hidden_units, 0.0, name=f"ffn_block{block + 2}")(x)
        x = layers.Add(name=f"skip_connection{block + 2}")([x, x1])
    logits = layers.Dense(CLASSES, name="logits")(x)
    return keras.Model(inputs=inputs, outputs=logits, name="baseline")


@published_program("graph/gnn_citations", "equal")
def train_gnn_citations(wrap: Wrap) -> Numbers:
    """A model of features, and one of indices, which is built by a call with three of them."""
    features, labels = random_array(NODES, FEATURES), random_labels(NODES)
    indices = np.random.default_rng(1).permutation(NODES)
    train, test = indices[:32], indices[32:]
    hidden_units = [4, 4]
    baseline = wrap(make_baseline_of_nodes(hidden_units))
    history = fit_nodes(baseline, features[train], labels[train])
    scores = baseline.evaluate(features[test], labels[test], verbose=0, return_dict=True)
    found = results(baseline, history, scores=scores)
    numbers = {f"baseline/{key}": value for key, value in found.items()}

    edges = random_edges(80).T
    edge_weights = ops.ones(shape=edges.shape[1], dtype=keras.config.floatx())
    graph_info = (ops.convert_to_tensor(features), ops.convert_to_tensor(edges), edge_weights)
    model = GNNNodeClassifier(graph_info, CLASSES, hidden_units, name="gnn_model")
    model(ops.convert_to_tensor([1, 10, 20]))
    model = wrap(model)
    history = fit_nodes(model, train, labels[train])
    scores = model.evaluate(test, labels[test], verbose=0, return_dict=True)
    found = results(model, history, scores=scores)
    return numbers | {f"gnn/{key}": value for key, value in found.items()}


# graph/mpnn-molecular-graphs

ATOM_FEATURES = 4
BOND_FEATURES = 3


def prepare_batch(molecules, labels):
    """Merges the molecules of a batch into one graph, of atoms that know their molecule."""
    atom_features, bond_features, pair_indices = molecules
    num_atoms, num_bonds = atom_features.row_lengths(), bond_features.row_lengths()
    molecule_indices = tf.range(tf.size(num_atoms))
    molecule_indicator = tf.repeat(molecule_indices, num_atoms)
    atoms_before = tf.cumsum(num_atoms, exclusive=True)
    increment = tf.repeat(atoms_before, num_bonds)
    pair_indices = pair_indices.merge_dims(0, 1).to_tensor() + increment[:, tf.newaxis]
    atom_features = atom_features.merge_dims(0, 1).to_tensor()
    bond_features = bond_features.merge_dims(0, 1).to_tensor()
    return (atom_features, bond_features, pair_indices, molecule_indicator), labels


def molecule_data(count: int, seed: int) -> tf.data.Dataset:
    """Batches of ragged molecules of two to five atoms, merged."""
    random = np.random.default_rng(seed)
    floatx = keras.config.floatx()
    atoms, bonds, pairs = [], [], []
    for num_atoms in random.integers(2, 6, count):
        num_bonds = 2 * num_atoms
        atoms.append(random.uniform(0.1, 1.0, (num_atoms, ATOM_FEATURES)).tolist())
        bonds.append(random.uniform(0.0, 1.0, (num_bonds, BOND_FEATURES)).tolist())
        pairs.append(random.integers(0, num_atoms, (num_bonds, 2)).tolist())
    molecules = (
        tf.ragged.constant(atoms, dtype=floatx),
        tf.ragged.constant(bonds, dtype=floatx),
        tf.ragged.constant(pairs, dtype=tf.int64),
    )
    labels = random.integers(0, 2, count)
    examples = tf.data.Dataset.from_tensor_slices((molecules, labels))
    return batch_dataset(examples).map(prepare_batch).prefetch(2)


class EdgeNetwork(layers.Layer):
    """Makes a matrix of each bond, and sends the neighbours' states through it."""

    def build(self, input_shape):
        self.atom_dim = input_shape[0][-1]
        self.bond_dim = input_shape[1][-1]
        self.kernel = self.add_weight(
            shape=(self.bond_dim, self.atom_dim * self.atom_dim),
            initializer="glorot_uniform",
            name="kernel",
        )
        self.bias = self.add_weight(
            shape=(self.atom_dim * self.atom_dim,),
            initializer="zeros",
            name="bias",
        )
        self.built = True

    def call(self, inputs):
        atom_features, bond_features, pair_indices = inputs
        matrices = tf.matmul(bond_features, self.kernel) + self.bias
        matrices = tf.reshape(matrices, (-1, self.atom_dim, self.atom_dim))
        neighbours = tf.gather(atom_features, pair_indices[:, 1])
        transformed = tf.squeeze(tf.matmul(matrices, neighbours[:, :, tf.newaxis]), axis=-1)
        return tf.math.unsorted_segment_sum(
            transformed,
            pair_indices[:, 0],
            num_segments=tf.shape(atom_features)[0],
        )


class MessagePassing(layers.Layer):
    """Updates the atoms' states by a GRU cell, several times."""

    def __init__(self, units, steps=2):
        super().__init__()
        self.units = units
        self.steps = steps

    def build(self, input_shape):
        atom_dim = input_shape[0][-1]
        self.message_step = EdgeNetwork()
        self.message_step.build([(None, self.units), *input_shape[1:]])
        self.pad_length = max(0, self.units - atom_dim)
        self.update_step = layers.GRUCell(atom_dim + self.pad_length)
        self.update_step.build((None, self.units))
        self.built = True

    def call(self, inputs):
        atom_features, bond_features, pair_indices = inputs
        states = tf.pad(atom_features, [(0, 0), (0, self.pad_length)])
        for _ in range(self.steps):
            messages = self.message_step([states, bond_features, pair_indices])
            states, _ = self.update_step(messages, states)
        return states


class PartitionPadding(layers.Layer):
    """Divides atoms by their molecules, of which there are at most a constant number."""

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def call(self, inputs):
        states, molecule_indicator = inputs
        molecules = tf.dynamic_partition(states, molecule_indicator, self.batch_size)
        num_atoms = [tf.shape(molecule)[0] for molecule in molecules]
        max_num_atoms = tf.reduce_max(num_atoms)
        padded = [
            tf.pad(molecule, [(0, max_num_atoms - count), (0, 0)])
            for molecule, count in zip(molecules, num_atoms, strict=True)
        ]
        stacked = tf.stack(padded, axis=0)
        nonempty = tf.where(tf.reduce_sum(stacked, (1, 2)) != 0)
        return tf.gather(stacked, tf.squeeze(nonempty, axis=-1), axis=0)


class TransformerEncoderReadout(layers.Layer):
    """Makes one row of a molecule's atoms."""

    def __init__(self, num_heads, embed_dim, dense_dim, batch_size):
        super().__init__()
        self.partition_padding = PartitionPadding(batch_size)
        self.attention = layers.MultiHeadAttention(num_heads, embed_dim)
        dense_layers = [layers.Dense(dense_dim, activation="relu"), layers.Dense(embed_dim)]
        self.dense_proj = keras.Sequential(dense_layers)
        self.layernorm_1 = layers.LayerNormalization()
        self.layernorm_2 = layers.LayerNormalization()
        self.average_pooling = layers.GlobalAveragePooling1D()

    def call(self, inputs):
        x = self.partition_padding(inputs)
        padding_mask = tf.reduce_any(tf.not_equal(x, 0.0), axis=-1)[:, tf.newaxis]
        x = self.layernorm_1(x + self.attention(x, x, attention_mask=padding_mask))
        x = self.layernorm_2(x + self.dense_proj(x))
        return self.average_pooling(x)


def make_mpnn_model(message_units: int = 5) -> keras.Model:
    """A functional model with an input of each table of the graph."""
    atom_features = keras.Input((ATOM_FEATURES,), name="atom_features")
    bond_features = keras.Input((BOND_FEATURES,), name="bond_features")
    pair_indices = keras.Input((2,), dtype="int32", name="pair_indices")
    molecule_indicator = keras.Input((), dtype="int32", name="molecule_indicator")
    x = MessagePassing(message_units)([atom_features, bond_features, pair_indices])
    x = TransformerEncoderReadout(2, message_units, 6, BATCH)([x, molecule_indicator])
    x = layers.Dense(6, activation="relu")(x)
    x = layers.Dense(1, activation="sigmoid")(x)
    inputs = [atom_features, bond_features, pair_indices, molecule_indicator]
    return keras.Model(inputs=inputs, outputs=[x])


@published_program("graph/mpnn-molecular-graphs", "may be refused")
def train_mpnn(wrap: Wrap) -> Numbers:
    """The tensors of a batch have as many rows as atoms, bonds or molecules; `class_weight`."""
    model = make_mpnn_model()
    model.compile(
        loss=keras.losses.BinaryCrossentropy(),
        optimizer=sgd(0.05),
        metrics=[keras.metrics.AUC(name="AUC")],
    )
    model = wrap(model)
    history = model.fit(
        molecule_data(EXAMPLES, seed=0),
        validation_data=molecule_data(13, seed=1),
        epochs=EPOCHS,
        verbose=0,
        class_weight={0: 2.0, 1: 0.5},
    )
    predictions = model.predict(molecule_data(13, seed=1), verbose=0)
    return results(model, history, scores={"predictions": predictions})
