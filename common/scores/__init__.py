# SPDX-License-Identifier: Apache-2.0
"""Metrics of a model, and the baselines to compare it with. No devices."""
