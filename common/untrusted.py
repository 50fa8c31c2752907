# SPDX-License-Identifier: Apache-2.0
"""What a preset and a run may hold, whoever wrote them: it is looked at before anything in them is opened or built.

These are lists of what is allowed, not of attacks: classes, names, links, sizes. Nothing here imports TensorFlow.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

from keras_replicas import UserError

from .files import MALFORMED

SMALL = 40 * 2**20  # bytes of any file but weights and logs: the largest tokenizer.json has 33 million
LOG = 2**30  # bytes of a run's steps.jsonl
WEIGHTS = re.compile(r"(model|task|model_\d+)\.weights\.h5|adapters\.lora\.h5|model(-\d+-of-\d+)?\.safetensors")
CHECKPOINTS = re.compile(r"(ckpt-\d+|end)(_temp|\.index|\.data-\d+-of-\d+)|fit-\d+|\..*")
INERT = {"", ".json", ".h5", ".txt", ".md", ".model", ".spm", ".safetensors", ".csv", ".tsv", ".png", ".jpg", ".svg"}
INDICES = ("model.weights.json", "model.safetensors.index.json")  # of divided weights
ASSETS = ("vocabulary", "merges", "proto")  # of a tokenizer, which opens a path that is given in their place
# In the config of a model: its width, its layers and their inner width, as KerasHub and transformers call them.
WIDTHS = ("hidden_dim", "hidden_size", "n_embd", "dim", "d_model")
LAYERS, INNER = ("num_layers", "num_hidden_layers", "n_layer", "n_layers"), ("intermediate_dim", "intermediate_size")


def check_preset(folder: Path) -> None:
    """Raises a UserError unless a preset, in KerasHub's form or Hugging Face's, holds only what it may.

    The folder may be a link. Those in it must lead to its own files or, in the cache of the Hub, to the blobs beside.
    """
    root = folder.resolve()
    homes = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    try:
        files = [path for path in _paths(root) if _is_file(path, homes)]
        weights = sum(path.stat().st_size for path in files if WEIGHTS.fullmatch(path.name))
        heads = [read_json(root / name) for name in ("config.json", "tokenizer.json") if root / name in files]
        own = any("registered_name" in head for head in heads)  # KerasHub's form; of rows, a tokenizer alone
        for path in files:
            name, ending = path.relative_to(root).as_posix(), path.suffix.lower()
            if own and ending not in INERT:
                raise ValueError(f"{name} is no part of a preset: remove it")
            if WEIGHTS.fullmatch(name) and ending == ".h5":
                _check_hdf5(path)
            elif name == path.name and ending == ".json":
                _check_json(name, read_json(path), own, weights)
            elif not WEIGHTS.fullmatch(name) and (own or name == path.name and ending in (".txt", ".model")):
                _check_bytes(path)
    except (*MALFORMED, RuntimeError) as error:  # h5py's, too
        raise UserError(f"the preset {folder} is refused: {str(error).splitlines()[0]}") from error


def check_run(folder: Path) -> None:
    """Raises a UserError where a run has a link, a file larger than any run's, or another file among its checkpoints.

    The folder may be a link, and so may `checkpoints` in it, to a folder of checkpoints or an empty one.
    """
    checkpoints = folder / "checkpoints"
    for path in [*_paths(folder), *(_paths(checkpoints) if checkpoints.is_symlink() else ())]:
        if path.is_symlink() and path != checkpoints:
            raise UserError(f"{path} is a link, and could lead anywhere: put the file itself there")
        if path.parent == checkpoints and not CHECKPOINTS.fullmatch(path.name):
            raise UserError(f"{path} is no checkpoint: remove it")
    for name, most in {"config.json": SMALL, "results.json": SMALL, "steps.jsonl": LOG}.items():
        if os.path.lexists(folder / name):
            _check_bytes(folder / name, most)


def read_json(path: Path) -> Any:
    """What a JSON file holds; a UserError or OSError when it is too large, nested too deeply, or no JSON."""
    _check_bytes(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.name} is no JSON ({error})") from error


def _paths(folder: Path) -> Iterator[Path]:
    """All files and folders, and links to them, but for hidden ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in [*folders, *names] if not name.startswith("."))


def _is_file(path: Path, homes: list[Path]) -> bool:
    target = path.resolve()
    if path.is_symlink() and (target.is_dir() or not any(map(target.is_relative_to, homes))):
        raise ValueError(f"{path.name} is a link that leaves it: put the file itself there")
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{path.name} is no file")
    return path.is_file()


def _check_bytes(path: Path, most: int = SMALL) -> None:
    if not path.is_file() or path.stat().st_size > most:
        raise UserError(f"{path} is no file of at most {most:,} bytes")


def _check_json(file: str, content: Any, own: bool, weights: int) -> None:
    """What Keras makes of it must be of KerasHub, or a policy of dtypes; of a size to be expected; and files beside it.

    A model much larger than its weights would take memory before it is found that they are of another.
    """
    parts = [content]
    for part in parts:  # which grows
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    for part in (each for each in parts if isinstance(each, dict)):
        module, name, registered = (part.get(key) for key in ("module", "class_name", "registered_name"))
        package = str(module).split(".")[0]
        if (own and "class_name" in part) and not (
            (package in ("keras_hub", "keras_nlp") and registered == f"{package}>{name}")
            or (module == "keras" and registered is None and re.fullmatch(r"\w*DTypePolicy(Map)?", str(name)))
        ):
            raise ValueError(f"{file} names {module}.{name}, which is no class of KerasHub's models of text")
        if own and ("/" in str(part.get("name")) or any(isinstance(part.get(key), str) for key in ASSETS)):
            raise ValueError(f"{file} has a path in place of a name, or of a vocabulary among the assets")
        width, layers, inner = ([part[key] for key in keys if key in part] or [0] for keys in (WIDTHS, LAYERS, INNER))
        counts = [width[0] * count for count in part.values() if isinstance(count, int)]
        if max([width[0] * layers[0] * inner[0], *counts]) > 8 * weights + 2**23 and file in (
            "config.json",
            "task.json",
        ):
            raise ValueError(f"{file} is of a model much larger than its weights of {weights:,} bytes")
    for names in content["weight_map"].values() if file in INDICES else ():
        if not all(map(WEIGHTS.fullmatch, names if isinstance(names, list) else [names])):
            raise ValueError(f"{file} names {names!r}, which is no file of weights beside it")


def _check_hdf5(path: Path) -> None:
    """It must be as Keras writes weights: groups, and arrays of numbers that are whole in this very file."""
    with h5py.File(path, "r") as file:
        groups, seen, room = [file["/"]], set[int](), path.stat().st_size
        while groups:
            group = groups.pop()
            for name in group:
                is_own = isinstance(group.get(name, getlink=True), h5py.HardLink)
                item = group[name] if is_own else None
                address = h5py.h5o.get_info(item.id).addr if item else 0
                if isinstance(item, h5py.Group) and address not in seen:
                    groups.append(item)
                elif isinstance(item, h5py.Dataset):
                    is_own = not (item.external or item.is_virtual or item.chunks) and item.dtype.kind in "biufV"
                    room -= math.prod(item.shape or ()) * item.dtype.itemsize
                if not is_own or room < 0:
                    raise ValueError(f"{path.name} has {group.name + name!r}, which is no array of numbers in this file")
                seen.add(address)
        if "model_config" in file.attrs:
            raise ValueError(f"{path.name} is a whole model, not weights alone")
