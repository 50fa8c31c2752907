# SPDX-License-Identifier: Apache-2.0
"""The error for what a user can put right."""


class UserError(ValueError):
    """A `ValueError`: wrong input.

    The message says in one line how to put it right; a command prints it, and exits with status 2.
    """
