# SPDX-License-Identifier: Apache-2.0
"""What a model is worth: scores, and the baselines that it is held against. Knows no device."""
