# SPDX-License-Identifier: Apache-2.0
"""Devices and machines: device selection, and how workers find and talk to each other. No data, no models."""
