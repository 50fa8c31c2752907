"""A plain Keras program, made data-parallel, resumable and ready for several workers in three steps."""

import sys

import keras
import keras_replicas as kr
import numpy as np

x = np.random.default_rng(0).normal(size=(1000, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")

keras.utils.set_random_seed(0)
strategy = kr.make_strategy(
    *map(int, sys.argv[1:])
)  # 1. GPUs, or the CPU as two devices; N replicas, if given
with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(2)]
    )
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = kr.data_parallel(model)  # 2. right on N replicas

checkpoints = kr.Checkpoints(
    "checkpoints", every=10
)  # 3. killed, it goes on where it was, to the bit
model.fit(x, y, batch_size=64, epochs=5, callbacks=[checkpoints], verbose=2)
print(*model.evaluate(x, y, verbose=0))
