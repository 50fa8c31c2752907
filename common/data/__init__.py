# SPDX-License-Identifier: Apache-2.0
"""Text, from a corpus to batches: corpora, vocabularies, tokens, order, masks. No models, no devices, no runs."""
