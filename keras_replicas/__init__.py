# SPDX-License-Identifier: Apache-2.0
"""Keras 3's `fit`, `evaluate` and `predict`, right on N replicas under `tf.distribute`."""
