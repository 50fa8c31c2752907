# SPDX-License-Identifier: Apache-2.0
"""One run from its command line to its results: folder, checkpoints, log, report. Builds no model, reads no text."""
