# SPDX-License-Identifier: Apache-2.0
"""The files of a preset, and the class of task that suits its backbone: KerasHub has no public way to either."""

import json
import re
from pathlib import Path
from typing import Any

import keras_hub


def get_file(preset: str, name: str) -> Path:
    """The path of a preset's file, fetched first if it is not on this machine.

    Args:
        preset: a folder, `hf://user/name`, `kaggle://...`, or a name that KerasHub knows.
        name: of the file in it, such as `config.json`.

    Raises:
        FileNotFoundError: when the preset has no such file.
        ValueError: when there is no such preset.
        OSError, RuntimeError: when it cannot be fetched.
    """
    known = keras_hub.models.Backbone.presets | keras_hub.models.Task.presets
    handle = known[preset]["kaggle_handle"] if preset in known else preset
    if handle.startswith("kaggle://"):
        import kagglehub

        try:
            return Path(kagglehub.model_download(handle.removeprefix("kaggle://"), name))
        except (OSError, ValueError) as error:  # Kaggle answers 403 for what needs its terms to be accepted
            if not re.search("40[34] Client Error|is not present in the model files", str(error)):
                raise
            raise FileNotFoundError(f"{preset} has no {name}, or Kaggle asks to accept its terms first") from error
    if handle.startswith("hf://"):
        import huggingface_hub

        try:
            return Path(huggingface_hub.hf_hub_download(handle.removeprefix("hf://"), name))
        except huggingface_hub.errors.EntryNotFoundError as error:
            raise FileNotFoundError(f"{preset} has no {name}") from error
    if not Path(handle).is_dir():
        raise ValueError(f"there is no preset {preset}")
    if not (path := Path(handle, name)).is_file():
        raise FileNotFoundError(f"{preset} has no {name}")
    return path


def has_file(preset: str, name: str) -> bool:
    """Whether a preset has a file; errors are those of `get_file`, but for one that is not there."""
    try:
        get_file(preset, name)
    except FileNotFoundError:
        return False
    return True


def load_json(preset: str, name: str = "config.json") -> Any:
    """What a preset's JSON file holds; errors are those of `get_file`."""
    return json.loads(get_file(preset, name).read_text(encoding="utf-8"))


def task_class(kind: Any, backbone_class: type) -> Any:
    """KerasHub's class of that kind of task, such as `TextClassifier`, for a class of backbone.

    Raises:
        ValueError: when KerasHub has none.
    """
    tasks: list[Any] = [each for each in vars(keras_hub.models).values() if isinstance(each, type)]
    classes = [each for each in tasks if issubclass(each, kind) and each.backbone_cls is backbone_class]
    if not classes:
        raise ValueError(f"KerasHub has no {kind.__name__} for a {backbone_class.__name__}")
    return min(classes, key=lambda each: len(each.__name__))  # Gemma4CausalLM, not Gemma4AssistantCausalLM
