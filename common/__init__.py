# SPDX-License-Identifier: Apache-2.0
"""What the recipes share: small modules of plain functions, in rooms between which imports run one way."""
