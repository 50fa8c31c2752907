# SPDX-License-Identifier: Apache-2.0
"""The error for what a user can put right."""


class UserError(ValueError):
    """Wrong input. The message says in one line how to put it right; a command prints it, and exits with status 2."""


def first_line(error: Exception) -> str:
    """The first line of an error, without the words that introduce KerasHub's list of examples."""
    return str(error).splitlines()[0].removesuffix(" A preset must be a one of:")
