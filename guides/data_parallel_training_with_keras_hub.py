"""
Title: Data-parallel training with KerasHub and tf.distribute
Author: The authors of keras-data-parallel-recipes
Date created: 2026/11/23
Last modified: 2026/11/27
Description: Train BERT on several devices, with the loss that one device would have.
Accelerator: GPU
"""

"""
## Introduction

In synchronous data parallelism each device, a *replica*, holds all weights and takes an
equal part of every batch. The gradients of the parts are summed, and each replica applies
the same sum. Done right, N replicas compute what one device would, only faster.

This guide trains a small BERT as a masked language model on all GPUs of a machine, or on
two halves of its CPU, in a few minutes and without a download. At its end we check that
the model has learned something, and that replicas do the same steps as one device.

With Keras 3.15, KerasHub 0.32 (once KerasNLP) and TensorFlow 2.21, `fit` needs help to
be right under a strategy: see **Fix**. `uv run FILE` installs them, and runs this guide.

## Setup
"""

# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["keras<3.16", "keras-hub==0.32.*", "tensorflow==2.21.*", "tensorboard"]
# ///

import os

os.environ["KERAS_BACKEND"] = "tensorflow"  # tf.distribute needs it

import ast
import pathlib
import pydoc_data.topics
import sysconfig

import keras
import keras_hub
import numpy as np
import tensorflow as tf

EPOCHS = 4
SEQ_LENGTH = 64  # tokens in a sequence
BATCH_SIZE = 32  # sequences per replica
LEARNING_RATE = 1e-3  # for one replica
keras.utils.set_random_seed(1)

"""
## The strategy, and what scales with its replicas

`MirroredStrategy` takes all GPUs. A CPU can be split, before TensorFlow first uses it.
Each replica keeps its batch size, so the global batch grows with their number. A larger
batch has a less noisy gradient and allows a higher learning rate: N times as high for SGD
([Goyal et al.](https://arxiv.org/abs/1706.02677)), √N times for Adam, which already
divides by the noise ([Malladi et al.](https://arxiv.org/abs/2205.10287)).
"""

if tf.config.list_physical_devices("GPU"):
    strategy = tf.distribute.MirroredStrategy()
else:
    cpu = tf.config.list_physical_devices("CPU")[0]
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, halves)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
replicas = strategy.num_replicas_in_sync
global_batch_size = BATCH_SIZE * replicas
learning_rate = LEARNING_RATE * replicas**0.5
print(f"{replicas} replicas, batch {global_batch_size}, rate {learning_rate:.2e}")

"""
## The text

Python brings some: its help topics, and the docstrings of its standard library. Every
tenth document is for validation. No paragraph is taken twice, so none is in both parts.
"""

documents = list(pydoc_data.topics.topics.values())
library = pathlib.Path(sysconfig.get_path("stdlib"))
for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
    if not {"site-packages", "dist-packages", "test"} & set(file.parts):
        nodes = ast.walk(ast.parse(file.read_bytes()))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
        documents.append("\n\n".join(filter(None, texts)))
lines, seen = {"train": [], "validation": []}, set()
for number, document in enumerate(documents):
    paragraphs = [p for p in document.split("\n\n") if p not in seen]
    seen.update(paragraphs)
    words = " ".join(paragraphs).split()
    split = "validation" if number % 10 == 0 else "train"
    lines[split] += [" ".join(words[i : i + 28]) for i in range(0, len(words), 28)]
# With a network: wiki = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-v1")
# lines = {split: [t for t in wiki[split]["text"] if len(t) > 100] for split in lines}

"""
## Tokens, masks and weights

The vocabulary of word pieces is learned from the training text.
"""

texts = tf.data.Dataset.from_tensor_slices(lines["train"]).batch(256)
vocabulary = keras_hub.tokenizers.compute_word_piece_vocabulary(
    texts, vocabulary_size=4096, lowercase=True
)
tokenizer = keras_hub.models.BertTokenizer(vocabulary, lowercase=True)
# With a network: keras_hub.models.BertTokenizer.from_preset("bert_tiny_en_uncased")
preprocessor = keras_hub.models.BertMaskedLMPreprocessor(
    tokenizer, SEQ_LENGTH, mask_selection_rate=0.25, mask_selection_length=16
)

"""
The preprocessor makes of each line

- `x`: `token_ids`, most of the chosen ones replaced by `[MASK]`; `padding_mask`, true for
  text; `segment_ids`, all 0 for one text; `mask_positions`, where the chosen tokens are;
- `y`: the chosen tokens, which the model has to guess;
- `sample_weight`: 1 for a token to guess, 0 for a slot that a short line has left empty.

**Fix.** To learn the shapes, Keras averages the first batch over the replicas. Booleans
have no average ([#19246](https://github.com/keras-team/keras/issues/19246)): the padding
mask becomes a number. Neither have parts of unequal size: training batches are full.
"""


def preprocess(batch):
    x, y, sample_weight = preprocessor(batch)
    x["padding_mask"] = tf.cast(x["padding_mask"], "int32")
    return x, y, sample_weight


