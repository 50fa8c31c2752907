# SPDX-License-Identifier: Apache-2.0
"""What is told of other packages' errors."""


def first_line(error: Exception) -> str:
    """The first line of an error, without the words that introduce KerasHub's list of examples."""
    return str(error).splitlines()[0].removesuffix(" A preset must be a one of:")
