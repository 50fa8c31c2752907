# SPDX-License-Identifier: Apache-2.0
"""Corpora from the Hugging Face Hub, by the `datasets` library, which takes a second to import."""

from typing import Any

from common.errors import UserError

HUB = "hf://"


def hub_builder(name: str, configuration: str | None = None) -> Any:
    """The library's builder of a data set, which describes it without downloading it.

    Raises:
        UserError: when it cannot be fetched.
    """
    return _fetched("--corpus", name, "load_dataset_builder", name, configuration)


def hub_splits(
    name: str, configuration: str | None = None, streaming: bool = False, option: str = "--corpus"
) -> dict[str, Any]:
    """The splits of a data set: iterables of rows, which are dicts.

    Args:
        name: `user/name`, or a local folder of files that the library reads.
        configuration: of the data set, where it has several.
        streaming: read rows on demand; otherwise the whole data set is kept on disk.
        option: of the recipe, by which a folder can be given instead.

    Raises:
        UserError: when it cannot be fetched.
    """
    return _fetched(option, name, "load_dataset", name, configuration, streaming=streaming)


def parse_hub_name(corpus: str) -> tuple[str, str | None]:
    """`hf://user/name` and `hf://user/name/configuration`, or `hf://` and a local path: name and configuration.

    Raises:
        UserError: when it is none of these.
    """
    name = corpus.removeprefix(HUB)
    if name.startswith(("/", ".")):
        return name, None
    parts = name.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise UserError(f"--corpus {corpus} must be {HUB}user/name or {HUB}user/name/configuration")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


def _fetched(option: str, name: str, function: str, *arguments, **options) -> Any:
    import datasets

    try:
        return getattr(datasets, function)(*arguments, **options)
    except Exception as error:  # the library raises a dozen unrelated types when the hub is out of reach
        raise UserError(
            f"cannot fetch {name} from the Hugging Face Hub ({type(error).__name__}: {str(error).splitlines()[0]}). "
            f"Without a network, download its files elsewhere and give their folder: {option} FOLDER"
        ) from error
