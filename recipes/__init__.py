# SPDX-License-Identifier: Apache-2.0
"""Training recipes: each file is one recipe, a page to run, read and copy."""
