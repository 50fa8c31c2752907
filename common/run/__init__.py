# SPDX-License-Identifier: Apache-2.0
"""One run from its command line to its results: work directory, checkpoints, log, report. No models, no text."""
