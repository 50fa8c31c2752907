# SPDX-License-Identifier: Apache-2.0
"""Keras's `fit`, corrected for N replicas: trainer, losses, optimizers, schedules. No recipes, no text, no runs."""
