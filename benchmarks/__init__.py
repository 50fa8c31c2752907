# SPDX-License-Identifier: Apache-2.0
"""The measurements behind the figures in the README and in docs/."""
