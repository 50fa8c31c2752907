# SPDX-License-Identifier: Apache-2.0
"""How a helper says that what the user asked for cannot be done."""


class UserError(Exception):
    """The user's input is wrong. The message says how to mend it; a command ends with it and exit status 2."""


def first_line(error: Exception) -> str:
    """What another package says, without the list of examples that KerasHub begins in the middle of its first line."""
    return str(error).splitlines()[0].removesuffix(" A preset must be a one of:")
