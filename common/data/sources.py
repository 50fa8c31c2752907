# SPDX-License-Identifier: Apache-2.0
"""Where texts come from: streams of documents, and the Hugging Face Hub."""

from collections.abc import Callable, Iterator
from typing import Any

from keras_replicas import UserError

Documents = Callable[[], Iterator[str]]  # opens a new stream of them


def from_hub(function: str, name: str, configuration: str | None, option: str = "--corpus", **options) -> Any:
    """What a function of the `datasets` library returns for a data set on the Hugging Face Hub.

    Args:
        function: `load_dataset`, for a dict of splits, iterables of rows, which are dicts (with the option `streaming`,
            rows come on demand); or `load_dataset_builder`, which downloads no data.
        name: the name of the data set, or a local folder of files that the library reads.
        configuration: the one to use, if the data set has several.
        option: the recipe's option by which a folder can be given instead.
        options: passed to the function.

    Raises:
        UserError: when it cannot be fetched.
    """
    import datasets  # not above: it takes a second

    try:
        return getattr(datasets, function)(name, configuration, **options)
    except Exception as error:  # the library raises a dozen unrelated types when the hub is out of reach
        raise UserError(
            f"cannot fetch {name} from the Hugging Face Hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            f"Without a network, download its files elsewhere and give their folder: {option} FOLDER"
        ) from error
