# SPDX-License-Identifier: Apache-2.0
"""Models: sizes, presets, heads; saved and published. No runs; Keras does the training."""