data = tf.data.Dataset.from_tensor_slices(lines["train"]).shuffle(len(lines["train"]))
data = data.batch(global_batch_size, drop_remainder=True)
train_ds = data.map(preprocess).prefetch(4)  # new masks in each epoch
data = tf.data.Dataset.from_tensor_slices(lines["validation"]).batch(global_batch_size)
validation_ds = data.map(preprocess).cache()
list(validation_ds)  # fills the cache, so that its masks are always the same

"""
## The loss of the global batch

**Fix.** A loss of Keras divides by what is on one replica, then by their number: if one
has 200 tokens to guess and another 300, those of the first count for more. The default
even counts empty slots ([#19740](https://github.com/keras-team/keras/issues/19740)). Ours
divides by the weights of all replicas, and the optimizer sums their gradients.
"""


class GlobalCrossEntropy(keras.losses.SparseCategoricalCrossentropy):
    def __call__(self, y_true, y_pred, sample_weight):
        total = tf.reduce_sum(sample_weight)
        replica = tf.distribute.get_replica_context()
        if replica:  # there is none while Keras only looks at shapes
            total = replica.all_reduce(tf.distribute.ReduceOp.SUM, total)
        losses = self.call(y_true, y_pred) * sample_weight
        return tf.reduce_sum(losses) / total


"""
## The model

It has BERT-tiny's size. **Fix.** No dropout: all replicas would drop the same units. Two
layers are frozen: the pooler is unused, and the only segment adds nothing to positions.
"""


def build_model(optimizer, loss):
    size = {"num_layers": 2, "num_heads": 2, "hidden_dim": 128, "intermediate_dim": 512}
    size |= {"max_sequence_length": SEQ_LENGTH, "dropout": 0.0}
    backbone = keras_hub.models.BertBackbone(tokenizer.vocabulary_size(), **size)
    # With a network: BertBackbone.from_preset("bert_tiny_en_uncased", dropout=0.0)
    for name in ("pooled_dense", "segment_embedding"):
        backbone.get_layer(name).trainable = False
    model = keras_hub.models.BertMaskedLM(backbone)
    # Metrics do divide by the weights, of all replicas and steps.
    cross_entropy = keras.metrics.SparseCategoricalCrossentropy
    metrics = [cross_entropy("token_loss", from_logits=True), "accuracy"]
    model.compile(optimizer, loss, weighted_metrics=metrics)
    return model


"""
## Training

The learning rate falls to zero over all steps. The model and its optimizer are made in
the scope of the strategy. TensorBoard shows the curves: `tensorboard --logdir logs`.
"""

steps = EPOCHS * len(train_ds)
schedule = keras.optimizers.schedules.PolynomialDecay(learning_rate, steps, 0.0)
with strategy.scope():
    loss = GlobalCrossEntropy(from_logits=True)
    model = build_model(keras.optimizers.Adam(schedule), loss)
initial_weights = model.get_weights()
board = keras.callbacks.TensorBoard("logs")
options = {"epochs": EPOCHS, "callbacks": [board], "shuffle": False, "verbose": 2}
model.fit(train_ds, validation_data=validation_ds, **options)

"""
## Has it learned anything?

The *unigram baseline* guesses by how often each token occurs. A model that is better uses
the words around the gap.
"""

counts = np.ones(tokenizer.vocabulary_size())
for _, y, sample_weight in train_ds:
    np.add.at(counts, y[sample_weight > 0].numpy(), 1)
losses, unigram = -np.log(counts / counts.sum()), keras.metrics.Mean()
for _, y, sample_weight in validation_ds:
    unigram.update_state(losses[y.numpy()], sample_weight)
loss = model.evaluate(validation_ds, verbose=0, return_dict=True)["token_loss"]
print(f"validation loss {loss:.3f}, unigram baseline {unigram.result():.3f}")
assert loss < unigram.result()

"""
## Do the replicas compute what one device does?

We do four steps from the same weights, with and without the strategy, in epochs of one
step, so that `fit` reports each loss. SGD shows a wrong scale, which Adam would hide.
"""

same_batches = train_ds.take(4).cache()
list(same_batches)
tf.config.experimental.enable_tensor_float_32_execution(False)  # as exact on GPUs
reduction = "mean_with_sample_weight"  # as right as Keras's own can be
for kind in (keras.losses.SparseCategoricalCrossentropy, GlobalCrossEntropy):
    losses, loss = [], kind(from_logits=True, reduction=reduction)
    for each in (tf.distribute.get_strategy(), strategy):
        with each.scope():
            model = build_model(keras.optimizers.SGD(0.5), loss)
        model.set_weights(initial_weights)
        options = {"epochs": 4, "steps_per_epoch": 1, "shuffle": False, "verbose": 0}
        losses.append(np.array(model.fit(same_batches, **options).history["loss"]))
    difference = np.max(np.abs(losses[1] / losses[0] - 1))
    print(f"{kind.__name__}: relative difference at most {difference:.0e}")
assert difference < 1e-6

"""
## Beyond this guide

Do not set `jit_compile` ([#19005](https://github.com/keras-team/keras/issues/19005)),
`steps_per_execution` or `gradient_accumulation_steps`: they fail under a strategy
([#20582](https://github.com/keras-team/keras/issues/20582)). So does `fit` on several
machines ([#20585](https://github.com/keras-team/keras/issues/20585)), where a loop around
`strategy.run` with the loss above works.
"""
