# SPDX-License-Identifier: Apache-2.0
"""Small programs after the published ones of keras.io, written anew.

`PROGRAMS` has them by their folder and name on keras.io; `compare` trains one on N replicas and in
plain Keras on one device. `python -m benchmarks.published --replicas 2 generative/vae` prints the
comparison of a program, or of all if none is named.

A program keeps what the published one does: how its model is built, compiled and called, the form
of its data, where its losses come from, what each metric gets, and of a `train_step` of its own
what it returns, assigns and draws, and how it calls its optimizers. Networks, images and data are
cut to a few units. Optimizers are SGD instead of Adam, RMSprop or LAMB, because these hide a wrong
scale of the gradients. Dropout has rate 0, and Keras's augmentation layers change nothing: their
factors are 0, and images are symmetric.
"""

from benchmarks.published import (
    generative_steps,
    graph_models,
    nlp_models,
    other_models,
    other_steps,
    vision_models,
    vision_steps,
)
from benchmarks.published.programs import BOUNDS, PROGRAMS, Comparison, compare, model_and_data

__all__ = [
    "BOUNDS",
    "PROGRAMS",
    "Comparison",
    "compare",
    "generative_steps",
    "graph_models",
    "model_and_data",
    "nlp_models",
    "other_models",
    "other_steps",
    "vision_models",
    "vision_steps",
]
