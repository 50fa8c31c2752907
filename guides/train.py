"""A plain Keras program, made right on N replicas, resumable, and ready for several workers."""

import sys

import keras
import keras_replicas as kr
import numpy as np

x = np.random.default_rng(0).normal(size=(1000, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")

keras.utils.set_random_seed(0)
# 1. The strategy: all GPUs, or the CPU as two devices; or N replicas, if N is given.
strategy = kr.make_strategy(*map(int, sys.argv[1:]))
with strategy.scope():
    layers = [keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model = kr.data_parallel(model)  # 2. right on N replicas

# 3. Killed and started again, it goes on where it was, to the bit.
checkpoints = kr.Checkpoints("checkpoints", every=10)
model.fit(x, y, batch_size=64, epochs=5, callbacks=[checkpoints], verbose=2)
print(*model.evaluate(x, y, verbose=0))
