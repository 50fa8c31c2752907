# SPDX-License-Identifier: Apache-2.0
"""Keras's `fit`, made right on N replicas: trainer, losses, optimizers, rates. Knows no recipe, no text and no run."""
