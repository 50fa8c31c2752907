# SPDX-License-Identifier: Apache-2.0
"""The error of invalid user input."""


class UserError(Exception):
    """Invalid user input. The message says how to fix it; a command prints it and exits with status 2."""


def first_line(error: Exception) -> str:
    """The first line of an error, without the list of examples that KerasHub starts in the middle of it."""
    return str(error).splitlines()[0].removesuffix(" A preset must be a one of:")
