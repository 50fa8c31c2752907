# SPDX-License-Identifier: Apache-2.0
"""The error for invalid user input."""


class UserError(Exception):
    """Invalid user input. The message says how to fix it; a command prints it and exits with status 2."""


def first_line(error: Exception) -> str:
    """The first line of an error."""
    return str(error).splitlines()[0]
