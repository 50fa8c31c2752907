# SPDX-License-Identifier: Apache-2.0
"""Devices and machines: which there are, how workers find and tell each other. Knows no data and no model."""
