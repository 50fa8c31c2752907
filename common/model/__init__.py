# SPDX-License-Identifier: Apache-2.0
"""Models: sizes, presets, heads; saved, exported, published. Knows no run; training is Keras's business."""
