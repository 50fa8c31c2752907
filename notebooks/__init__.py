# SPDX-License-Identifier: Apache-2.0
"""Notebooks, generated from the recipes and from a narrative beside each."""
