# SPDX-License-Identifier: Apache-2.0
"""Text, from a corpus to batches: corpora, vocabularies, tokens, order, masks. Knows no model, no device and no run."""
