# SPDX-License-Identifier: Apache-2.0
"""What the recipes share: small modules of plain functions, in subpackages with one-way imports."""
