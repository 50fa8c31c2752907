# SPDX-License-Identifier: Apache-2.0
"""The error for wrong input."""


class UserError(ValueError):
    """Wrong input. The message says how to mend it; a command prints it in one line, and exits with status 2."""
